"""Times of the parts of a step, measured without waiting for the GPU in its middle."""

from __future__ import annotations

import time
from itertools import pairwise

import torch


class StepClock:
    """Marks along a step; on CUDA, events in the stream, timed when the GPU reaches them."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[float] = []
        self._events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        """Mark the start of the next part."""
        if not self._on_gpu:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def seconds(self) -> list[float]:
        """Return the parts between the marks; on CUDA, once the GPU is past the last one."""
        if self._on_gpu:
            return [one.elapsed_time(other) / 1e3 for one, other in pairwise(self._events)]
        return [other - one for one, other in pairwise(self._marks)]
