"""Settings of torch, cuBLAS and NCCL before the first work on a GPU; harmless on the CPU."""

from __future__ import annotations

import os
from pathlib import Path

import torch

TRACE_ENTRIES = 2000
"""Number of a rank's last collectives that NCCL's flight recorder keeps."""


def use_arithmetic(*, deterministic: bool, reduced_precision_reduction: bool) -> None:
    """Set how this process computes products and sums from now on.

    Args:
        deterministic: Compute the same bits in every run on the same kind of GPU. An operation
            without a deterministic form raises torch's RuntimeError.
        reduced_precision_reduction: Let cuBLAS add the parts of a product that it splits in bf16.
    """
    if deterministic:
        # Without this setting cuBLAS takes its workspace from a pool, and its choice of algorithms
        # varies between runs.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Set only if it differs, because setting it imports torch's compiler.
    if deterministic != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(deterministic)
    # Filling new memory costs a pass over it and would only reveal reads of unwritten memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = reduced_precision_reduction


def record_collectives(file: Path) -> None:
    """Let NCCL's flight recorder write a file for each rank when a collective times out.

    Variables that the user has set keep their values.

    Args:
        file: Start of the files' names; the rank follows. Read the files with `python -m
            torch.distributed.flight_recorder.fr_trace`.
    """
    settings = {
        "TORCH_FR_BUFFER_SIZE": str(TRACE_ENTRIES),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": str(file.absolute()),
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)
