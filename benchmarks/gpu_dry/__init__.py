"""A training step counted without a GPU, against bounds, `make gpu-dry`: see `__main__`.

pretended  the GPU that is not there
"""
