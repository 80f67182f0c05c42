"""Contenders take turns on the same tokens, in an order that rotates."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.step.contenders import Contender, Shape
from pretrain.ranks.groups import ParallelContext

WARM_UP_ROUNDS = 3


def take_turns(
    contenders: dict[str, Contender],
    batch: Callable[[], torch.Tensor],
    rounds: int,
    now: Callable[[], float],
    wait: Callable[[], None],
) -> dict[str, list[float]]:
    """Seconds of every contender's step, round by round; who begins rotates."""
    names = list(contenders)
    times: dict[str, list[float]] = {name: [] for name in names}
    for round_number in range(rounds + WARM_UP_ROUNDS):
        tokens = batch()
        for offset in range(len(names)):
            name = names[(round_number + offset) % len(names)]
            contender = contenders[name]
            wait()
            started = now()
            contender.backward(contender.forward(tokens))
            contender.update()
            wait()
            seconds = now() - started
            if round_number >= WARM_UP_ROUNDS:
                times[name].append(seconds)
    return times


def ratio(mine: list[float], base: list[float]) -> dict[str, float]:
    """Quartiles of the ratio of one round's two times."""
    ratios = [one / other for one, other in zip(mine, base, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {"median": median, "low": low, "high": high}


def batches(shape: Shape, context: ParallelContext) -> Callable[[], torch.Tensor]:
    """What makes new random tokens, `[batch, length + 1]`, on this rank's device."""
    generator = torch.Generator().manual_seed(context.data_parallel_rank)
    size = (shape.batch, shape.length + 1)

    def batch() -> torch.Tensor:
        return torch.randint(0, shape.vocabulary, size, generator=generator).to(context.device)

    return batch


def waiting(context: ParallelContext) -> Callable[[], None]:
    """What brings all ranks, and their GPUs, to the same point."""

    def wait() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if context.world_size > 1:
            dist.barrier()

    return wait
