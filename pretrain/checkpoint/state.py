"""Putting a checkpoint into a model and an engine, each rank its own cut, bit for bit.

The weights come first, before DeepSpeed takes the model apart: it makes its own copies of them. Then the
masters, which may be finer than the weights, and AdamW's state are overwritten slice by slice.
"""

from __future__ import annotations

from typing import Any

import torch

from pretrain.checkpoint.blocks import overlaps, parts_of_rank
from pretrain.checkpoint.reading import StoredCheckpoint
from pretrain.checkpoint.slices import MOMENTS, set_counters, slices_of_rank
from pretrain.errors import UserError


class StoredState:
    """The training state in a checkpoint, for tensor-parallel rank `rank` of `size`."""

    def __init__(self, stored: StoredCheckpoint, rank: int, size: int) -> None:
        self._stored = stored
        self._rank, self._size = rank, size

    def give_weights(self, model: torch.nn.Module) -> None:
        """Overwrite every parameter of a model that DeepSpeed has not touched yet, in the model's precision.

        Raises:
            UserError: the checkpoint is of another model, or damaged.
        """
        parts = parts_of_rank(model, self._rank, self._size)
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
        """Overwrite the masters, moments, step counts and counters of an engine around that model.

        Raises:
            UserError: the checkpoint is damaged.
        """
        parts = parts_of_rank(engine.module, self._rank, self._size)
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
