"""Rank functions of test_training.py: short runs of many kinds, held-out losses, the bare model."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from megatron.core.models.gpt import GPTModel
from torch.utils.flop_counter import FlopCounterMode

from data_pipeline.shards.manifest import read_manifest
from data_pipeline.shards.samples import TrainingSamples, ValidationSamples
from megatron_patches.engine.freeze import frozen_layers
from pretrain.config.load import load_config
from pretrain.config.tree import Config
from pretrain.model.build import build_model, token_losses
from pretrain.ranks.groups import ParallelContext
from pretrain.runs.directory import RunDirectory
from pretrain.training.open_run import open_run
from pretrain.training.validation import held_out_losses
from tests.distributed.workers.runs import parallel, state_of
from tests.tiny import with_sections


def runs_and_models(payload: dict[str, Any]) -> dict[str, Any]:
    """On one rank: {"runs": {name: state or refusal}, "models": {check: numbers}}."""
    states = {}
    for name, overrides in payload["runs"].items():
        if name == "full again":  # as a kill between the marker and `latest` would leave it
            RunDirectory(load_config("demo", overrides).run_path).latest.write_text(
                "step_00000002\n"
            )
        states[name] = state_of(overrides)
    config = load_config("demo", payload["model"])
    with parallel() as context:
        samples = TrainingSamples(
            read_manifest(config.data.directory), config.data.sequence_length, seed=0
        )
        tokens = torch.from_numpy(samples.blocks(np.arange(4)))
        model = _Models(config, context, tokens)
        models = {
            "score_sd": {
                f"{variant} {position}": model.score_sd(variant, position)
                for position in ("learned", "rope")
                for variant in ("orthogonal", "gaussian")
            },
            "equal_weights": {str(groups): model.equal_weights(groups) for groups in (4, 2)},
            "flops": {str(groups): model.flops(groups) for groups in (4, 2)},
            "tokens": tokens[:, 1:].numel(),
        }
    return {"runs": states, "models": models}


def held_out(payload: dict[str, Any]) -> list[dict[str, Any]]:
    """For each config: `held_out_losses` beside every sample on its own."""
    return [_held_out(load_config("demo", overrides)) for overrides in payload["runs"]]


def _held_out(config: Config) -> dict[str, Any]:
    with open_run(config) as run:
        losses = held_out_losses(run.engine, run.data, config.data.micro_batch_size, run.context)
        training_again = run.engine.module.training
        run.engine.eval()
        with torch.no_grad():
            one_by_one = {
                source: [
                    _sample_loss(run.engine, samples, number) for number in range(len(samples))
                ]
                for source, samples in run.data.validation.items()
            }
    return {"found": losses, "one_by_one": one_by_one, "training_again": training_again}


def _sample_loss(engine: Any, samples: ValidationSamples, number: int) -> float:
    tokens = torch.from_numpy(samples.blocks(np.array([number])))
    return float(token_losses(engine, tokens).sum(dtype=torch.float64))


class _Models:
    """Properties of the whole model on one rank, without DeepSpeed."""

    def __init__(self, config: Config, context: ParallelContext, tokens: torch.Tensor) -> None:
        self.config = config
        self.context = context
        self.tokens = tokens

    def build(self, variant: str, **model: object) -> GPTModel:
        changed = {
            "attention": self.config.attention.model_copy(update={"variant": variant}),
            "model": self.config.model.model_copy(update=model),
        }
        return build_model(with_sections(self.config, **changed), self.context)

    def score_sd(self, variant: str, position: str) -> float:
        """Initial standard deviation of q·k/√head_dim, over position pairs, heads and layers."""
        model = self.build(variant, position_embedding=position)
        scores: list[torch.Tensor] = []

        def keep(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            query, key = inputs[:2]
            if position == "rope":
                query = module.rotary.rotate(query)
                key = module.rotary.rotate(key)
            scores.append(torch.einsum("sbhd,tbhd->bhst", query, key) / math.sqrt(query.size(-1)))

        for layer in model.decoder.layers:
            layer.self_attention.core_attention.register_forward_pre_hook(keep)
        with torch.no_grad():
            token_losses(model, self.tokens)
        return float(torch.stack(scores).std())

    def equal_weights(self, groups: int) -> dict[str, float]:
        """Relative differences between the frozen model and ordinary ones with its Q/K rows."""
        frozen = self.build("orthogonal", num_query_groups=groups)
        copied = self.build("vanilla", num_query_groups=groups)
        with torch.no_grad():
            for (_, bank), layer in zip(frozen_layers(frozen), copied.decoder.layers, strict=True):
                head_dim = frozen.config.kv_channels
                query, key = (
                    rows.unflatten(0, (-1, head_dim)) for _, _, rows in bank.frozen_shards()
                )
                fused = _by_group(layer.self_attention.linear_qkv.weight, groups, head_dim)
                fused[:, :-2] = query.unflatten(0, (groups, -1))
                fused[:, -2] = key
        born_equal = self.build("orthogonal_trainable", num_query_groups=groups)
        losses, gradients = zip(
            *(self._loss_and_gradients(m, groups) for m in (frozen, copied, born_equal)),
            strict=True,
        )
        size = torch.stack([gradient.norm() for gradient in gradients[0].values()]).norm()
        apart = [
            float((other[name] - gradient).norm() / size)
            for other in gradients[1:]
            for name, gradient in gradients[0].items()
        ]
        return {  # torch's maximum of a NaN is one
            "loss": torch.tensor([abs(loss / losses[0] - 1) for loss in losses]).max().item(),
            "gradient": torch.tensor(apart).max().item(),
            "shared_gradients": len(gradients[0]),
        }

    def _loss_and_gradients(
        self, model: GPTModel, groups: int
    ) -> tuple[float, dict[str, torch.Tensor]]:
        """The loss, and all gradients but W_Q's and W_K's; V's have one name in both layouts."""
        loss = token_losses(model, self.tokens).mean()
        loss.backward()
        gradients = {}
        for name, parameter in model.named_parameters():
            if name.endswith("linear_qkv.weight"):
                head_dim = model.config.kv_channels
                gradients[name.replace("weight", "value_weight")] = _by_group(
                    parameter.grad, groups, head_dim
                )[:, -1].flatten(0, 1)
            else:
                gradients[name] = parameter.grad
        return float(loss.detach()), gradients

    def flops(self, groups: int) -> dict[str, int]:
        """FLOPs of forward and backward, as torch counts them."""
        counts = {}
        for variant in ("vanilla", "orthogonal", "orthogonal_trainable"):
            model = self.build(variant, num_query_groups=groups)
            with FlopCounterMode(display=False) as counter:
                token_losses(model, self.tokens).mean().backward()
            counts[variant] = counter.get_total_flops()
        return counts


def _by_group(fused: torch.Tensor, groups: int, head_dim: int) -> torch.Tensor:
    """The fused QKV weight as [groups, queries of a group + key + value, head_dim, hidden]."""
    return fused.view(groups, -1, head_dim, fused.size(-1))
