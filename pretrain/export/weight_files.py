"""Writing safetensors, one parameter in memory at a time.

The package's own `save_file` wants all tensors at once, and copies them. The format is a length (8 bytes,
little endian), that many bytes of JSON {name: {dtype, shape, data_offsets}}, then the tensors.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}
_ALIGNMENT = 8


@dataclass(frozen=True)
class Weight:
    """One tensor of an export, made when it is written.

    Attributes:
        make: gives it, of `shape` and any floating type.
    """

    name: str
    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]


def write_weights(
    path: Path, weights: Sequence[Weight], dtype: torch.dtype, metadata: Mapping[str, str] | None = None
) -> int:
    """Write all of them in `dtype` and return the bytes of their elements.

    Args:
        metadata: what the header says besides; None: what transformers looks for.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata or {"format": "pt"})}
    end = 0
    for weight in weights:
        start, end = end, end + math.prod(weight.shape) * dtype.itemsize
        header[weight.name] = {
            "dtype": _NAMES[dtype],
            "shape": list(weight.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for weight in weights:
            values = weight.make().detach().to("cpu", dtype).contiguous()
            assert tuple(values.shape) == weight.shape, (weight.name, values.shape, weight.shape)
            file.write(values.view(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
    return end
