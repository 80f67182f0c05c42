"""Digest of how this machine rounds: last bits are recorded with it, and asked for where it agrees.

Names of CPUs and of their kernels are too coarse for that: two machines that torch calls AVX512
differ where one of them also has AMX. What counts is what comes out.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
import torch.nn.functional as F

SIZES = (8, 24, 32, 65, 128, 300)
"""Widths of the products: below, at and beyond the tiles of the libraries."""


def arithmetic_digest() -> str:
    """Return the first digits of the SHA-256 of the results of canonical operations.

    They are those whose bits a training's depend on: products, their gradients, softmax, norms,
    reductions, a step of Newton-Schulz, attention; and numpy's for the bank.
    """
    results = [*_torch_results(), *map(torch.from_numpy, _numpy_results())]
    content = b"".join(result.contiguous().numpy().tobytes() for result in results)
    return hashlib.sha256(content).hexdigest()[:16]


def _numbers(*shape: int) -> torch.Tensor:
    """Return the same numbers on every machine: quotients that are rounded once, no logarithms."""
    count = int(np.prod(shape))
    residues = torch.arange(1, count + 1, dtype=torch.int64) * 7919 % 10007
    return ((residues - 5003).to(torch.float64) / 5003).to(torch.float32).reshape(shape)


def _torch_results() -> list[torch.Tensor]:
    results: list[torch.Tensor] = []
    for size in SIZES:
        inputs = _numbers(48, size).requires_grad_()
        weight = _numbers(2 * size, size).requires_grad_()
        hidden = F.gelu(F.layer_norm(inputs, (size,))) @ weight.t()
        loss = F.cross_entropy(hidden, torch.arange(48) % size)
        loss.backward()
        assert inputs.grad is not None and weight.grad is not None
        results += [hidden.detach(), loss.detach(), inputs.grad, weight.grad]
        results += [weight.grad.norm(), weight.grad.double().square().sum()]
        results.append(_newton_schulz_step(weight.detach()))
    query, key, value = (_numbers(2, 4, 32, 16) * scale for scale in (1.0, 0.7, 0.4))
    results.append(F.scaled_dot_product_attention(query, key, value, is_causal=True))
    results.append((query @ key.transpose(-1, -2)).softmax(-1) @ value)
    return results


def _newton_schulz_step(matrix: torch.Tensor) -> torch.Tensor:
    matrix = matrix / matrix.norm()
    gram = matrix.t() @ matrix
    return 3.4445 * matrix + matrix @ (-4.775 * gram + 2.0315 * gram @ gram)


def _numpy_results() -> list[np.ndarray]:
    matrices = [_numbers(size, 2 * size).double().numpy() for size in SIZES[:4]]
    products = [matrix @ matrix.T for matrix in matrices]
    factors = [np.linalg.svd(matrix, full_matrices=False)[0] for matrix in matrices]
    return products + factors
