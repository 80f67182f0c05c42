"""Whether weights are fit to be saved."""

from __future__ import annotations

import math
from typing import Any

import torch

from pretrain.ranks.groups import agree


def weights_are_finite(engine: Any, device: torch.device) -> bool:
    """Whether no trained weight of any rank is NaN or infinite (collective: one number per rank).

    Frozen weights cannot change. Under ZeRO-3 a rank looks at its own part of each weight.
    """
    weights = [
        getattr(weight, "ds_tensor", weight) for weight in engine.module.parameters() if weight.requires_grad
    ]
    largest = torch.nn.utils.get_total_norm(
        [weight.detach() for weight in weights if weight.numel() > 0], norm_type=math.inf
    )
    return agree([float(not torch.isfinite(largest))], device)[0] == 0
