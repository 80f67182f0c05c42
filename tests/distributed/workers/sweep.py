"""Rank functions of test_sweep.py: look at what runs start from."""

from __future__ import annotations

from typing import Any

import torch

from megatron_patches.bank.shards import digest
from pretrain.config.load import load_config
from pretrain.config.tree import Config
from pretrain.training.open_run import open_run

BATCHES = 3


def beginnings(payload: dict[str, Any]) -> dict[str, Any]:
    """{name: {"tensors": {parameter: digest}, "batches": [digest, ...]}} of opened runs."""
    return {
        name: _beginning(load_config(payload["base"], overrides))
        for name, overrides in payload["runs"].items()
    }


def _beginning(config: Config) -> dict[str, Any]:
    with open_run(config) as run:
        starts = [index * config.data.global_batch_size for index in range(BATCHES)]
        return {
            "tensors": _tensors(run.engine.module, config),
            "batches": [digest(run.batches.at(start)) for start in starts],
        }


def _tensors(model: torch.nn.Module, config: Config) -> dict[str, str]:
    """Digests of all parameters and of the bank, V's by one name.

    Vanilla has it in one weight with Q and K, a synthesizer has it alone.
    """
    digests = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        module, _, last = name.rpartition(".")
        if module.endswith("linear_qkv") and last == "weight":  # [q … q k v] of each group
            parts = tensor.unflatten(0, (config.num_query_groups, -1, config.head_dim))
            digests[f"{module}.query_key"] = digest(parts[:, :-1].contiguous())
            digests[f"{module}.value_weight"] = digest(parts[:, -1].flatten(0, 1).contiguous())
        elif last == "query_key_weight":
            digests[f"{module}.query_key"] = digest(tensor)
        elif module.endswith("linear_v"):
            digests[f"{module.removesuffix('linear_v')}linear_qkv.value_weight"] = digest(tensor)
        else:
            digests[name] = digest(tensor)
    return digests
