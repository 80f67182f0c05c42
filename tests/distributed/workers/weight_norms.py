"""Rank function of test_weight_norms.py: norms of the weights that checkpoints hold."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from pretrain.export.trained_run import load_model, open_trained_run
from pretrain.ranks.single_process import one_process


def plain(payload: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Norms of the weights at the later of two steps, of their change, and spectral norms."""
    with one_process() as context:
        earlier, after = (
            dict(
                load_model(open_trained_run(Path(payload["run"]), step), context).named_parameters()
            )
            for step in payload["steps"]
        )
    weights: dict[str, float] = defaultdict(float)
    updates: dict[str, float] = defaultdict(float)
    spectral = {}
    for name, weight in after.items():
        kind = re.sub(r"decoder\.(layers\.[0-9]+\.)?", "", name)
        weights[kind] += weight.double().square().sum().item()
        updates[kind] += (weight - earlier[name]).double().square().sum().item()
        if weight.dim() == 2:
            spectral[name] = torch.linalg.matrix_norm(weight.double(), 2).item()
    return {
        "weights": {kind: norm**0.5 for kind, norm in weights.items()},
        "updates": {kind: norm**0.5 for kind, norm in updates.items()},
        "spectral": spectral,
    }
