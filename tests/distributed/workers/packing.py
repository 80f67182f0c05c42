"""Rank functions of test_packing.py.

Two hand-made documents in one sample beside each of them alone.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_patches.engine.freeze import reduce_partial_gradients
from pretrain.config.load import load_config
from pretrain.config.tree import Config
from pretrain.model.build import build_model, token_losses
from pretrain.model.packing import document_layout
from pretrain.ranks.groups import ParallelContext, set_seeds
from tests.distributed.one_layer import worst_difference
from tests.distributed.workers.runs import parallel
from tests.tiny import tiny_overrides

EOD = 2
FIRST = [17, 201, 33, 400, 5, EOD]  # even lengths: sequence parallelism halves them
SECOND = [301, 44, 44, 12, 499, 7, 80, 81, 82, 83]
TARGET = 84  # what follows the second document's last input


def cases(payload: dict[str, Any]) -> list[dict[str, float]]:
    """Return a report for each case: the largest differences on any rank."""
    with parallel() as context:
        return [_case(context, **case) for case in payload["cases"]]


def _case(
    context: ParallelContext, variant: str, positions: str, groups: int, sequence_parallel: bool
) -> dict[str, float]:
    config = _config(
        context, variant, positions=positions, groups=groups, sequence_parallel=sequence_parallel
    )
    model = build_model(config, context)
    reduce_partial_gradients(model, context.tensor_parallel_group)
    # No dropout, but megatron-core asks.
    set_seeds(config.run.seed, 1, 0, context.tensor_parallel_rank)
    packed = [*FIRST, *SECOND]
    changed = [*FIRST]
    changed[1] += 1
    whole = _logits(model, packed, EOD)
    other = _logits(model, [*changed, *SECOND], EOD)
    alone = torch.cat([_logits(model, FIRST, EOD), _logits(model, SECOND, EOD)])
    as_one_text = _logits(model, packed, None)
    first = slice(0, len(FIRST))
    second = slice(len(FIRST), None)

    together = _gradients(model, [[*packed, TARGET]])
    apart = _gradients(model, [[*FIRST, SECOND[0]], [*SECOND, TARGET]])
    leaking = _gradients(model, [[*packed, TARGET]], None)
    return {
        "logits": worst_difference(whole, alone),
        "second, first changed": worst_difference(whole[second], other[second]),
        "first, itself changed": worst_difference(whole[first], other[first]),
        "gradients": max(worst_difference(together[name], apart[name]) for name in apart),
        "largest gradient": max(worst_difference(apart[name], torch.zeros(1)) for name in apart),
        "logits as one text": worst_difference(as_one_text, alone),
        "gradients as one text": max(
            worst_difference(leaking[name], apart[name]) for name in apart
        ),
    }


def _config(
    context: ParallelContext, variant: str, positions: str, groups: int, sequence_parallel: bool
) -> Config:
    changes: dict[str, object] = {
        "attention__variant": variant,
        "model__position_embedding": positions,
        "model__num_query_groups": groups,
        "model__init_std": 0.2,  # so that attention is far from uniform and a leak is large
        "data__sequence_length": len(FIRST) + len(SECOND),
        "parallel__tensor_model_parallel_size": context.tensor_parallel_size,
        "parallel__sequence_parallel": str(sequence_parallel).lower(),
    }
    return load_config("demo", tiny_overrides("none", "none", "packing", **changes))  # type: ignore[arg-type]


def _logits(model: torch.nn.Module, inputs: list[int], boundary: int | None) -> torch.Tensor:
    """`[seq, this rank's vocabulary]`."""
    ids = torch.tensor([inputs])
    with torch.no_grad():
        if boundary is None:
            return model(ids, torch.arange(len(inputs))[None], None)[0]
        layout = document_layout(ids, boundary)
        return model(ids, layout.positions, layout.documents)[0]


def _gradients(
    model: torch.nn.Module, samples: list[list[int]], boundary: int | None = EOD
) -> dict[str, torch.Tensor]:
    """Gradients of the sum of the losses over some samples, of different lengths perhaps."""
    model.zero_grad()
    for sample in samples:
        token_losses(model, torch.tensor([sample]), boundary).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
