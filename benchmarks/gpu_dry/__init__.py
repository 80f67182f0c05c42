"""A training step counted without a GPU, against bounds, `make gpu-dry`: see `__main__`.

pretended  the GPU that is not there
kernels    the compiled loss: what its kernels read and write
layers     a compiled layer: what its kernels move
selection  a step of everything that a configuration may combine
"""
