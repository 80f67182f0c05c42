"""Services for layers and trainings, below any layer.

compat          supported versions of megatron-core and torch, stand-ins for CUDA on a CPU
freeze          parameter groups for DeepSpeed, partial gradients, the audit of a live engine
zero_state      parameters, gradients and states of a live optimizer, at any ZeRO stage
random_streams  streams of initial values and of dropout
collectives     collectives of parallel products, eager or traced by a compiler
documents       attention of documents that share a sample
recompute       recomputation of activations in backward
"""
