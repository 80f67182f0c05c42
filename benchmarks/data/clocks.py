"""The seconds of a large input less those of a small one, so that imports do not count."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable


def report_difference(small: Callable[[], int], large: Callable[[], int]) -> None:
    """Run both and print how much longer the second took, by the clock and in CPU seconds, and its tokens.

    CPU seconds are those of this process and of its children that have ended. The first call of `small` is
    not measured: it imports what both use.
    """
    small()
    before = _now()
    small()
    between = _now()
    tokens = large()
    after = _now()
    wall, cpu = (c - b - (b - a) for a, b, c in zip(before, between, after, strict=True))
    print("\nmeasured: seconds", wall, "cpu", cpu, "tokens", tokens, flush=True)


def _now() -> tuple[float, float]:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return time.monotonic(), sum(one.ru_utime + one.ru_stime for one in used)
