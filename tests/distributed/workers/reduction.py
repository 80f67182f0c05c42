"""Rank functions of test_reduction.py.

The same steps with gradients reduced in one way and the other.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist

from pretrain.config.load import load_config
from pretrain.optimizer import reduction
from pretrain.ranks.signals import StopSignals
from pretrain.runs.position import Position
from pretrain.training.loop import train_step
from pretrain.training.open_run import Run, open_run
from tests.distributed.workers.runs import of_all_ranks


def steps(payload: dict[str, Any]) -> dict[str, Any]:
    """{run: losses, norms, a digest of all ranks' weights, what a step's reductions were}"""
    # Of the tiny model some weights alone, the rest in several packs and buckets.
    reduction.PACKED_ELEMENTS = 1024
    reduction.BUCKET_ELEMENTS = 4096
    return {name: _steps(overrides) for name, overrides in payload["runs"].items()}


def _steps(overrides: list[str]) -> dict[str, Any]:
    config = load_config("demo", overrides)
    with open_run(config) as run:
        results = []
        for step in range(config.total_steps):
            watch = _Watch(run) if step == config.total_steps - 1 else None
            at = Position(step, step * config.data.global_batch_size)
            results.append(train_step(run, at, StopSignals())[0])
        assert watch is not None
        watch.end()
        digest = hashlib.sha256()
        for weight in run.engine.module.parameters():
            digest.update(weight.detach().contiguous().view(torch.uint8).numpy().tobytes())
        digests = of_all_ranks(digest.hexdigest())
        left = [
            name for name, weight in run.engine.module.named_parameters() if weight.grad is not None
        ]
        trainable = sum(w.numel() for w in run.engine.module.parameters() if w.requires_grad)
    return {
        "trainable": trainable,
        "losses": [result.loss for result in results],
        "norms": [result.gradient_norm for result in results],
        "weights": digests,
        "collectives": watch.collectives,
        "elements": watch.elements,
        "before_last_gradient": watch.before_last_gradient,
        "gradients_left": left,
    }


class _Watch:
    """Counts a step's large asynchronous all-reduces, and those begun before its last gradient."""

    def __init__(self, run: Run) -> None:
        self.collectives = self.elements = self.before_last_gradient = 0
        self._real = dist.all_reduce
        dist.all_reduce = self._all_reduce  # watched, and then done as always
        self._hooks = [
            weight.register_hook(self._gradient)
            for weight in run.engine.module.parameters()
            if weight.requires_grad
        ]

    def _all_reduce(self, tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        if keywords.get("async_op") and tensor.numel() > 8:
            self.collectives += 1
            self.elements += tensor.numel()
        return self._real(tensor, *arguments, **keywords)

    def _gradient(self, _: torch.Tensor) -> None:
        self.before_last_gradient = self.collectives

    def end(self) -> None:
        dist.all_reduce = self._real
        for hook in self._hooks:
            hook.remove()
