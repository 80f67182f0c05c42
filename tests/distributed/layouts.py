"""Chains of layouts.

A run is saved at one and goes on at the next, so that few runs try many pairs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from typing import NamedTuple

from tests.distributed.designs import PHASED

CANDIDATES = 400


class Layout(NamedTuple):
    """How a run is spread over processes, and the samples of a micro batch; a step has 4."""

    tensor_parallel: int
    data_parallel: int
    zero_stage: int
    sequence_parallel: bool
    micro_batch_size: int

    @property
    def ranks(self) -> int:
        return self.tensor_parallel * self.data_parallel

    def __str__(self) -> str:
        sequence = "sp" if self.sequence_parallel else ""
        return f"tp{self.tensor_parallel}{sequence}dp{self.data_parallel}z{self.zero_stage}"


class Chain(NamedTuple):
    """A design in a precision, through layouts.

    "bf16 sums": gradients are summed in bf16 too; "fp32 muon": by that optimizer.
    """

    design: str
    precision: str
    layouts: tuple[Layout, ...]

    def __str__(self) -> str:
        return "-".join([self.design, self.precision.replace(" ", "-"), *map(str, self.layouts)])


Fact = tuple[object, ...]


def layouts(largest_world: int) -> list[Layout]:
    """{TP 1, 2, 4} × {DP 1, 2, 4} × {ZeRO 0, 1, 2, 3} on at most so many ranks."""
    return [
        Layout(
            tp,
            dp,
            zero_stage=stage,
            sequence_parallel=tp > 1 and stage % 2 == 0,
            micro_batch_size=2 if dp < 4 and stage % 3 else 1,
        )
        for tp in (1, 2, 4)
        for dp in (1, 2, 4)
        for stage in (0, 1, 2, 3)
        if tp * dp <= largest_world
    ]


def possible(design: str, precision: str, layout: Layout) -> bool:
    """Return whether the program accepts it, by the rules of `pretrain.config.layout_refusals`."""
    if design in PHASED and layout.zero_stage not in (1, 2):
        return False
    if "hybrid" in design and layout.zero_stage == 3 and layout.tensor_parallel == 4:
        return False  # two of the four ranks have no trained head, or none that is frozen
    if layout.zero_stage:
        return layout.zero_stage == 1 or "muon" not in precision
    return precision.startswith("fp32") or (
        precision == "bf16 sums" and layout.tensor_parallel == 1
    )


def facts(chain: Chain) -> Iterator[Fact]:
    """What a chain tries: two properties of a layout at once, and each change of a property."""
    for layout in chain.layouts:
        properties = {**layout._asdict(), "precision": chain.precision}
        yield from combinations(sorted(properties.items()), 2)
    for prior, after in pairwise(chain.layouts):
        for name in ("tensor_parallel", "data_parallel", "zero_stage"):
            yield name, getattr(prior, name), getattr(after, name)


def chains(designs: Sequence[tuple[str, str]], pool: Sequence[Layout], length: int) -> list[Chain]:
    """One chain for each (design, precision); together they try as much as is easily found."""
    draw = random.Random(0)
    tried = set[Fact]()
    chosen = []
    for design, precision in designs:
        allowed = [layout for layout in pool if possible(design, precision, layout)]
        candidates = [
            Chain(design, precision, tuple(draw.sample(allowed, length))) for _ in range(CANDIDATES)
        ]
        best = max(candidates, key=lambda chain: len(set(facts(chain)) - tried))
        tried |= set(facts(best))
        chosen.append(best)
    return chosen
