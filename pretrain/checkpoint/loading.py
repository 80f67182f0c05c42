"""Loading a checkpoint of any layout into a model, into an engine, or as plain tensors, bit for bit.

    for name, weight in full_weights(Path("runs/NAME/checkpoints/step_00000123")):
        ...    # fp32, on the CPU, one parameter at a time; no engine, no process groups

When a run resumes, every rank loads its own part of each parameter. The model's weights come first, before
DeepSpeed wraps the model and makes its own copies of them. Then the master weights, which may be more precise
than the model's, and AdamW's state are overwritten slice by slice. Of a file only the slices that are needed
are read, if the range is contiguous in the stored blocks; else the whole parameter is assembled, one at a
time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron_patches.model.gpt import GPT
from pretrain.checkpoint.blocks import overlaps, parts_of_rank
from pretrain.checkpoint.format import (
    Block,
    StoredParameter,
    damaged,
    read_about,
    read_index,
    tensor_key,
)
from pretrain.checkpoint.slices import MOMENTS, set_counters, slices_of_rank
from pretrain.errors import UserError


class StoredCheckpoint:
    """A complete checkpoint on disk, opened for reading.

    `parameters`: {logical name: the stored parameter}. Raises UserError: the checkpoint is of another format,
    or damaged.
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
            raise UserError(
                f"{self.path} has no weight '{name}'; restore the run's own config.yaml"
            )
        if stored.shape != shape:
            raise UserError(
                f"{self.path} has '{name}' in shape {stored.shape} but config.yaml describes {shape}; "
                "restore the run's own config.yaml"
            )
        return stored

    def full(self, kind: str, name: str) -> torch.Tensor:
        """Return a whole parameter: fp32, on the CPU.

        `kind`: one of `format.KINDS`. Raises UserError: a file is missing or is not what the index says.
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

        Raises UserError as `full`.
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
            raise damaged(
                self.path / file, f"does not hold the slice of '{name}' that the index names"
            )
        return values


def _shift(stored: Block, wanted: Block, shape: tuple[int, ...]) -> int | None:
    """Return the offset between an element's index in the flattened `stored` and `wanted` blocks.

    None if the offset is not constant, as when one block is cut along rows and the other along columns.
    """
    if stored == wanted:
        return 0
    ours, theirs = stored.rows(shape), wanted.rows(shape)
    return None if ours is None or theirs is None else ours[0] - theirs[0]


def full_weights(checkpoint: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, fp32 master weight) of every trained parameter, sorted by name.

    Frozen Query/Key rows are not among them: they are regenerated. The trainable heads beside a frozen bank
    are two parameters, `….trained_query` and `….trained_key`, `[heads * head_dim, hidden]` in head order.
    Raises UserError: the checkpoint is of another format, or damaged.
    """
    stored = StoredCheckpoint(checkpoint)
    for name in sorted(stored.parameters):
        yield name, stored.full("master", name)


def load_weights(checkpoint: Path, model: GPT) -> None:
    """Load a checkpoint's weights into a model built without parallelism, in the model's precision.

    The checkpoint must have exactly the model's parameters; buffers, such as a frozen bank, are left alone.
    Raises UserError: the checkpoint is of another model, of another format, or damaged.
    """
    StoredState(StoredCheckpoint(checkpoint), rank=0, size=1).give_weights(model)


class StoredState:
    """The training state in a checkpoint, for tensor-parallel rank `rank` of `size`."""

    def __init__(self, stored: StoredCheckpoint, rank: int, size: int) -> None:
        self._stored = stored
        self._rank, self._size = rank, size

    def give_weights(self, model: GPT) -> None:
        """Overwrite every parameter of a model that DeepSpeed has not wrapped yet, in the model's precision.

        Raises UserError: the checkpoint is of another model, or damaged.
        """
        parts = parts_of_rank(model.inventory, self._rank, self._size)
        if self._size == 1:
            known = {part.name for own in parts.values() for part in own}
            unknown = sorted(self._stored.parameters.keys() - known)
            if unknown:
                raise UserError(
                    f"{self._stored.path} has a weight '{unknown[0]}' that this model has not; restore the "
                    "run's own config.yaml"
                )
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                for part in parts[name]:
                    self._stored.parameter(part.name, part.shape)
                    values = self._stored.elements("master", part.name, part.block, 0, part.numel)
                    parameter.view(-1).narrow(0, part.start, part.numel).copy_(values)

    def give_optimizer(self, engine: Any) -> None:
        """Overwrite the master weights, moments, step counts and counters of an engine around that model.

        Raises UserError: the checkpoint is damaged.
        """
        parts = parts_of_rank(engine.module.inventory, self._rank, self._size)
        steps: dict[int, int] = {}
        for own in slices_of_rank(engine):
            for part, start, values_start, length in overlaps(
                own.start, own.length, parts[own.name]
            ):
                stored = self._stored.parameter(part.name, part.shape)
                own.begin()
                if steps.setdefault(id(own.adam), stored.step) != stored.step:
                    raise UserError(
                        f"{self._stored.path} has step counts of AdamW that this run keeps together, and "
                        f"'{part.name}' has another; restore the run's own config.yaml"
                    )
                own.adam["step"].fill_(stored.step)
                for kind in ("master", *MOMENTS):
                    target = own.master if kind == "master" else own.moment(kind)
                    assert target is not None
                    values = self._stored.elements(kind, part.name, part.block, start, length)
                    target.narrow(0, values_start, length).copy_(values)
        set_counters(engine, self._stored.about.counters)
