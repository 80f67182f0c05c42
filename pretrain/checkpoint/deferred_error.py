"""What one rank alone has met, and all must end for: a full disk, a lock that was lost.

A rank that raised alone would leave the others waiting in their next collective. So it makes a note, and all
ranks raise at the next place where they talk to each other anyway.
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


class Trouble:
    """What this rank has met."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sentence: str | None = None

    @property
    def met(self) -> bool:
        return self._sentence is not None

    def note(self, sentence: str) -> None:
        """The run must end for it; of several on one rank the first counts."""
        self._sentence = self._sentence or sentence

    @contextmanager
    def writing(self, place: Path) -> Iterator[None]:
        """What fails under it because a file system would not take it is noted, and not raised.

        Nothing under it may be collective: a rank that could not write does not get to its end.

        Args:
            place: named if the error does not say the file.
        """
        try:
            yield
        except OSError as error:
            self.note(storage_sentence(error, place))

    def met_anywhere(self) -> bool:
        """Whether any rank has met something (collective)."""
        return agree([float(self.met)], self._device)[0] > 0

    def settle(self) -> None:
        """Raise on all ranks what any of them has met (collective).

        Raises:
            UserError: the same on every rank, that of the first rank that has met something.
        """
        if self.met_anywhere():
            self.tell()

    def tell(self) -> NoReturn:
        """The same, when all ranks know already that one of them has met something (collective)."""
        sentences: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(sentences, self._sentence)
        raise UserError(next(sentence for sentence in sentences if sentence is not None))
