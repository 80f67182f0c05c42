"""Writing of safetensors files, one parameter in memory at a time.

The package's own `save_file` needs all tensors at once, and copies them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from data_pipeline.io.files import sync
from pretrain.checkpoint.format import safetensors_header

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class Weight:
    """A tensor of an export, computed when the file is written.

    Attributes:
        name: Name in the file.
        make: Returns the tensor, of any floating type.
    """

    name: str
    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]


def whole(name: str, tensor: torch.Tensor) -> Weight:
    """Return a weight that is in memory already."""
    return Weight(name, tuple(tensor.shape), tensor.detach)


def write_weights(
    path: Path,
    weights: Sequence[Weight],
    dtype: torch.dtype,
    metadata: Mapping[str, str] | None = None,
) -> int:
    """Write all weights in one type.

    Args:
        metadata: Further entries of the header; None: the entry that transformers looks for.

    Returns:
        The bytes of the elements.
    """
    sizes = [math.prod(weight.shape) * dtype.itemsize for weight in weights]
    tensors = [
        (weight.name, _NAMES[dtype], weight.shape, size)
        for weight, size in zip(weights, sizes, strict=True)
    ]
    with path.open("wb") as file:
        file.write(safetensors_header(tensors, metadata or {"format": "pt"}))
        for weight in weights:
            values = weight.make().detach().to("cpu", dtype).contiguous()
            assert tuple(values.shape) == weight.shape, (weight.name, values.shape, weight.shape)
            file.write(values.view(-1).view(torch.uint8).numpy().data)
            del values  # before the next one is made
        sync(file)
    return sum(sizes)
