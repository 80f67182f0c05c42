"""Config -> samples.

open     what is refused before a rank starts; training and validation data of a run
prompts  prompts for continuations at validations, in ids
batches  micro batches of a step, read ahead
"""
