"""Config -> samples.

inputs   what is refused before ranks meet: shards, tokenizer, layout, prompts
open     the training and validation data of a run
prompts  what the model is to continue at validations, in ids
batches  the micro batches of a step, read ahead
"""
