"""A training written out in plain PyTorch on one rank, to compare the program with it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_patches.engine.freeze import parameter_groups
from pretrain.config.schedule import learning_rate
from pretrain.config.tree import Config


def plain_optimizer(model: torch.nn.Module, config: Config) -> torch.optim.AdamW:
    """AdamW over what trains, as the config describes it.

    Its learning rate comes with every step.
    """
    return torch.optim.AdamW(
        parameter_groups(model, config.optimizer.weight_decay),
        betas=config.optimizer.betas,
        eps=config.optimizer.eps,
    )


def plain_step(
    model: torch.nn.Module,
    optimizer: torch.optim.AdamW,
    terms: Sequence[torch.Tensor],
    config: Config,
    step: int,
    learning_rate_factor: float = 1.0,
    before_freezing: float = 1.0,
) -> tuple[float, float]:
    """One update from the sum of `terms`; (norm of all gradients, learning rate).

    The norm is that before clipping, which is `config.optimizer.gradient_clip`, 0 for none.
    `before_freezing` is a factor of the rate of rows that will be frozen.
    """
    optimizer.zero_grad()
    torch.stack(list(terms)).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = (
        torch.stack([gradient.double().square().sum() for gradient in gradients])
        .sum()
        .sqrt()
        .item()
    )
    if config.optimizer.gradient_clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.gradient_clip)
    rate = (
        learning_rate(config.optimizer, config.schedule, step, config.total_steps)
        * learning_rate_factor
    )
    for group in optimizer.param_groups:
        group["lr"] = rate * (before_freezing if group["until"] else 1.0)
    optimizer.step()
    return norm, rate
