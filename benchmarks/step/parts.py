"""The time of a training step by part and by class of kernel."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.step.contenders import Contender
from pretrain.telemetry.profile import seconds_by_class

PARTS = ("data", "forward", "backward", "reduction", "optimizer")


def seconds_by_part(
    contender: Contender,
    batch: Callable[[], torch.Tensor],
    rounds: int,
    now: Callable[[], float],
    wait: Callable[[], None],
) -> dict[str, float]:
    """Time each part of a contender's step.

    Args:
        batch: Function that makes tokens, `[batch, length + 1]`.
        rounds: Number of steps that are timed.
        now: The clock, in seconds.
        wait: Function that brings ranks and GPUs to the same point before each step.

    Returns:
        The median seconds of each of PARTS.
    """

    def device_time() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return now()

    last = [0.0]  # when autograd had the last gradient of a backward pass; then comes reduction
    hooks = [
        parameter.register_post_accumulate_grad_hook(lambda _: last.__setitem__(0, device_time()))
        for parameter in contender.model.parameters()
        if parameter.requires_grad
    ]
    seconds: dict[str, list[float]] = {part: [] for part in PARTS}
    for _ in range(rounds):
        wait()
        marks = [device_time()]
        tokens = batch()
        marks.append(device_time())
        loss = contender.forward(tokens)
        marks.append(device_time())
        contender.backward(loss)
        # Gradients that are reduced while others are still being made count as backward.
        marks += [last[0], device_time()]
        contender.update()
        marks.append(device_time())
        for part, begin, end in zip(PARTS, marks, marks[1:], strict=False):
            seconds[part].append(end - begin)
    for hook in hooks:
        hook.remove()
    return {part: statistics.median(values) for part, values in seconds.items()}


def seconds_by_kernel(
    contender: Contender, batch: Callable[[], torch.Tensor], rounds: int
) -> dict[str, float]:
    """Profile steps of a contender, by class of kernel.

    On the CPU `host` is what is no kernel at all: Python, dispatch and autograd's own work; the
    profiler makes it larger than it is.

    Args:
        batch: Function that makes tokens, `[batch, length + 1]`.
        rounds: Number of steps that are profiled.

    Returns:
        Seconds of a step in each class.
    """
    activities = [
        ProfilerActivity.CPU,
        *([ProfilerActivity.CUDA] if torch.cuda.is_available() else []),
    ]
    with profile(activities=activities) as profiler:
        for _ in range(rounds):
            contender.backward(contender.forward(batch()))
            contender.update()
    return {
        group: spent / rounds for group, spent in seconds_by_class(profiler.key_averages()).items()
    }
