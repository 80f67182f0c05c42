"""Rank functions of test_penalty.py: train with the penalty, and once more in plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch

from pretrain.config.load import load_config
from pretrain.config.tree import Config
from pretrain.model.build import build_model, token_losses
from pretrain.ranks.signals import StopSignals
from pretrain.runs.metrics_file import read_metrics
from pretrain.training.loop import train
from pretrain.training.open_run import open_run
from tests.distributed.plain_training import plain_optimizer, plain_step
from tests.tiny import with_sections

TAGS = ("loss/train", "loss/orthogonal_penalty", "optim/grad_norm", "loss/valid")


def curves_and_reference(payload: dict[str, Any]) -> dict[str, Any]:
    """{tag: values} of each config, and one more training without DeepSpeed and our Function."""
    return {
        "curves": [_curves(load_config("demo", overrides)) for overrides in payload["runs"]],
        "reference": _reference(load_config("demo", payload["reference"])),
    }


def _curves(config: Config) -> dict[str, list[float]]:
    train(config, StopSignals())
    records = list(read_metrics(config.run_path / "metrics.jsonl"))
    return {tag: [record[tag] for record in records if tag in record] for tag in TAGS}


def _reference(config: Config) -> dict[str, list[float]]:
    curves: dict[str, list[float]] = {tag: [] for tag in TAGS[:3]}
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
            for tag, value in zip(curves, (loss.item(), penalty.item(), norm), strict=True):
                curves[tag].append(value)
    return curves


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
