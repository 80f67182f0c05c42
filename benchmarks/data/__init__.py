"""Text to samples, measured.

tokenizing         the command: tokenising beside its peers
tokenizing_report  its tables
pipeline_run       our contestant, in a process of its own
bare_loop          the tokenizer alone
datasets_map       `datasets`
megatron_run       Megatron-LM's tools
clocks             seconds without imports
corpus_text        the text
open_shards        opening a directory of 100 billion tokens
samples            the order of samples, and reading them
"""
