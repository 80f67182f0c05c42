"""Loss on held-out text, source by source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from data_pipeline.samples import ValidationSamples
from pretrain.config import Config
from pretrain.distributed import ParallelContext
from pretrain.model import token_losses

Losses = Mapping[str, tuple[float, int]]
"""{source: (sum of the token losses in nats, number of tokens)}"""


def held_out_losses(
    engine: Any, sources: Mapping[str, ValidationSamples], config: Config, context: ParallelContext
) -> Losses:
    """Total loss on each source's held-out samples (collective): always the same samples, no dropout."""
    engine.eval()
    totals = torch.zeros(len(sources), dtype=torch.float64, device=context.device)
    with torch.no_grad():
        for position, samples in enumerate(sources.values()):
            totals[position] = _rank_loss(engine, samples, config.data.micro_batch_size, context)
    engine.train()
    dist.all_reduce(totals)
    losses = (
        totals / context.tensor_parallel_size
    ).tolist()  # tensor-parallel ranks counted the same samples
    tokens = [len(samples) * config.data.sequence_length for samples in sources.values()]
    return {source: (loss, count) for source, loss, count in zip(sources, losses, tokens, strict=True)}


def _rank_loss(
    engine: Any, samples: ValidationSamples, micro_batch_size: int, context: ParallelContext
) -> torch.Tensor:
    """Sum of the losses of this data-parallel rank's share.

    Every rank makes the same number of forward passes (ZeRO-3 gathers weights in each), so a share that comes
    out short is filled with sample 0 at weight zero.
    """
    total = torch.zeros((), dtype=torch.float64, device=context.device)
    round_size = micro_batch_size * context.data_parallel_size
    for first in range(0, len(samples), round_size):
        numbers = first + context.data_parallel_rank * micro_batch_size + np.arange(micro_batch_size)
        real = numbers < len(samples)
        tokens = torch.from_numpy(samples.blocks(np.where(real, numbers, 0))).to(context.device)
        losses = token_losses(engine, tokens).sum(dim=1, dtype=torch.float64)
        total += losses @ torch.from_numpy(real.astype(np.float64)).to(context.device)
    return total
