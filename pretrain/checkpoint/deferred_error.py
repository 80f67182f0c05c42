"""Errors that happen on one rank and must stop all ranks, such as a full disk or a lost lock.

A rank that raised at once would leave the others blocked in their next collective. It records the error
instead, and all ranks raise it together at the next point where they synchronise anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from pretrain.errors import UserError
from pretrain.ranks.groups import agree
from pretrain.runs.storage import storage_sentence


class DeferredError:
    """The first fatal error recorded on this rank, if any."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sentence: str | None = None

    @property
    def recorded(self) -> bool:
        return self._sentence is not None

    def record(self, sentence: str) -> None:
        """Record an error for which the run must end; only the first one on a rank is kept."""
        self._sentence = self._sentence or sentence

    @contextmanager
    def recording(self, place: Path) -> Iterator[None]:
        """Record an OSError raised inside, in place of raising it.

        No collective may be called inside: a rank whose write fails leaves the block early. `place`: named in
        the sentence if the error does not name a file.
        """
        try:
            yield
        except OSError as error:
            self.record(storage_sentence(error, place))

    def recorded_anywhere(self) -> bool:
        """Return whether any rank has recorded an error (collective)."""
        return agree([float(self.recorded)], self._device)[0] > 0

    def raise_if_recorded(self) -> None:
        """Raise on all ranks if any rank has recorded an error (collective).

        Raises UserError: the same on every rank: the error of the first rank that has recorded one.
        """
        if self.recorded_anywhere():
            self.raise_together()

    def raise_together(self) -> NoReturn:
        """Raise the first rank's error on all ranks, which know already that there is one (collective)."""
        sentences: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(sentences, self._sentence)
        raise UserError(next(sentence for sentence in sentences if sentence is not None))
