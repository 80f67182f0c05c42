"""Rank functions of test_penalty.py: train with the penalty, and once more in plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch

from pretrain.config.load import load_config
from pretrain.config.tree import Config
from pretrain.model.build import build_model, token_losses
from pretrain.training.open_run import open_run
from tests.distributed.plain_training import plain_optimizer, plain_step
from tests.distributed.workers.runs import curves
from tests.tiny import with_sections

TAGS = ("loss/train", "loss/orthogonal_penalty", "optim/grad_norm", "loss/valid")


def curves_and_reference(payload: dict[str, Any]) -> dict[str, Any]:
    """{tag: values} of each config, and one more training without DeepSpeed and our Function."""
    return {
        "curves": [curves(overrides, TAGS) for overrides in payload["runs"]],
        "reference": _reference(load_config("demo", payload["reference"])),
    }


def _reference(config: Config) -> dict[str, list[float]]:
    expected: dict[str, list[float]] = {tag: [] for tag in TAGS[:3]}
    with open_run(config) as run:  # for its data
        plain = config.attention.model_copy(
            update={"variant": "orthogonal_trainable", "penalty": None}
        )
        model = build_model(with_sections(config, attention=plain), run.context)
        optimizer = plain_optimizer(model, config)
        for step in range(1, config.total_steps + 1):
            batch = run.batches.at((step - 1) * config.data.global_batch_size).flatten(0, 1)
            loss = token_losses(model, batch).mean()
            penalty = _penalty(model, config)
            norm, _ = plain_step(model, optimizer, terms=(loss, penalty), config=config, step=step)
            for tag, value in zip(expected, (loss.item(), penalty.item(), norm), strict=True):
                expected[tag].append(value)
    return expected


def _penalty(model: torch.nn.Module, config: Config) -> torch.Tensor:
    total = torch.zeros(())
    for layer in model.decoder.layers:
        weight = layer.self_attention.linear_qkv.weight
        for group in weight.view(
            config.num_query_groups, -1, config.head_dim, config.model.hidden_size
        ):
            for rows in group[:-1]:
                total = total + (rows @ rows.T - torch.eye(config.head_dim)).square().sum()
    return config.policy.penalty * total
