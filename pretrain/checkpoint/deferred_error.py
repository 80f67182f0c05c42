"""An error of one rank that all ranks raise together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import torch

from pretrain.errors import UserError
from pretrain.ranks.groups import agree, gathered
from pretrain.runs.storage import storage_sentence


class DeferredError:
    """The first error of this rank for which all must end, such as a full disk or a lost lock.

    A rank that raised at once would leave the others blocked in their next collective. It records
    the error instead, and all ranks raise it together at the next point where they synchronise
    anyway.

    Args:
        device: device of the collectives.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._error: UserError | None = None

    @property
    def recorded(self) -> bool:
        """Return whether this rank has an error."""
        return self._error is not None

    def record(self, error: UserError) -> None:
        """Record an error for which the run must end; only the first one on a rank is kept."""
        self._error = self._error or error

    @contextmanager
    def recording(self, place: Path) -> Iterator[None]:
        """Record an OSError raised inside, in place of raising it.

        No collective may be called inside: a rank whose write fails leaves the block early.

        Args:
            place: named in the sentence if the error does not name a file.
        """
        try:
            yield
        except OSError as error:
            self.record(UserError(storage_sentence(error, place)))

    def recorded_anywhere(self) -> bool:
        """Return whether any rank has recorded an error (collective)."""
        return agree([float(self.recorded)], self._device)[0] > 0

    def raise_together(self) -> NoReturn:
        """Raise one error on all ranks, which know already that there is one (collective).

        Raises:
            UserError: of the first rank that has one.
        """
        raise next(error for error in gathered(self._error) if error is not None)
