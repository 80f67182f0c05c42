"""The largest part of a job's ranks that a run can use."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product, starmap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pretrain.config.tree import Config


@dataclass(frozen=True)
class Shape:
    """Ranks on nodes, the same number on each."""

    nodes: int
    ranks_per_node: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    def __str__(self) -> str:
        return f"{self.ranks} ranks ({self.nodes} x {self.ranks_per_node})"


@dataclass(frozen=True)
class Batches:
    """The sizes of a configuration that decide which numbers of ranks are possible."""

    global_batch: int
    micro_batch: int
    tensor_parallel: int

    @staticmethod
    def of(config: Config) -> Batches:
        return Batches(
            config.data.global_batch_size,
            config.data.micro_batch_size,
            config.parallel.tensor_model_parallel_size,
        )

    def misfit(self, ranks: int) -> str | None:
        """Return why this number of ranks is impossible; None: it is possible."""
        if ranks % self.tensor_parallel:
            key = "parallel.tensor_model_parallel_size"
            return f"{ranks} is not a multiple of {key}={self.tensor_parallel}"
        copies = ranks // self.tensor_parallel
        if self.global_batch % (self.micro_batch * copies):
            return (
                f"data.global_batch_size={self.global_batch} is not divisible by "
                f"data.micro_batch_size={self.micro_batch} times {copies} data-parallel ranks"
            )
        return None


def shape_to_use(available: Shape, batches: Batches) -> tuple[Shape, str | None]:
    """Return the largest part of a job's ranks that a run can use.

    Among shapes with the same number of ranks, the first choice is one whose tensor-parallel ranks
    share a node, then the one on the fewest nodes. The shape is `available` itself where nothing
    fits, because there are fewer ranks than one copy of the model needs: `resolve` refuses that.

    Returns:
        The shape, and a sentence about idle ranks; None if all ranks are used, or nothing fits.
    """
    reason = batches.misfit(available.ranks)
    best = _largest_part(available, batches)
    if reason is None or best is None:
        return available, None
    sentence = f"trains on {best} of the job's {available}: {reason}"
    with_one_sample = _largest_part(available, replace(batches, micro_batch=1)) or best
    if with_one_sample.ranks > best.ranks:
        share = batches.global_batch * batches.tensor_parallel // with_one_sample.ranks
        size = max(n for n in range(1, batches.micro_batch + 1) if share % n == 0)
        sentence += f"; with data.micro_batch_size={size} it would on {with_one_sample}"
    return best, sentence


def _largest_part(available: Shape, batches: Batches) -> Shape | None:
    """Return the best possible part of a job's ranks, as `shape_to_use` ranks them, or None."""
    parts = product(range(1, available.nodes + 1), range(1, available.ranks_per_node + 1))
    possible = [shape for shape in starmap(Shape, parts) if batches.misfit(shape.ranks) is None]
    return max(
        possible,
        key=lambda s: (s.ranks, s.ranks_per_node % batches.tensor_parallel == 0, -s.nodes),
        default=None,
    )
