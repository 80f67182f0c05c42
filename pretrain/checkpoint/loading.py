"""Loading a checkpoint of any layout into a model, into an engine, or as plain tensors, bit for bit.

    for name, weight in full_weights(Path("runs/NAME/checkpoints/step_00000123")):
        ...    # fp32, on the CPU, one parameter at a time; no engine, no process groups

When a run resumes, every rank loads its own part of each parameter. The model's weights come first, before
DeepSpeed wraps the model and makes its own copies of them. Then the master weights, which may be more precise
than the model's, and AdamW's state are overwritten slice by slice.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_patches.model.gpt import GPT
from pretrain.checkpoint.blocks import overlaps, parts_of_rank
from pretrain.checkpoint.reading import StoredCheckpoint
from pretrain.checkpoint.slices import MOMENTS, set_counters, slices_of_rank
from pretrain.errors import UserError


def full_weights(checkpoint: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, fp32 master weight) of every trained parameter, sorted by name.

    Frozen Query/Key rows are not among them: they are regenerated. The trainable heads beside a frozen bank
    are two parameters, `….trained_query` and `….trained_key`, `[heads * head_dim, hidden]` in head order.

    Raises:
        UserError: the checkpoint is of another format, or damaged.
    """
    stored = StoredCheckpoint(checkpoint)
    for name in sorted(stored.parameters):
        yield name, stored.full("master", name)


def load_weights(checkpoint: Path, model: GPT) -> None:
    """Load a checkpoint's weights into a model built without parallelism, in the model's precision.

    The checkpoint must have exactly the model's parameters; buffers, such as a frozen bank, are left alone.

    Raises:
        UserError: the checkpoint is of another model, of another format, or damaged.
    """
    StoredState(StoredCheckpoint(checkpoint), rank=0, size=1).give_weights(model)


class StoredState:
    """The training state in a checkpoint, for tensor-parallel rank `rank` of `size`."""

    def __init__(self, stored: StoredCheckpoint, rank: int, size: int) -> None:
        self._stored = stored
        self._rank, self._size = rank, size

    def give_weights(self, model: GPT) -> None:
        """Overwrite every parameter of a model that DeepSpeed has not wrapped yet, in the model's precision.

        Raises:
            UserError: the checkpoint is of another model, or damaged.
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

        Raises:
            UserError: the checkpoint is damaged.
        """
        parts = parts_of_rank(engine.module.inventory, self._rank, self._size)
        steps: dict[int, int] = {}
        for own in slices_of_rank(engine):
            for part, start, values_start, length in overlaps(own.start, own.length, parts[own.name]):
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
