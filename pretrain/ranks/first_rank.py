"""Work of rank 0 for which the others wait, however long it takes while it makes progress.

Computing the order of the samples takes time in proportion to their number, 79 s for 100 billion
tokens (docs/data-format.md), and a collective waits for parallel.timeout_seconds at most. So a
thread of rank 0 tells the others that the work goes on. If rank 0 hangs, its own watch ends it; if
it is gone, the watches of the others notice.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pretrain.ranks.groups import ParallelContext, agree
from pretrain.ranks.watch import Watch


@contextmanager
def others_waiting(context: ParallelContext, watch: Watch) -> Iterator[None]:
    """Make the other ranks wait before the block until rank 0 has left it (collective)."""
    if context.world_size == 1:
        yield
    elif context.is_first:
        teller = _Teller(context.device, watch.seconds_between_signs)
        try:
            yield
        finally:
            teller.end()
    else:
        while agree([0.0], context.device)[0] > 0:
            watch.note_progress()
        yield


class _Teller:
    """A thread of rank 0 that tells the others every few seconds that the work goes on."""

    def __init__(self, device: torch.device, every: float) -> None:
        self._device = device
        self._every = every
        self._ended = threading.Event()
        self._error: RuntimeError | None = None
        self._thread = threading.Thread(target=self._run, name="teller", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Tell the others that the work has ended.

        Raises:
            RuntimeError: another rank is gone.
        """
        self._ended.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while not self._ended.wait(self._every):
                agree([1.0], self._device)
            agree([0.0], self._device)
        except RuntimeError as error:
            self._error = error
