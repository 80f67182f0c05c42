"""The frozen bank: (seed, layer, role, head) -> rows, a rank's rows, and products with them.

exact                 linear algebra in float64 whose bits depend on no BLAS, CPU or thread count
structured            signed rows of Hadamard and cosine matrices
factors               two sets of small orthogonal blocks for a whole layer
gaussian              rounded Gaussian matrices, and orthonormal rows made of them by LAPACK
orthonormal           recipe of a bank, its random streams, its rows
initial_weights_file  rows and other initial weights of a model that was trained before
head_split            heads of a tensor-parallel rank, and which of them have frozen rows
shards                rows of a tensor-parallel rank, their digests
monarch               products with structured rows, as two batched products
"""
