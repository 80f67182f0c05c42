"""The model of a policy.

gpt               megatron-core's GPTModel with our output layer
parts             modules of the norms and MLPs that `recipe.block` declares
layer             attention and MLP behind norms; compiled, recomputed
linear            parallel linear layers that a compiler can trace
output            logits, and their cross-entropy without a copy in fp32
penalty           orthogonality penalty of trainable queries and keys, a term of the loss
install           policy -> megatron-core's specs of the layers
initialize        initial values of all trainable weights
"""
