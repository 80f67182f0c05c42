"""Config -> samples.

open     what is refused before a rank starts; training and validation data of a run
prompts  prompts for continuations at validations, in ids
dataset  training samples as a dataset of torch
batches  micro batches of a step, read ahead
"""
