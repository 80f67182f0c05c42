"""Where the time of a training step goes: by part of the step, and by class of kernel."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable

import torch
from step_contenders import Contender
from torch.profiler import ProfilerActivity, profile

PARTS = ("data", "forward", "backward", "reduction", "optimizer")
KERNELS = (
    ("attention", r"scaled_dot_product|flash|fmha|softmax(?!.*log)|_softmax"),
    ("collective", r"c10d|gloo|nccl|all_?reduce|all_?gather"),
    ("optimizer", r"adam|foreach|multi_tensor|lerp|addcdiv|sqrt|vector_norm|reciprocal|clamp"),
    ("product", r"::mm$|::bmm$|::addmm$|::baddbmm$|gemm|cutlass|nvjet|cublas|cijk"),
    ("norm", r"layer_?norm"),
    ("loss", r"log_softmax|nll_loss|cross_entropy|::exp$|::log$|::max$|::sum$|index_put|::index$"),
    ("copy", r"copy|::cat$|cat_|memcpy|memset|::clone|::contiguous|::fill_|::zero"),
    ("elementwise", r"^aten::(mul|add|sub|div|neg|gelu|addcmul|where|masked)|elementwise|gelu"),
)
"""(class, what the names of its kernels contain); the first that matches counts. The rest is `other`."""


def kernel_class(name: str) -> str:
    """The class of a kernel by its name."""
    if "log_softmax" in name:
        return "loss"
    return next((group for group, pattern in KERNELS if re.search(pattern, name, re.IGNORECASE)), "other")


class LastGradient:
    """When autograd had the last gradient of a backward pass ready; what follows is reduction."""

    def __init__(self, model: torch.nn.Module, now: Callable[[], float]) -> None:
        self.at = 0.0
        self._now = now
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._note)
            for parameter in model.parameters()
            if parameter.requires_grad
        ]

    def _note(self, _: torch.Tensor) -> None:
        self.at = self._now()

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


def seconds_by_part(
    contender: Contender, batch: Callable[[], torch.Tensor], rounds: int, now: Callable[[], float]
) -> dict[str, float]:
    """Median seconds of each part; on a GPU `now` must wait for it."""
    last = LastGradient(contender.model, now)
    seconds: dict[str, list[float]] = {part: [] for part in PARTS}
    for _ in range(rounds):
        marks = [now()]
        tokens = batch()
        marks.append(now())
        loss = contender.forward(tokens)
        marks.append(now())
        contender.backward(loss)
        # Gradients that are reduced while others are still being made count as backward.
        marks += [last.at, now()]
        contender.update()
        marks.append(now())
        for part, begin, end in zip(PARTS, marks, marks[1:], strict=False):
            seconds[part].append(end - begin)
    last.remove()
    return {part: statistics.median(values) for part, values in seconds.items()}


def seconds_by_kernel(
    contender: Contender, batch: Callable[[], torch.Tensor], rounds: int
) -> dict[str, float]:
    """Seconds of a step in each class of kernel.

    On the CPU `host` is what is no kernel at all: Python, dispatch and autograd's own work; the profiler
    makes it larger than it is.
    """
    cuda = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as found:
        for _ in range(rounds):
            contender.backward(contender.forward(batch()))
            contender.update()
    seconds: dict[str, float] = {}
    for event in found.key_averages():
        if cuda:
            spent = event.self_device_time_total if event.device_type.name == "CUDA" else 0.0
        else:
            spent = event.self_cpu_time_total
        is_kernel = cuda or event.key.startswith(("aten::", "c10d::", "gloo:"))
        group = kernel_class(event.key) if is_kernel else "host"
        seconds[group] = seconds.get(group, 0.0) + spent / 1e6 / rounds
    return dict(sorted(seconds.items(), key=lambda entry: -entry[1]))
