"""Config -> samples.

inputs   refusals before ranks meet: shards, tokenizer, layout, prompts
open     training and validation data of a run
prompts  prompts for continuations at validations, in ids
batches  micro batches of a step, read ahead
"""
