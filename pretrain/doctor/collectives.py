"""Checks that ranks make together: all-reduce within each node, of the head node with each other, over all.

This order names the faulty node: ranks of one node depend on that node alone, a pair of nodes on the link
between them. Every step runs in a thread with a time limit, on process groups of its own that share nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pretrain.doctor.rendezvous import Rendezvous, bounded
from pretrain.ranks.devices import use_cuda

ELEMENTS = {
    "cuda": 1 << 26,
    "cpu": 1 << 20,
}  # float32: 256 MiB, at which NCCL is at its best; 4 MiB
PERIOD = 1021  # prime: no two ranks, and no two slices of a ring, have the same numbers at the same place
REPEATS = 3


class WrongSum(Exception):
    """An all-reduce with a wrong result."""


@dataclass
class Collectives:
    """The collective checks on one rank.

    `nodes`: node -> its ranks, in rank order; the head node first. `results`: {"node" | "link" | "world":
    GB/s}, on rank 0 "links": {node: GB/s}, and the errors as clauses in "failures" and "link_failures".
    """

    rendezvous: Rendezvous
    nodes: Mapping[str, Sequence[int]]
    seconds: float
    say: Callable[[str], None]
    groups: list[Any] = field(default_factory=list)
    """Process groups, kept to the end: closing a group early fails the peer that is still reading."""
    results: dict[str, Any] = field(
        default_factory=lambda: {"failures": {}, "links": {}, "link_failures": {}, "world": None}
    )

    def run(self) -> dict[str, Any]:
        """Run every step (collective over all ranks of `nodes`) and return `results`."""
        # The watchdog of torch's NCCL group would end the whole process when a collective hangs, before the
        # failure is reported. The time limit here is our own.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        own = self.rendezvous.own
        mine, failures = self.nodes[self.rendezvous.node], self.results["failures"]
        self._step(f"node/{self.rendezvous.node}", mine, "all-reduce within the node", failures)
        self.rendezvous.post(f"node-step/{own.rank}", not failures)
        self._links()
        everybody = sorted(rank for ranks in self.nodes.values() for rank in ranks)
        if own.rank == 0:
            self.rendezvous.post(
                "world-step", not self.results["link_failures"] and self._are_fit(everybody)
            )
        limit = (self.seconds + 5) * (len(self.nodes) + 1)
        if self.rendezvous.read("world-step", limit) and len(self.nodes) > 1:
            self._step("world", everybody, "all-reduce over all ranks", failures)
        return self.results

    def _links(self) -> None:
        """Run an all-reduce of the head node's first rank with each other node's first rank, one by one."""
        own = self.rendezvous.own
        leaders = {node: ranks[0] for node, ranks in self.nodes.items()}
        (head, first), *others = leaders.items()
        for node, leader in others:
            ends = [first, leader]
            if own.rank not in ends or not self._are_fit(ends):
                continue  # an unfit node has its problem already
            # Only rank 0 reports links: the other end sees the same failure.
            failures = self.results["link_failures"] if own.rank == first else {}
            speed = self._step(
                f"link/{node}", ends, f"all-reduce between nodes {head} and {node}", failures
            )
            if own.rank == first:
                self.results["links"][node] = speed

    def _are_fit(self, ranks: Sequence[int]) -> bool:
        """Return whether the step within the node went well on all of `ranks`."""
        done = self.rendezvous.collect("node-step", ranks, self.seconds + 10)
        return len(done) == len(ranks) and all(done.values())

    def _step(
        self, group: str, members: Sequence[int], what: str, failures: dict[str, str]
    ) -> float | None:
        """Run a step; record and return the speed, or record the failure.

        `group`: `node/NODE`, `link/NODE` or `world`.
        """
        rank, cuda = self.rendezvous.own.rank, ("cuda", self.rendezvous.own.local_rank)
        device = torch.device(*cuda) if use_cuda() else torch.device("cpu")
        name, _, node = group.partition("/")
        self.say(f"the {what}")

        def measure() -> float | None:
            store = self.rendezvous.connection(group, self.seconds)
            me, size = members.index(rank), len(members)
            self.groups.append(_group(store, me, size, device, timedelta(seconds=self.seconds)))
            return all_reduce_speed(self.groups[-1], me, size, device)

        try:
            self.results[name] = bounded(measure, self.seconds + 5, what)
        except Exception as error:  # gloo's and NCCL's errors have no type of their own
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            failures[node if name == "link" else name] = (
                text if isinstance(error, TimeoutError) else f"{what} failed: {text}"
            )
            return None
        return self.results[name]


def all_reduce_speed(group: Any, rank: int, size: int, device: torch.device) -> float | None:
    """Return the best bus bandwidth of a few all-reduces in GB/s: 2 (n-1)/n · bytes / time, as nccl-tests.

    Return None for a single rank. Raises WrongSum: the result differs from the sum of the ranks' values,
    computed here.
    """
    places = torch.arange(ELEMENTS[device.type], device=device)
    # Whole numbers below 2^24: every order of summation gives the same float32.
    table = torch.zeros(PERIOD, device=device)
    for member in range(size):
        table += (torch.arange(PERIOD, device=device) + 7 * member) % PERIOD
    expected = table[places % PERIOD]
    own = ((places + 7 * rank) % PERIOD).float()
    best = float("inf")
    for _ in range(1 + REPEATS):  # the first also connects
        values = own.clone()
        _synchronize(device)
        started = time.monotonic()
        group.allreduce([values]).wait()
        _synchronize(device)
        best = min(best, time.monotonic() - started)
        wrong = int((values != expected).sum())
        if wrong:
            raise WrongSum(f"{wrong:,} of {len(values):,} sums are wrong")
    return 2 * (size - 1) / size * own.nbytes / best / 1e9 if size > 1 else None


def _group(
    store: dist.Store, rank: int, size: int, device: torch.device, timeout: timedelta
) -> Any:
    if device.type == "cpu":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    torch.cuda.set_device(device)  # of this thread
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
