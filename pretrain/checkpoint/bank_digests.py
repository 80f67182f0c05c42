"""SHA-256 digests of the frozen bank in this run's memory, which a checkpoint keeps in place of the bank."""

from __future__ import annotations

import json
from typing import Any

import torch.distributed as dist

from megatron_patches.bank.shards import head_digests, role_digest
from megatron_patches.engine.freeze import frozen_layers
from pretrain.ranks.groups import ParallelContext, require_equal_on_all_ranks


def bank_digests(model: Any, context: ParallelContext) -> dict[str, str]:
    """Return the SHA-256 of the live frozen bank for every (layer, role), on any layout (collective).

    Raises UserError: on every rank, if two ranks hold different banks.
    """
    own: dict[tuple[int, str], dict[int, str]] = {}
    for _, layer in frozen_layers(model):
        for role, heads, weight in layer.frozen_shards():
            rows = weight.size(0) // max(1, len(heads))
            digests = head_digests(weight.cpu(), rows) if heads else []
            own[layer.layer, role] = dict(zip(heads, digests, strict=True))
    shards: list[Any] = [None] * context.tensor_parallel_size
    dist.all_gather_object(shards, own, group=context.tensor_parallel_group)
    bank = {}
    for layer_number, role in own:
        by_head = {head: digest for shard in shards for head, digest in shard[layer_number, role].items()}
        bank[f"layer={layer_number} role={role}"] = role_digest(by_head[head] for head in sorted(by_head))
    require_equal_on_all_ranks(
        "the frozen Query/Key bank",
        json.dumps(bank),
        "give every rank the same config, numpy version and CPU kind",
    )
    return bank
