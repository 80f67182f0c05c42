"""Settings of torch, cuBLAS and NCCL before the first work on a GPU; harmless on the CPU."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

import torch

TRACE_ENTRIES = 2000
"""The last collectives of a rank that NCCL's flight recorder remembers."""


def use_arithmetic(*, deterministic: bool, reduced_precision_reduction: bool) -> None:
    """Set how products and sums are made in this process from now on.

    Args:
        deterministic: the same bits in every run on the same kind of GPU. An operation that has no
            such form raises RuntimeError, with torch's own sentence.
        reduced_precision_reduction: cuBLAS may add up in bf16 the parts of a product that it
            splits.
    """
    if deterministic:
        # Without it cuBLAS takes its workspace from a pool, and so chooses among algorithms by
        # chance.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Only where it differs: torch imports its compiler for that.
    if deterministic != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(deterministic)
    # Filling new memory would only show reads of what nobody wrote, at the price of a pass over it.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = reduced_precision_reduction


def record_collectives(file: Path, environment: MutableMapping[str, str] = os.environ) -> None:
    """Let NCCL's flight recorder write a file for each rank when a collective times out.

    Args:
        file: what the files' names begin with; the rank follows. Read them with `python -m
            torch.distributed.flight_recorder.fr_trace`. What the user has set stays.
        environment: of this process; what the user has set stays.
    """
    settings = {
        "TORCH_FR_BUFFER_SIZE": str(TRACE_ENTRIES),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": str(file.absolute()),
    }
    for name, value in settings.items():
        environment.setdefault(name, value)
