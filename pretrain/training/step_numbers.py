"""Numbers of a step: sums over the ranks in one all-reduce, and the seconds of its parts.

Nothing here waits for the GPU before the whole step is submitted.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist

from pretrain.ranks.groups import ParallelContext
from pretrain.telemetry.records import StepSeconds
from pretrain.training.update import Update


class Flags(NamedTuple):
    """Requests and errors that a rank knows on the host, for every rank to learn."""

    stop: bool
    continue_later: bool
    error: bool


@dataclass(frozen=True)
class StepTotals:
    """The numbers of a step over all ranks, on the host.

    Attributes:
        loss: Mean over the global batch, in nats per token.
        terms: A tensor-parallel rank's part of each term that the model adds to the loss.
        asked: Flags that any rank has raised.
        updated: Whether the weights moved.
        gradient_norm: Global norm before clipping.
    """

    loss: float
    terms: Mapping[str, float]
    asked: Flags
    updated: bool
    gradient_norm: float


class StepSums:
    """Flags and losses summed over all ranks, on the device (one small all-reduce, collective).

    Args:
        loss: This rank's part of the loss.
        terms: This rank's parts of the other terms.
    """

    def __init__(
        self,
        flags: Flags,
        loss: torch.Tensor,
        terms: Mapping[str, torch.Tensor],
        context: ParallelContext,
    ) -> None:
        self._terms = tuple(terms)
        self._context = context
        on_device = torch.stack([number.double() for number in (loss, *terms.values())])
        # Flags share the losses' all-reduce: one small collective a step instead of two.
        raised = torch.tensor(flags, dtype=torch.float64)
        if on_device.is_cuda:
            raised = raised.pin_memory().to(on_device.device, non_blocking=True)
        self._sums = torch.cat([raised, on_device])
        dist.all_reduce(self._sums)

    def are_good(self, largest_loss: float) -> torch.Tensor:
        """Return on the device whether all sums are finite and the loss is within the limit."""
        mean_loss = self._sums[len(Flags._fields)] / self._context.world_size
        return self._sums.isfinite().all() & (mean_loss <= largest_loss)

    def read(self, update: Update) -> StepTotals:
        """Return the totals on the host, with the update's outcome; waits for the device once."""
        outcome = torch.stack([update.moved, update.gradient_norm])
        names = ("updated", "gradient_norm", *Flags._fields, "loss", *map(_term, self._terms))
        numbers = torch.cat([outcome, self._sums]).tolist()
        total = dict(zip(names, numbers, strict=True))
        shares = self._context.data_parallel_size
        return StepTotals(
            loss=total["loss"] / self._context.world_size,
            terms={name: total[_term(name)] / shares for name in self._terms},
            asked=Flags(*(total[flag] > 0 for flag in Flags._fields)),
            updated=bool(total["updated"]),
            gradient_norm=total["gradient_norm"],
        )


def _term(name: str) -> str:
    return f"term {name}"


class StepClock:
    """Times of the parts of a step; on CUDA, events in the stream that the GPU times."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._parts: list[str] = []
        self._marks: list[float] = []
        self._events: list[torch.cuda.Event] = []

    def begin(self, part: str) -> None:
        """Mark the start of a part, and the end of the previous one."""
        self._parts.append(part)
        self.end()

    def end(self) -> None:
        """Mark the end of the last part."""
        if not self._on_gpu:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def seconds(self) -> StepSeconds:
        """Return the seconds of the parts; on CUDA, only after the GPU has passed the last one."""
        if self._on_gpu:
            lengths = [
                start.elapsed_time(end) / 1e3  # milliseconds
                for start, end in pairwise(self._events)
            ]
        else:
            lengths = [end - start for start, end in pairwise(self._marks)]
        seconds_of = dict(zip(self._parts, lengths, strict=True))
        return StepSeconds(
            step=sum(lengths),
            data=seconds_of["data"] + seconds_of["next data"],
            forward_backward=seconds_of["forward and backward"],
            optimizer=seconds_of["update"],
        )
