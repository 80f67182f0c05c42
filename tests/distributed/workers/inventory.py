"""Ranks of test_inventory.py.

The engine of each design, and a list of its parameters and buffers.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_patches.recipe.tensors import tensors
from pretrain.config.load import load_config
from pretrain.config.resolved import resolve
from pretrain.config.tree import Config
from pretrain.model.build import build_model
from pretrain.ranks.groups import set_seeds
from pretrain.ranks.release import release_engine
from pretrain.training.engine import wrap_model
from tests.distributed.workers.runs import of_all_ranks, parallel

ROWS = ("shape", "dimension that is cut", "phases", "weight decay")


def live_and_listed(payload: dict[str, Any]) -> list[dict[str, list[dict[str, Any]]]]:
    """For each configuration and phase, what is live and what is listed.

    {"live", "listed"}: {name: row} on every tensor-parallel rank.
    """
    answer = []
    for overrides in payload["configs"]:
        config = load_config("demo", overrides)
        answer += [_compare(config, phase.number) for phase in config.phases]
    return answer


def _compare(config: Config, phase: int) -> dict[str, list[dict[str, Any]]]:
    size = config.parallel.tensor_model_parallel_size
    with parallel(size) as context:
        set_seeds(config.run.seed, 1, 0, context.tensor_parallel_rank)
        model = build_model(config, context, phase)
        assert model.inventory == tensors(config.shape, config.policy, phase)
        engine, _, _ = wrap_model(model, resolve(config, context.world_size), context)
        rank_tensors = _live(model, engine.optimizer)
        release_engine(engine)
        live = of_all_ranks(rank_tensors)
    listed = [
        {
            tensor.name: [
                list(tensor.rank_shape(rank, size)),
                tensor.cut,
                list(tensor.span) if tensor.trains else None,
                tensor.decay if tensor.trains else None,
            ]
            for tensor in model.inventory
            if tensor.rank_elements(rank, size)
        }
        for rank in range(size)
    ]
    return {"live": live[:size], "listed": listed}


def _live(model: torch.nn.Module, optimizer: Any) -> dict[str, Any]:
    """{name: row} of every parameter and buffer with elements; the rows are ROWS.

    Of a buffer the dimension that is cut leaves no trace but its shape.
    """
    groups = optimizer.param_groups
    # ZeRO-1 flattens the optimizer's own.
    members = getattr(optimizer, "bit16_groups", [group["params"] for group in groups])
    decay = {
        id(parameter): group["weight_decay"] > 0
        for group, some in zip(groups, members, strict=True)
        for parameter in some
    }
    rows: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad, name
        cut = (
            parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None
        )
        span = list(parameter.optimizer_group)
        rows[name] = [list(parameter.shape), cut, span, decay[id(parameter)]]
    for name, buffer in model.named_buffers():
        rows[name] = [list(buffer.shape), "buffer", None, None]
    return {name: row for name, row in rows.items() if all(row[0])}
