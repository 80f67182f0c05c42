"""Advice: what fits a card, how much each switch saves, which numbers of GPUs are possible."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_patches.errors import MethodError
from pretrain.config.load import parse_config
from pretrain.config.resolved import Resolved, resolve
from pretrain.config.sources import override_text
from pretrain.config.tree import Config
from pretrain.errors import UserError
from pretrain.plan.memory import memory_of
from pretrain.plan.workload import workload_of


@dataclass(frozen=True)
class Change:
    """Settings to change together, and the peak in bytes after the change."""

    settings: tuple[str, ...]
    peak_bytes: int
    fits: bool


@dataclass(frozen=True)
class Fit:
    """The largest micro batch that fits, and changes that make a run fit.

    Attributes:
        memory_bytes, peak_bytes: Of the card, and of the rank that needs most.
        largest_micro_batch_size: Largest that fits and divides the ranks' share; None: none fits.
        changes: Changes that lower the peak of a run that does not fit, the gentlest first.
    """

    memory_bytes: int
    peak_bytes: int
    largest_micro_batch_size: int | None
    largest_micro_batch_peak_bytes: int | None
    changes: tuple[Change, ...]

    @property
    def fits(self) -> bool:
        """Return True if the run fits as it is."""
        return self.peak_bytes <= self.memory_bytes


def fit_of(resolved: Resolved, memory: int) -> Fit:
    """Return what fits a card with `memory` bytes.

    memory: Bytes of the card.
    """
    peak = _peak(resolved)
    largest, at_largest = _largest_micro_batch(resolved, memory)
    changes = _changes(resolved, memory, peak, largest) if peak > memory else ()
    return Fit(
        memory_bytes=memory,
        peak_bytes=peak,
        largest_micro_batch_size=largest,
        largest_micro_batch_peak_bytes=at_largest,
        changes=tuple(changes),
    )


def _peak(resolved: Resolved) -> int:
    return memory_of(workload_of(resolved)).peak


def _largest_micro_batch(resolved: Resolved, memory: int) -> tuple[int | None, int | None]:
    """Return (size, peak) of the largest that fits, found by bisection: memory grows with size."""
    work = workload_of(resolved)
    sizes = divisors(resolved.config.data.global_batch_size // resolved.layout.data_parallel_size)

    def peak(size: int) -> int:
        return memory_of(replace(work, batch=size)).peak

    fitting = sizes[: bisect_right(sizes, memory, key=peak)]
    return (fitting[-1], peak(fitting[-1])) if fitting else (None, None)


def _changes(
    resolved: Resolved, memory: int, now: int, micro_batch: int | None
) -> Iterator[Change]:
    """Yield each change that is allowed and brings the peak below `now` bytes."""
    for settings in _candidates(resolved, micro_batch):
        try:
            changed = resolve(_changed(resolved.config, settings), resolved.layout.world_size)
        except (UserError, MethodError):
            continue  # the change contradicts this run's other settings
        peak = _peak(changed)
        if peak < now:
            setting_words = tuple(override_text(key, value) for key, value in settings.items())
            yield Change(setting_words, peak, peak <= memory)


def _candidates(resolved: Resolved, micro_batch: int | None) -> Iterator[dict[str, Any]]:
    yield {"data.micro_batch_size": micro_batch or 1}
    yield {"performance.cross_entropy": "chunked"}
    yield {"performance.recompute": "attention"}
    yield {"performance.recompute": "full"}
    layout = resolved.layout
    stage, size = layout.zero_stage, layout.tensor_model_parallel_size
    for higher in range(max(1, stage + 1), 4):
        yield {"deepspeed.config": f"zero{higher}"}
    for larger in (2, 4, 8):
        if larger > size:
            yield {
                "parallel.tensor_model_parallel_size": larger,
                "parallel.sequence_parallel": True,
            }
    if size > 1 and not layout.sequence_parallel:
        yield {"parallel.sequence_parallel": True}
    yield {
        "data.micro_batch_size": 1,
        "deepspeed.config": "zero3",
        "parallel.tensor_model_parallel_size": 8,
        "parallel.sequence_parallel": True,
    }


def _changed(config: Config, settings: Mapping[str, Any]) -> Config:
    values = config.as_dict()
    for path, value in settings.items():
        section, key = path.split(".")
        values[section][key] = value
    return parse_config(values)


def divisors(number: int) -> list[int]:
    """Return all divisors in ascending order."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def nearest_counts(config: Config, world_size: int) -> str:
    """Return the end of a refusal: possible numbers of GPUs; "" if `world_size` is one of them."""
    size = config.parallel.tensor_model_parallel_size
    passes = config.data.global_batch_size // config.data.micro_batch_size
    counts = [size * ranks for ranks in divisors(passes)]
    if world_size in counts:
        return ""
    least = [size * ranks for ranks in divisors(config.data.global_batch_size)]
    nearest = " or ".join(f"{count:,}" for count in _around(counts, world_size))
    further = [f"{n:,}" for n in _around(least, world_size) if n not in counts]
    if further:
        nearest += f", with data.micro_batch_size=1 also {' or '.join(further)}"
    return f" (the nearest numbers of GPUs that go: {nearest})"


def _around(counts: Sequence[int], count: int) -> list[int]:
    """Return the next lower and the next higher count, or the count itself."""
    at_most = [possible for possible in counts if possible <= count][-1:]
    at_least = [possible for possible in counts if possible >= count][:1]
    return sorted({*at_most, *at_least})
