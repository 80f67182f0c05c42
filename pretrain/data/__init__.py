"""Config -> samples.

inputs   what is refused before ranks meet: shards, tokenizer, layout
open     the training and validation data of a run
batches  the micro batches of a step, read ahead
"""
