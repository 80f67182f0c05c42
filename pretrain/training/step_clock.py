"""Where the time of a step goes, without waiting for the GPU in its middle."""

from __future__ import annotations

import time
from itertools import pairwise

import torch


class StepClock:
    """Marks along a step. On CUDA they are events in the stream of work: they tell when the GPU was there."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[float] = []
        self._events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        """Here the next part begins."""
        if not self._on_gpu:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def seconds(self) -> list[float]:
        """The parts between the marks. On CUDA call it when the GPU is known to be past the last one."""
        if self._on_gpu:
            return [one.elapsed_time(other) / 1e3 for one, other in pairwise(self._events)]
        return [other - one for one, other in pairwise(self._marks)]
