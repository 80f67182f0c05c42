"""The weights' update: optimizers for DeepSpeed, and the sums and exchanges that they need.

optimizers      rules over parameter groups, AdamW among them; norms and clipping
muon            Muon for the matrices of the layers, AdamW for the rest
ownership       which rank orthogonalises which matrix, and what ranks send each other for it
orthogonalise   Newton-Schulz iterations, and copies between flat tensors and stacks of matrices
reduction       gradients summed over data-parallel ranks during the backward pass
"""
