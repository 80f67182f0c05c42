"""Named random streams of initial values: a row of a weight follows from (seed, name, row), whoever asks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import torch


def normal_rows(seed: int, name: str, rows: Iterable[int], columns: int, std: float) -> torch.Tensor:
    """Rows of the full matrix called `name`: N(0, std²) entries, float32 `[len(rows), columns]`.

    A row depends on (seed, name, row number, columns) only, never on which other rows are asked for.
    """
    key = np.frombuffer(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest(), dtype=np.uint64)
    numbers = list(rows)
    out = np.empty((len(numbers), columns), dtype=np.float32)
    for position, row in enumerate(numbers):
        stream = np.random.Philox(key=key, counter=[0, 0, row, 0])
        np.random.Generator(stream).standard_normal(dtype=np.float32, out=out[position])
    return torch.from_numpy(out).mul_(std)
