"""The ranks of a job that a run can use: Slurm may give other nodes at every start."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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
            return f"{ranks} is no multiple of parallel.tensor_model_parallel_size={self.tensor_parallel}"
        copies = ranks // self.tensor_parallel
        if self.global_batch % (self.micro_batch * copies):
            return (
                f"data.global_batch_size={self.global_batch} is not divisible by "
                f"data.micro_batch_size={self.micro_batch} times {copies} data-parallel ranks"
            )
        return None


def shape_to_use(given: Shape, batches: Batches) -> tuple[Shape, str | None]:
    """Return the largest part of `given` that a run can use, and the sentence about what is left idle.

    Of shapes with the same number of ranks, first one whose tensor-parallel ranks share a node, then the one
    on the fewest nodes.

    Returns:
        shape: `given` itself where nothing fits, because there are fewer ranks than one copy of the model
            needs: `check_layout` refuses that.
        sentence: None if all of `given` is used, or nothing fits.
    """
    reason = batches.misfit(given.ranks)
    possible = [shape for shape in _parts(given) if batches.misfit(shape.ranks) is None]
    if reason is None or not possible:
        return given, None

    def preference(shape: Shape) -> tuple[int, bool, int]:
        return shape.ranks, shape.ranks_per_node % batches.tensor_parallel == 0, -shape.nodes

    best = max(possible, key=preference)
    return best, f"trains on {best} of the job's {given}: {reason}"


def _parts(given: Shape) -> Iterator[Shape]:
    for nodes in range(1, given.nodes + 1):
        for ranks_per_node in range(1, given.ranks_per_node + 1):
            yield Shape(nodes, ranks_per_node)
