"""Rank functions of test_stability.py: real trainings whose gradients or weights are spoilt."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from pretrain.config.load import load_config
from pretrain.errors import UserError
from pretrain.ranks.signals import StopSignals
from pretrain.training.loop import run_steps
from pretrain.training.open_run import Run, open_run
from pretrain.training.stability import weights_are_finite
from tests.distributed.workers.runs import copy_up_to, next_step, of_all_ranks


def skipped_updates(payload: dict[str, Any]) -> dict[str, Any]:
    """On two ranks: what a spoilt gradient and good ones leave of all state.

    This is for every configuration.

    Rank 1 alone spoils the gradient of one weight, at the second of three steps.
    """
    answers = {}
    for name, overrides in payload["runs"].items():
        with open_run(load_config("demo", overrides)) as run:
            position = run.position
            states = [_state(run)]
            updated = []
            norms = []
            with _spoilt(run, steps=(2,)):
                for _ in range(3):
                    result, position = next_step(run, position)
                    states.append(_state(run))
                    updated.append(result.updated)
                    norms.append(result.gradient_norm)
            padding = _spoil_padding(run.engine)
            finite = [weights_are_finite(run.engine, run.context.device)]
            if run.context.rank == 1:
                with torch.no_grad():
                    weight = next(w for w in run.engine.module.parameters() if w.requires_grad)
                    getattr(weight, "ds_tensor", weight).view(-1)[0] = torch.inf
            finite.append(weights_are_finite(run.engine, run.context.device))
        answers[name] = {
            "unchanged": [a == b for a, b in pairwise(states)],
            "made": of_all_ranks(updated),
            "norms": norms,
            "position": [position.step, position.consumed_samples, position.skipped_steps],
            "weights_finite": of_all_ranks(finite),
            "padding": padding,
        }
    return answers


def _spoil_padding(engine: Any) -> int:
    """Fill the padding of ZeRO-3's partitions with NaN.

    Return how many elements it has on all ranks.
    """
    padding = 0
    for weight in engine.module.parameters():
        if weight.requires_grad and hasattr(weight, "ds_tensor"):
            shard_size = weight.ds_tensor.numel()
            weight.ds_tensor[max(0, weight.ds_numel - shard_size * dist.get_rank()) :] = torch.nan
            padding += shard_size * dist.get_world_size() - weight.ds_numel
    return padding


def spoilt_runs(payload: dict[str, Any]) -> dict[str, str]:
    """On two ranks: train each configuration with rank 1's gradient spoilt at `steps`.

    Returns:
        State or refusal.
    """
    answers = {}
    for name, (overrides, steps) in payload["runs"].items():
        answers[name] = _ending(lambda: _train_spoilt(overrides, steps))  # noqa: B023  called at once
    return answers


def _ending(training: Callable[[], str]) -> str:
    try:
        return training()
    except UserError as error:
        return f"error: {error}"


def _train_spoilt(overrides: list[str], steps: list[int]) -> str:
    with open_run(load_config("demo", overrides)) as run:
        with _spoilt(run, steps):
            state = run_steps(run, StopSignals())
        run.close(state)
    return state


def spiked_runs(payload: dict[str, Any]) -> dict[str, str]:
    """On two ranks: train each configuration with spikes planted: {step: kind}, see below.

    The run `again` is that of `of` from its checkpoint of step `after` on.
    """
    answers = {}
    for name, (overrides, spikes) in payload["runs"].items():
        if name == "again":
            run = load_config("demo", overrides).run_path
            copy_up_to(run.with_name(payload["of"]), run, payload["after"])
        planted = {int(step): kind for step, kind in spikes.items()}
        answers[name] = _ending(lambda: _train_with_spikes(overrides, planted))  # noqa: B023  called at once
    return answers


_GRADIENT_TIMES = {"small norm": 1e3, "norm": 1e5}
"""Far apart, for rounding of some 40 steps decides within a factor of ten.

That is, what a gradient times a factor is.
"""


def _train_with_spikes(overrides: list[str], spikes: dict[int, str]) -> str:
    """Train with spikes of these kinds.

    "norm" and "small norm": rank 1's gradient of one weight, times a factor. "loss": the logits,
    times 30, which moves the norm too. "loss alone": 30 nats more, which leave every gradient as it
    is.
    """
    with open_run(load_config("demo", overrides)) as run:

        def kind() -> str:
            return spikes.get(run.engine.global_steps + 1, "")

        def gradient(grad: torch.Tensor) -> torch.Tensor | None:
            times = _GRADIENT_TIMES.get(kind())
            return times * grad if times and run.context.rank == 1 else None

        def logits(
            module: torch.nn.Module, inputs: Any, output: torch.Tensor
        ) -> torch.Tensor | None:
            return 30 * output if kind() == "loss" else None

        def losses(
            module: torch.nn.Module, inputs: Any, output: torch.Tensor
        ) -> torch.Tensor | None:
            return 30 + output if kind() == "loss alone" and module.training else None

        model = run.engine.module
        hooks = [
            model.get_submodule("decoder.layers.0.mlp.linear_fc1").weight.register_hook(gradient),
            model.decoder.final_layernorm.register_forward_hook(logits),
            model.register_forward_hook(losses),
        ]
        try:
            state = run_steps(run, StopSignals())
        finally:
            for hook in hooks:
                hook.remove()
        run.close(state)
    return state


@contextmanager
def _spoilt(run: Run, steps: Sequence[int]) -> Iterator[None]:
    """Make one element of one weight's gradient NaN meanwhile, on rank 1, at some steps."""

    def spoil(gradient: torch.Tensor) -> torch.Tensor | None:
        if run.context.rank != 1 or run.engine.global_steps + 1 not in steps:
            return None
        gradient = gradient.clone()
        gradient.view(-1)[0] = torch.nan
        return gradient

    weight = run.engine.module.get_submodule("decoder.layers.0.mlp.linear_fc1").weight
    hook = weight.register_hook(spoil)
    try:
        yield
    finally:
        hook.remove()


def _state(run: Run) -> str:
    """SHA-256 of every rank's weights, master weights, moments and step counts."""
    digest = hashlib.sha256()
    for weight in run.engine.module.parameters():
        _add(digest, getattr(weight, "ds_tensor", weight))
    _add(digest, run.engine.optimizer.state_dict())
    return "".join(of_all_ranks(digest.hexdigest()))


def _add(digest: Any, value: Any) -> None:
    if torch.is_tensor(value):
        digest.update(
            value.detach().contiguous().view(torch.uint8).numpy().tobytes()
            if value.ndim
            else repr(value.item()).encode()
        )
    elif isinstance(value, dict):
        for key, item in value.items():
            if key not in ("lr", "overflow"):  # of the schedule; whether the last step was skipped
                digest.update(str(key).encode())
                _add(digest, item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _add(digest, item)
    elif isinstance(value, (int, float, bool)):
        digest.update(repr(value).encode())
