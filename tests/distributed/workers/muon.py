"""Rank functions of test_muon.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from pretrain.checkpoint.slices import slices_of_rank
from pretrain.config.load import load_config
from pretrain.config.resolved import resolve
from pretrain.config.tree import Config
from pretrain.model.build import build_model
from pretrain.training.engine import wrap_model
from tests.distributed.workers.runs import parallel


def against_torch(payload: dict[str, Any]) -> dict[str, Any]:
    """Three updates of random gradients beside torch.optim.Muon on each matrix alone, and a NaN.

    Returns:
        {parameter: largest difference}, of weights of the layers' matrices; whether anything moved
        in a fourth update, whose gradient has a NaN.
    """
    config = load_config("demo", payload["overrides"])
    with parallel() as context:
        model = build_model(config, context)
        engine, _, _ = wrap_model(model, resolve(config, 1), context)
        draw = torch.Generator().manual_seed(0)
        for group in engine.optimizer.param_groups:
            group["lr"] = config.optimizer.learning_rate * group["rate_factor"]
        matrices = {
            name: parameter
            for name, parameter in model.named_parameters()
            if "layers" in name and parameter.ndim > 1
        }
        alone = {name: [_leaf(part) for part in _matrices(name, p)] for name, p in matrices.items()}
        updated = [part for parts in alone.values() for part in parts]
        reference = _torch_muon(updated, config)
        for _ in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=draw)
            for name, parts in alone.items():
                for part, gradient in zip(parts, _matrices(name, matrices[name].grad), strict=True):
                    part.grad = gradient.clone()
            engine.basic_optimizer.step()
            reference.step()
        differences = {
            name: max(
                float((mine - theirs).abs().max())
                for mine, theirs in zip(_matrices(name, matrices[name]), parts, strict=True)
            )
            for name, parts in alone.items()
        }
        state = _everything(engine)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, torch.nan)
        engine.basic_optimizer.step()
        after = _everything(engine)
        still = len(state) == len(after) and all(map(torch.equal, state, after))
    return {"differences": differences, "moved": not still}


def _everything(engine: Any) -> list[torch.Tensor]:
    """Copies of all weights, states and counts."""
    slices = slices_of_rank(engine)
    tensors = [weight_slice.values(kind) for weight_slice in slices for kind in weight_slice.kinds]
    tensors += [weight_slice.step for weight_slice in slices if weight_slice.step is not None]
    return [tensor.detach().clone() for tensor in tensors]


def _leaf(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor.detach().clone())


def _matrices(name: str, tensor: Any) -> Iterator[torch.Tensor]:
    """The matrices of a tensor of vanilla's or monarch_trainable's layer with four heads of 8."""
    if tensor.ndim == 3:
        yield from tensor
    elif "linear_qkv.weight" in name:
        heads = tensor.detach().view(4, 3, 8, -1)
        yield from heads[:, 0]
        yield from heads[:, 1]
        yield heads[:, 2].reshape(32, -1)
    else:
        yield tensor.detach()


def _torch_muon(weights: list[torch.nn.Parameter], config: Config) -> torch.optim.Optimizer:
    settings = config.optimizer
    of_kind: Any = settings.of_kind
    scales = {"match_adamw": "match_rms_adamw", "spectral": "original"}
    return torch.optim.Muon(
        weights,
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay,
        momentum=of_kind.momentum,
        nesterov=of_kind.nesterov,
        ns_steps=of_kind.newton_schulz_steps,
        adjust_lr_fn=scales[of_kind.update_scale],
    )
