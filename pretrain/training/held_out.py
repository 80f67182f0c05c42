"""Loss on held-out text, source by source."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pretrain.config.tree import Config
from pretrain.data.open import RunData
from pretrain.model.build import token_losses
from pretrain.model.packing import count_predictions
from pretrain.ranks.groups import ParallelContext
from pretrain.telemetry.records import HeldOutLosses


def held_out_losses(engine: Any, data: RunData, config: Config, context: ParallelContext) -> HeldOutLosses:
    """Return the total loss on each source's held-out samples (collective): always the same, no dropout."""
    engine.eval()
    totals = torch.zeros(len(data.validation), 2, dtype=torch.float64, device=context.device)
    micro_batch = np.arange(config.data.micro_batch_size)
    for total, samples in zip(totals, data.validation.values(), strict=True):
        # Every rank makes the same number of forward passes (ZeRO-3 gathers weights in each), so a share that
        # comes out short is filled with sample 0 at weight zero.
        for first in range(0, len(samples), len(micro_batch) * context.data_parallel_size):
            numbers = first + context.data_parallel_rank * len(micro_batch) + micro_batch
            real = numbers < len(samples)
            tokens = torch.from_numpy(samples.blocks(np.where(real, numbers, 0)))
            with torch.no_grad():
                losses = token_losses(engine, tokens.to(context.device), data.boundary)
            weights = torch.from_numpy(real.astype(np.float64)).to(context.device)
            total[0] += losses.sum(dim=1, dtype=torch.float64) @ weights
            total[1] += count_predictions(tokens[torch.from_numpy(real)], data.boundary)
    engine.train()
    dist.all_reduce(totals)
    totals /= context.tensor_parallel_size  # tensor-parallel ranks counted the same samples
    return {
        source: (loss, round(count))
        for source, (loss, count) in zip(data.validation, totals.tolist(), strict=True)
    }
