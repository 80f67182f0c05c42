"""Variants of attention as data.

policy    the axes of a variant
variants  the table of named variants
axes      declaration of an axis: meaning, range, rules
parts     what a part of the model and a tensor of it declare
block     declarations of the norms, MLPs, embeddings and projections: tensors, costs
adapters  declarations of the adapters: weights and costs of each
phases    notation of layers; schedule of layers that become trainable in the course of a run
recipes   policy and sizes -> recipe of its Query/Key bank, or of its score matrices
tensors   the inventory: every parameter and buffer of a model
matrices  the matrices of a tensor that Muon orthogonalises, and where a rank has them
optimizers rules of the optimizer: what each keeps of a tensor, moves and computes
counting  parameters and FLOPs: sums over the inventory
"""
