"""Classes of kernels, by their names: what the work of a step is for."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch

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


def seconds_by_class(events: Iterable[Any]) -> dict[str, float]:
    """Seconds in each class of kernel, the largest first.

    Args:
        events: `key_averages()` of a torch profile; of kernels on the GPU if any ran there.

    On the CPU `host` is what is no kernel at all: Python, dispatch and autograd's own work; the profiler
    makes it larger than it is.
    """
    cuda = torch.cuda.is_available()
    seconds: dict[str, float] = {}
    for event in events:
        if cuda:
            spent = event.self_device_time_total if event.device_type.name == "CUDA" else 0.0
        else:
            spent = event.self_cpu_time_total
        is_kernel = cuda or event.key.startswith(("aten::", "c10d::", "gloo:"))
        group = kernel_class(event.key) if is_kernel else "host"
        seconds[group] = seconds.get(group, 0.0) + spent / 1e6
    return dict(sorted(seconds.items(), key=lambda entry: -entry[1]))
