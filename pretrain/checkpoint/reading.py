"""Reading any range of any block of any parameter of a checkpoint, whatever layout wrote it.

Only the slices that are needed are read, if the range is contiguous in the stored blocks. Else the whole
parameter is assembled, one at a time.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from pretrain.checkpoint.format import Block, StoredParameter, damaged, read_about, read_index, tensor_key
from pretrain.errors import UserError


class StoredCheckpoint:
    """A complete checkpoint on disk, opened for reading.

    Attributes:
        about: content of checkpoint.json.
        parameters: {logical name: the stored parameter}.

    Raises:
        UserError: the checkpoint is of another format, or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.about = read_about(path)
        self.parameters = read_index(path)
        self._files: dict[str, Any] = {}

    def parameter(self, name: str, shape: tuple[int, ...]) -> StoredParameter:
        """Return the stored parameter. Raises UserError: it is not there in this shape."""
        stored = self.parameters.get(name)
        if stored is None:
            raise UserError(f"{self.path} has no weight '{name}'; restore the run's own config.yaml")
        if stored.shape != shape:
            raise UserError(
                f"{self.path} has '{name}' in shape {stored.shape} but config.yaml describes {shape}; "
                "restore the run's own config.yaml"
            )
        return stored

    def full(self, kind: str, name: str) -> torch.Tensor:
        """Return a whole parameter: fp32, on the CPU.

        Args:
            kind: one of `format.KINDS`.

        Raises:
            UserError: a file is missing or is not what the index says.
        """
        stored = self.parameters[name]
        full = torch.empty(stored.shape)
        for block, pieces in stored.blocks().items():
            shape = block.shape(stored.shape)
            flat = torch.empty(math.prod(shape))
            for piece in pieces:
                target = flat.narrow(0, piece.start, piece.length)
                target.copy_(self._read(piece.file, kind, name, 0, piece.length))
            full.narrow(block.dim, block.first, block.last - block.first).copy_(flat.view(shape))
        return full

    def elements(self, kind: str, name: str, block: Block, start: int, length: int) -> torch.Tensor:
        """Return elements [start, start + length) of a flattened block: fp32, on the CPU.

        Raises:
            UserError: as `full`.
        """
        stored = self.parameters[name]
        result, blocks = torch.empty(length), stored.blocks()
        shifts = {own: _shift(own, block, stored.shape) for own in blocks}
        if any(shift is None for shift in shifts.values()):
            cut = self.full(kind, name).narrow(block.dim, block.first, block.last - block.first)
            return cut.reshape(-1)[start : start + length]
        for own, shift in shifts.items():
            assert shift is not None
            for piece in blocks[own]:
                first = max(piece.start + shift, start)
                last = min(piece.start + shift + piece.length, start + length)
                if first < last:
                    skipped = first - piece.start - shift
                    values = self._read(piece.file, kind, name, skipped, skipped + last - first)
                    result[first - start : last - start] = values
        return result

    def _read(self, file: str, kind: str, name: str, start: int, stop: int) -> torch.Tensor:
        """Return elements [start, stop) of a file's slice of a parameter."""
        try:
            if file not in self._files:
                self._files[file] = safe_open(str(self.path / file), framework="pt")
            values = self._files[file].get_slice(tensor_key(kind, name))[start:stop]
        except FileNotFoundError:
            raise damaged(self.path / file, "is missing") from None
        except (OSError, SafetensorError) as error:
            raise damaged(self.path / file, f"cannot be read as safetensors ({error})") from None
        if values.dtype != torch.float32 or values.shape != (stop - start,):
            raise damaged(self.path / file, f"does not hold the slice of '{name}' that the index names")
        return values


def _shift(stored: Block, wanted: Block, shape: tuple[int, ...]) -> int | None:
    """Return the offset between an element's index in the flattened `stored` and `wanted` blocks.

    None if the offset is not constant, as when one block is cut along rows and the other along columns.
    """
    if stored == wanted:
        return 0
    ours, theirs = stored.rows(shape), wanted.rows(shape)
    return None if ours is None or theirs is None else ours[0] - theirs[0]
