"""Loading a checkpoint of any layout into a model or an engine, or as plain tensors.

    stored = StoredCheckpoint(Path("runs/NAME/checkpoints/step_00000123"))
    for name in stored.parameters:
        stored.full(MASTER, name)    # fp32, on the CPU; no engine, no process groups

When a run resumes, every rank loads its own part of each parameter. The model's weights come first,
before DeepSpeed wraps the model and copies them. Then the master weights, which may be more precise
than the model's, and the optimizer's states are overwritten slice by slice. A rank reads only the
slices that it needs if they are contiguous in the stored blocks; otherwise it assembles the whole
parameter, one at a time.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron_patches.engine.freeze import lasting_weights
from megatron_patches.model.gpt import GPT
from pretrain.checkpoint.blocks import overlaps, parts_of_rank
from pretrain.checkpoint.damage import damaged
from pretrain.checkpoint.format import (
    MASTER,
    Block,
    StoredParameter,
    read_about,
    read_index,
    tensor_key,
)
from pretrain.checkpoint.slices import Slice, set_counters, slices_of_rank
from pretrain.errors import UserError


class StoredCheckpoint:
    """A complete checkpoint on disk, opened for reading.

    Args:
        rank: Tensor-parallel rank whose parts are given to models and engines.
        size: Number of tensor-parallel ranks.

    Attributes:
        about: Content of checkpoint.json.
        parameters: {logical name: the stored parameter}.

    Raises:
        UserError: the checkpoint is of another format, or damaged.
    """

    def __init__(self, path: Path, rank: int = 0, size: int = 1) -> None:
        self.path = path
        self._rank = rank
        self._size = size
        self.about = read_about(path)
        self.parameters = read_index(path)
        self._files: dict[str, Any] = {}

    def parameter(self, name: str, shape: tuple[int, ...]) -> StoredParameter:
        """Return the stored parameter.

        Args:
            name: Name of the logical parameter.
            shape: Shape of the whole parameter in the live model.

        Raises:
            UserError: the checkpoint lacks the parameter, or has it in another shape.
        """
        stored = self.parameters.get(name)
        if stored is None:
            problem = f"has no weight '{name}'"
        elif stored.shape != shape:
            problem = f"has '{name}' in shape {stored.shape} but config.yaml describes {shape}"
        else:
            return stored
        raise UserError(f"{self.path} {problem}; restore the run's own config.yaml")

    def full(self, kind: str, name: str) -> torch.Tensor:
        """Return a whole parameter: fp32, on the CPU.

        Args:
            kind: One of the parameter's `kinds`.
            name: Name of the logical parameter.

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
                target.copy_(self._read(piece.file, tensor_key(kind, name), 0, piece.length))
            full.narrow(block.dim, block.first, block.last - block.first).copy_(flat.view(shape))
        return full

    def elements(
        self, kind: str, name: str, *, block: Block, start: int, length: int
    ) -> torch.Tensor:
        """Return elements [start, start + length) of a flattened block: fp32, on the CPU.

        Args:
            kind: One of the parameter's `kinds`.
            name: Name of the logical parameter.
            block: A block of the whole parameter.
            start: First element in the block.
            length: Number of elements.

        Raises:
            UserError: a file is missing or is not what the index says.
        """
        stored = self.parameters[name]
        result = torch.empty(length)
        blocks = stored.blocks()
        shifts = {
            stored_block: _shift(stored_block, block, stored.shape) for stored_block in blocks
        }
        # Blocks cut along another dimension interleave with this one; assemble the whole.
        if any(shift is None for shift in shifts.values()):
            cut = self.full(kind, name).narrow(block.dim, block.first, block.last - block.first)
            return cut.reshape(-1)[start : start + length]
        for stored_block, shift in shifts.items():
            assert shift is not None
            for piece in blocks[stored_block]:
                first = max(piece.start + shift, start)
                last = min(piece.start + shift + piece.length, start + length)
                if first < last:
                    skipped = first - piece.start - shift
                    values = self._read(
                        piece.file, tensor_key(kind, name), skipped, skipped + last - first
                    )
                    result[first - start : last - start] = values
        return result

    def _read(self, file: str, key: str, start: int, stop: int) -> torch.Tensor:
        """Return elements [start, stop) of a file's slice of a parameter."""
        try:
            if file not in self._files:
                self._files[file] = safe_open(str(self.path / file), framework="pt")
            values = self._files[file].get_slice(key)[start:stop]
        except FileNotFoundError:
            raise damaged(self.path / file, "is missing") from None
        except (OSError, SafetensorError) as error:
            raise damaged(self.path / file, f"cannot be read as safetensors ({error})") from None
        if values.dtype != torch.float32 or values.shape != (stop - start,):
            raise damaged(
                self.path / file, f"does not hold the slice of '{key}' that the index names"
            )
        return values

    def give_weights(self, model: GPT) -> None:
        """Overwrite every parameter and kept row of a model before DeepSpeed wraps it.

        The model keeps its precision. Other buffers, such as a frozen bank, keep their values.

        Raises:
            UserError: the checkpoint is of another model, or damaged.
        """
        parts = parts_of_rank(model.inventory, self._rank, self._size)
        if self._size == 1:
            model_names = {part.name for tensor in parts.values() for part in tensor}
            unknown = sorted(self.parameters.keys() - model_names)
            if unknown:
                raise UserError(
                    f"{self.path} has a weight '{unknown[0]}' that this model has not; "
                    "restore the run's own config.yaml"
                )
        with torch.no_grad():
            for name, weight in lasting_weights(model):
                for part in parts[name]:
                    self.parameter(part.name, part.shape)
                    values = self.elements(
                        MASTER, part.name, block=part.block, start=0, length=part.numel
                    )
                    weight.view(-1).narrow(0, part.start, part.numel).copy_(values)

    def give_optimizer(self, engine: Any) -> None:
        """Overwrite master weights, optimizer states and counters of an engine around the model.

        Raises:
            UserError: the checkpoint is of another optimizer, or damaged.
        """
        parts = parts_of_rank(engine.module.inventory, self._rank, self._size)
        steps: dict[int, int | None] = {}
        for live in slices_of_rank(engine):
            for part, start, values_start, length in overlaps(
                live.start, live.length, parts[live.name]
            ):
                stored = self.parameter(part.name, part.shape)
                self._require_states(part.name, stored, live)
                # Slices of one flat tensor share a step count, so their stored counts must agree.
                if steps.setdefault(id(live.state), stored.step) != stored.step:
                    raise UserError(
                        f"{self.path} has step counts that this run's optimizer keeps "
                        f"together, and '{part.name}' has another; restore the run's own "
                        "config.yaml"
                    )
                if live.step is not None and stored.step is not None:
                    live.step.fill_(stored.step)
                for kind in live.kinds:
                    values = self.elements(
                        kind, part.name, block=part.block, start=start, length=length
                    )
                    live.values(kind).narrow(0, values_start, length).copy_(values)
        set_counters(engine, self.about.counters)

    def _require_states(self, name: str, stored: StoredParameter, live: Slice) -> None:
        """Check that a parameter has the states that this run's optimizer keeps."""
        if stored.states == live.states and (stored.step is None) == (live.step is None):
            return
        kept, needed = (", ".join(states) or "none" for states in (stored.states, live.states))
        raise UserError(
            f"{self.path} has the optimizer states {kept} of '{name}' but this run's "
            f"optimizer keeps {needed}; set the optimizer back, or choose another run.name"
        )


def _shift(stored: Block, target: Block, shape: tuple[int, ...]) -> int | None:
    """Return the offset between an element's index in the flattened `stored` and `wanted` blocks.

    None if the offset is not constant, as when one block is cut along rows and the other along
    columns.
    """
    if stored == target:
        return 0
    ours = stored.rows(shape)
    theirs = target.rows(shape)
    return None if ours is None or theirs is None else ours[0] - theirs[0]
