"""Config -> model.

build                megatron-core's GPTModel with the chosen attention, and the loss per token
packing              documents that share a sample and must not see each other
"""
