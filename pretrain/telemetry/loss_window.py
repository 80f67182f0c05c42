"""The variance of the training loss over the last steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from pretrain.runs.tags import LOSS


class LossWindow:
    """The losses of the regular records (steps divisible by `every`) among the last `length` steps.

    It is refilled from the records of metrics.jsonl, so a resumed run goes on with the same variances as an
    uninterrupted one, even if a signal caused an extra record.
    """

    def __init__(self, length: int, every: int, records: Iterable[Mapping[str, Any]]) -> None:
        self._length = length
        self._every = every
        self._losses: deque[tuple[int, float]] = deque()
        for record in records:
            if record["step"] % every == 0:
                loss = record[LOSS.tag]  # null stands for one that was not finite
                self._losses.append((record["step"], math.nan if loss is None else float(loss)))

    def variance(self, step: int, loss: float) -> float:
        """Take the loss of `step`; the population variance of it and of those of `step - length < s < step`.

        NaN where one of them is not finite.
        """
        while self._losses and self._losses[0][0] <= step - self._length:
            self._losses.popleft()
        losses = [earlier for _, earlier in self._losses] + [loss]
        if step % self._every == 0:
            self._losses.append((step, loss))
        if not all(map(math.isfinite, losses)):
            return math.nan
        mean = math.fsum(losses) / len(losses)
        return math.fsum((value - mean) ** 2 for value in losses) / len(losses)
