"""Checks that ranks make together.

All-reduce within each node, of the head node with each other, over all.

This order names the faulty node: ranks of one node depend on that node alone, a pair of nodes on
the link between them. Every step runs in a thread with a time limit, on process groups of its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pretrain.doctor.rendezvous import Rendezvous, bounded
from pretrain.ranks.devices import use_cuda

ELEMENTS = {"cuda": 1 << 26, "cpu": 1 << 20}
"""float32: 256 MiB, at which NCCL is at its best; 4 MiB."""
PERIOD = 1021
"""A prime: no two ranks, and no two slices of a ring, have the same numbers at the same place."""
REPEATS = 3


class WrongSum(Exception):
    """An all-reduce with a wrong result."""


class Collectives:
    """The collective checks on one rank.

    Args:
        rendezvous: the store of all ranks.
        nodes: node -> its ranks, in rank order; the head node first.
        seconds: time limit of each step.
        say: called with the name of each step before it begins.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        nodes: Mapping[str, Sequence[int]],
        seconds: float,
        say: Callable[[str], None],
    ) -> None:
        self.rendezvous = rendezvous
        self.nodes = nodes
        self.seconds = seconds
        self.say = say
        # Kept to the end: closing a group early fails the peer that is still reading.
        self.groups: list[Any] = []
        self.results: dict[str, Any] = {"failures": {}, "links": {}, "link_failures": {}}

    def run(self) -> dict[str, Any]:
        """Run every step; collective over all ranks.

        Returns:
            {"node", "world": GB/s, "failures": {"node", "world": clause}}, on rank 0 with "links"
            {node: GB/s} and "link_failures" {node: clause}.
        """
        # The watchdog of torch's NCCL group would end the whole process when a collective hangs,
        # before the failure is reported. The time limit here is our own.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        rank, node = self.rendezvous.own.rank, self.rendezvous.node
        failures = self.results["failures"]
        speed = self._step(f"node/{node}", self.nodes[node], "all-reduce within the node", failures)
        self.results["node"] = speed
        self.rendezvous.post(f"node-step/{rank}", not failures)
        self._links()
        everybody = sorted(rank for ranks in self.nodes.values() for rank in ranks)
        if rank == 0:
            fit = not self.results["link_failures"] and self._are_fit(everybody)
            self.rendezvous.post("world-step", fit)
        limit = (self.seconds + 5) * (len(self.nodes) + 1)
        if self.rendezvous.read("world-step", limit) and len(self.nodes) > 1:
            speed = self._step("world", everybody, "all-reduce over all ranks", failures)
            self.results["world"] = speed
        return self.results

    def _links(self) -> None:
        """All-reduce of the head node with each other one, between their first ranks."""
        rank = self.rendezvous.own.rank
        (head, (first, *_)), *others = self.nodes.items()
        for node, (leader, *_) in others:
            ends = [first, leader]
            if rank not in ends or not self._are_fit(ends):
                continue  # an unfit node has its problem already
            # Only rank 0 reports links: the other end sees the same failure.
            failures = self.results["link_failures"] if rank == first else {}
            what = f"all-reduce between nodes {head} and {node}"
            self.results["links"][node] = self._step(f"link/{node}", ends, what, failures)

    def _are_fit(self, ranks: Sequence[int]) -> bool:
        """Return whether the step within the node went well on all of `ranks`."""
        done = self.rendezvous.collect("node-step", ranks, self.seconds + 10)
        return len(done) == len(ranks) and all(done.values())

    def _step(
        self, group: str, members: Sequence[int], what: str, failures: dict[str, str]
    ) -> float | None:
        """Return the speed of an all-reduce, or record why it failed.

        Args:
            group: `node/NODE`, `link/NODE` or `world`.
            members: ranks that take part.
            what: name of the step, for people.
            failures: gets the failure, by node for a link, else by the kind of step.
        """
        device = torch.device("cpu")
        if use_cuda():
            device = torch.device("cuda", self.rendezvous.own.local_rank)
        me = members.index(self.rendezvous.own.rank)
        size = len(members)
        self.say(f"the {what}")

        def measure() -> float | None:
            store = self.rendezvous.connection(group, self.seconds)
            self.groups.append(_group(store, me, size, device, seconds=self.seconds))
            return all_reduce_speed(self.groups[-1], me, size, device)

        try:
            return bounded(measure, self.seconds + 5, what)
        except Exception as error:  # gloo's and NCCL's errors have no type of their own
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            kind, _, node = group.partition("/")
            clause = text if isinstance(error, TimeoutError) else f"{what} failed: {text}"
            failures[node if kind == "link" else kind] = clause
            return None


def all_reduce_speed(group: Any, rank: int, size: int, device: torch.device) -> float | None:
    """Return the best bus bandwidth of a few all-reduces, 2 (n-1)/n · bytes / time, as nccl-tests.

    Args:
        group: process group of torch.
        rank: this rank in the group.
        size: ranks of the group.
        device: device of the numbers.

    Returns:
        GB/s; None for a single rank.

    Raises:
        WrongSum: the result differs from the sum of the ranks' values, computed here.
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


def _group(store: dist.Store, rank: int, size: int, device: torch.device, *, seconds: float) -> Any:
    timeout = timedelta(seconds=seconds)
    if device.type == "cpu":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    torch.cuda.set_device(device)  # of this thread
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
