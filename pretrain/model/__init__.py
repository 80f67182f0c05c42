"""Config -> model.

build                megatron-core's GPTModel with the chosen attention, and the loss per token
packing              documents that share a sample and must not see each other
structured_products  choice between two ways to multiply by structured frozen rows
"""
