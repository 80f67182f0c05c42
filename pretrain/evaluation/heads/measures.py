"""How alike attention heads are: cosines, angles between row spaces, divergence of what they attend to.

Pure functions of tensors; H heads, d = head_dim, n = hidden_size, t queries, s keys.
"""

from __future__ import annotations

import torch


def flat_cosines(weights: torch.Tensor) -> torch.Tensor:
    """cos(vec W_g, vec W_h) of every two heads: `[H, d, n]` -> `[H, H]`."""
    flat = torch.nn.functional.normalize(weights.flatten(1), dim=1)
    return flat @ flat.t()


def row_cosines(weights: torch.Tensor) -> torch.Tensor:
    """Cosine of every row of one head with every row of another: `[H, d, n]` -> `[H, H, d, d]`."""
    rows = torch.nn.functional.normalize(weights, dim=2)
    return torch.einsum("gin,hjn->ghij", rows, rows)


def principal_angles(weights: torch.Tensor) -> torch.Tensor:
    """Principal angles between the row spaces of every two heads, ascending, in degrees.

    With U_g, U_h orthonormal bases of the row spaces, cos θ_1 ≥ … ≥ cos θ_d are the singular values of
    U_gᵀ U_h (Björck and Golub 1973). Angles below a hundred-thousandth of a degree come out as that or 0.
    Row spaces of one random draw each have a mean cos² θ of d/n.

    Args:
        weights: `[H, d, n]` of full row rank, d ≤ n; float64 for the accuracy above.

    Returns:
        `[H, H, d]`.
    """
    bases = torch.linalg.qr(weights.transpose(1, 2)).Q  # [H, n, d]
    cosines = torch.linalg.svdvals(torch.einsum("gni,hnj->ghij", bases, bases))
    return torch.rad2deg(torch.arccos(cosines.clamp(max=1.0)))


def pairwise_divergence(probabilities: torch.Tensor) -> torch.Tensor:
    """KL(p_g ‖ p_h) = Σ_s p_g(s) ln(p_g(s) / p_h(s)), in nats, of every two heads' distributions.

    Args:
        probabilities: `[..., H, t, s]`. A probability that underflowed to 0 counts as the smallest normal
            number of its type where it is in the denominator, which bounds what is infinite.

    Returns:
        `[..., t, H, H]`.
    """
    p = probabilities.movedim(-3, -2)  # [..., t, H, s]
    smallest = torch.finfo(p.dtype).tiny
    log = p.clamp(min=smallest).log()
    own = (p * log).sum(-1, keepdim=True)
    return own - p @ log.transpose(-1, -2)


def entropy(probabilities: torch.Tensor) -> torch.Tensor:
    """−Σ_s p(s) ln p(s), in nats: `[..., s]` -> `[...]`; ln n where n keys are attended to uniformly."""
    return torch.special.entr(probabilities).sum(-1)


def between_heads(pairs: torch.Tensor) -> torch.Tensor:
    """The entries of two different heads: `[H, H, ...]` -> `[H (H − 1), ...]`, both orders."""
    return pairs[~torch.eye(len(pairs), dtype=torch.bool, device=pairs.device)]
