"""Rank functions of test_speed.py."""

from __future__ import annotations

import os
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel

from benchmarks.step.contenders import RECIPES
from benchmarks.step.plain_gpt import Matrices, PlainGPT, plain_optimizers
from megatron_patches.engine.freeze import parameter_groups
from pretrain.config.load import load_config
from pretrain.config.resolved import resolve
from pretrain.model.build import token_losses
from pretrain.optimizer.optimizers import FusedAdamW, clip_by_own_norm
from pretrain.ranks.signals import StopSignals
from pretrain.runs.position import Position
from pretrain.training.loop import train_step
from pretrain.training.open_run import open_run
from pretrain.training.phase_engine import PhasedEngine
from tests.distributed.plain_training import plain_optimizer
from tests.distributed.workers.runs import parallel


def losses_beside_plain(payload: dict[str, Any]) -> dict[str, list[float]]:
    """Losses and gradient norms of our engine and the plain peer, from equal weights and tokens."""
    config = load_config("demo", [*RECIPES[payload["recipe"]].split(), *payload["overrides"]])
    with parallel() as context:
        trainer = PhasedEngine(resolve(config, context.world_size), context)
        engine = trainer.engine
        plain = PlainGPT(config)
        _take_weights(plain, engine.module)
        optimizers = plain_optimizers(plain, config)
        generator = torch.Generator().manual_seed(1)
        losses: dict[str, list[float]] = {"ours": [], "plain": [], "norm": [], "plain norm": []}
        size = (config.data.micro_batch_size, config.data.sequence_length + 1)
        for _ in range(payload["steps"]):
            # Few of the words, so that there is something to learn.
            tokens = torch.randint(0, config.model.vocab_size // 8, size, generator=generator)
            loss = token_losses(engine, tokens).mean()
            engine.backward(loss)
            engine.step()
            theirs = plain(tokens)
            theirs.backward()
            norm = torch.nn.utils.clip_grad_norm_(
                plain.parameters(), config.optimizer.gradient_clip
            )
            for optimizer in optimizers:
                optimizer.step()
            plain.zero_grad()
            losses["ours"].append(loss.item())
            losses["plain"].append(theirs.item())
            losses["norm"].append(float(engine.get_global_grad_norm()))
            losses["plain norm"].append(norm.item())
        trainer.close()
    return losses


@torch.no_grad()
def _take_weights(plain: PlainGPT, model: GPTModel) -> None:
    """Give the peer the weights of a vanilla model on one rank."""
    plain.embedding.weight.copy_(model.embedding.word_embeddings.weight)
    if plain.output.weight is not plain.embedding.weight:
        plain.output.weight.copy_(model.output_layer.weight)
    plain.norm.load_state_dict(model.decoder.final_layernorm.state_dict())
    for block, layer in zip(plain.blocks, model.decoder.layers, strict=True):
        attention = layer.self_attention
        block.norm_attention.load_state_dict(layer.input_layernorm.state_dict())
        block.norm_mlp.load_state_dict(layer.pre_mlp_layernorm.state_dict())
        if attention.q_layernorm is not None:
            block.norm_query.load_state_dict(attention.q_layernorm.state_dict())
            block.norm_key.load_state_dict(attention.k_layernorm.state_dict())
        # Theirs lie head by head.
        by_head = attention.linear_qkv.weight.unflatten(0, (block.heads, 3, -1))
        _fill(block.query_key_value, by_head.transpose(0, 1).flatten(0, 2))
        block.projection.weight.copy_(attention.linear_proj.weight)
        _fill(block.up, layer.mlp.linear_fc1.weight)
        block.down.weight.copy_(layer.mlp.linear_fc2.weight)


def _fill(matrices: Matrices, rows: torch.Tensor) -> None:
    """Give the weights their rows of `[rows of all, columns]`."""
    for weight, weight_rows in zip(
        matrices.weights, rows.split([*map(len, matrices.weights)]), strict=True
    ):
        weight.copy_(weight_rows)


def clipping_adamw(payload: dict[str, Any]) -> dict[str, float]:
    """Return how far AdamW that clips is from clipping and AdamW, and the effect of a NaN."""
    config = load_config("demo", payload["overrides"])
    with parallel() as context:
        ours, theirs = (
            torch.nn.Sequential(torch.nn.Linear(1500, 1400), torch.nn.LayerNorm(1400))
            for _ in range(2)
        )
        theirs.load_state_dict(ours.state_dict())
        section = config.optimizer
        reference = plain_optimizer(theirs, config)
        reference.param_groups[0]["lr"] = reference.param_groups[1]["lr"] = 0.1
        optimizer = FusedAdamW(parameter_groups(ours, section.weight_decay), section)
        clip_by_own_norm(optimizer, section.gradient_clip, context.tensor_parallel_group)
        for group in optimizer.param_groups:
            group["lr"] = 0.1
        seen: list[float] = []
        optimizer.register_step_pre_hook(lambda *_: seen.append(float(optimizer._global_grad_norm)))  # type: ignore[arg-type]
        worst = norm_error = 0.0
        for step in range(6):
            scale = 10.0 ** (step - 3)  # some norms are below the limit, some above
            for our_weight, other in zip(ours.parameters(), theirs.parameters(), strict=True):
                # Descending, so that sums of squares in fp32 lose what comes last.
                values = torch.randn(our_weight.numel()).square().sort(descending=True).values
                our_weight.grad = scale * values.view_as(our_weight)
                other.grad = our_weight.grad.clone()
            norm = torch.cat([p.grad.double().flatten() for p in theirs.parameters()]).norm()  # type: ignore[union-attr]
            torch.nn.utils.clip_grads_with_norm_(
                theirs.parameters(), section.gradient_clip or float("inf"), norm
            )
            reference.step()
            optimizer.step()
            # A later hook finds this step's norm.
            norm_error = max(norm_error, abs(seen[-1] / float(norm) - 1))
            pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
            worst = max(worst, *(float((weight - other).abs().max()) for weight, other in pairs))
        weights = [parameter.clone() for parameter in ours.parameters()]
        next(ours.parameters()).grad[0, 0] = torch.nan  # type: ignore[index]
        optimizer.step()
        pairs = zip(weights, ours.parameters(), strict=True)
        moved = max(float((weight - other).abs().max()) for weight, other in pairs)
        steps = max(float(state["step"]) for state in optimizer.state.values())
    return {"worst": worst, "norm": norm_error, "moved by nan": moved, "steps": steps}


def clipped_moments(payload: dict[str, Any]) -> dict[str, list[float]]:
    """{engine: the reported norm, the gradient's norm in AdamW's first moments after one step}"""
    norms = {}
    for name, overrides in payload["runs"].items():
        with open_run(load_config("demo", overrides)) as run:
            result, _ = train_step(run, Position(), StopSignals())
            optimizer = run.engine.basic_optimizer
            moments = [state["exp_avg"] for state in optimizer.state.values()]
            norm = torch.stack([moment.norm() for moment in moments]).norm()
            norms[name] = [
                result.gradient_norm,
                norm.item() / (1 - optimizer.param_groups[0]["betas"][0]),
            ]
    return norms


def environment(payload: dict[str, Any]) -> dict[str, Any]:
    """Return the settings for CUDA, and whether DeepSpeed's synchronising timer is on."""
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    config = load_config("demo", payload["overrides"])
    size = config.parallel.tensor_model_parallel_size
    with parallel(size) as context:
        trainer = PhasedEngine(resolve(config, context.world_size), context)
        timer = trainer.engine.tput_timer.config.enabled
        trainer.close()
        connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
        return {"connections": connections, "throughput timer": timer}
