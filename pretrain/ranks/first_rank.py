"""Work of rank 0 for which the others wait, however long it takes while it makes progress.

Computing the order of the samples takes time in proportion to their number, 79 s for 100 billion
tokens (docs/data-format.md), and a collective waits for parallel.timeout_seconds at most. So a
thread of rank 0 tells the others that the work goes on. If rank 0 hangs, its own watch ends it; if
it is gone, the watches of the others notice.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
        ended = threading.Event()
        with ThreadPoolExecutor(1, "teller") as teller:
            told = teller.submit(_tell, ended, context.device, watch.seconds_between_signs)
            try:
                yield
            finally:
                ended.set()
                told.result()  # raises if another rank is gone
    else:
        while agree([0.0], context.device)[0] > 0:
            watch.note_progress()
        yield


def _tell(ended: threading.Event, device: torch.device, every: float) -> None:
    """Tell the other ranks every few seconds that the work goes on, and at last that it ended."""
    while not ended.wait(every):
        agree([1.0], device)
    agree([0.0], device)
