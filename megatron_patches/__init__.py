"""The method: frozen per-head orthonormal Query/Key projections.

Read `attention.projections` first. The packages:

bank       rows of frozen Query/Key projections, and products with structured ones
recipe     variants of attention as data, their recipes and tensors at the sizes of a model
engine     services below the layers: random streams, collectives, recomputation, freezing,
           compatibility with versions
attention  attention modules, from hidden states to context vectors
model      a policy's layers and model, their initial values and losses
errors     the error for requests that a user can correct
"""
