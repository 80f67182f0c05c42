"""Checks that ranks make together.

All-reduce within each node, of the head node with each other, over all.

This order names the faulty node: ranks of one node depend on that node alone, a pair of nodes on
the link between them. Every step runs in a thread with a time limit, on process groups of its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pretrain.doctor.rendezvous import Rendezvous, bounded
from pretrain.ranks.devices import own_device

ELEMENTS = {"cuda": 1 << 26, "cpu": 1 << 20}
"""float32: 256 MiB, of which NCCL makes many pieces; 4 MiB."""
PERIOD = 1021
"""A prime: no two ranks, and no two slices of a ring, have the same numbers at the same place."""


class WrongSum(Exception):
    """An all-reduce with a wrong result."""


class Collectives:
    """The collective checks on one rank.

    Args:
        rendezvous: the store of all ranks.
        nodes: node -> its ranks, in rank order; the head node first.
        seconds: time limit of each step.
    """

    def __init__(
        self, rendezvous: Rendezvous, nodes: Mapping[str, Sequence[int]], seconds: float
    ) -> None:
        self.rendezvous = rendezvous
        self.nodes = nodes
        self.seconds = seconds
        # Kept to the end: closing a group early fails the peer that is still reading.
        self.groups: list[Any] = []

    def run(self) -> dict[str, Any]:
        """Run every step; collective over all ranks.

        Returns:
            {"failures": {"node", "world": clause}, "link_failures": {node: clause}}; the latter is
            empty but on rank 0.
        """
        # The watchdog of torch's NCCL group would end the whole process when a collective hangs,
        # before the failure is reported. The time limit here is our own.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        rank, node = self.rendezvous.own.rank, self.rendezvous.node
        failures = {
            "node": self._step(f"node/{node}", self.nodes[node], "all-reduce within the node")
        }
        self.rendezvous.post(f"node-step/{rank}", failures["node"] is None)
        links = self._links()
        everybody = sorted(rank for ranks in self.nodes.values() for rank in ranks)
        if rank == 0:
            fit = not links and self._are_fit(everybody)
            self.rendezvous.post("world-step", fit)
        limit = (self.seconds + 5) * (len(self.nodes) + 1)
        if self.rendezvous.read("world-step", limit) and len(self.nodes) > 1:
            failures["world"] = self._step("world", everybody, "all-reduce over all ranks")
        failed = {step: clause for step, clause in failures.items() if clause}
        return {"failures": failed, "link_failures": links}

    def _links(self) -> dict[str, str]:
        """All-reduce of the head node with each other one, between their first ranks.

        Returns:
            {node: why it failed}, on rank 0 only: the other end sees the same failure.
        """
        rank = self.rendezvous.own.rank
        failures = {}
        (head, (first, *_)), *others = self.nodes.items()
        for node, (leader, *_) in others:
            ends = [first, leader]
            if rank not in ends or not self._are_fit(ends):
                continue  # an unfit node has its problem already
            what = f"all-reduce between nodes {head} and {node}"
            clause = self._step(f"link/{node}", ends, what)
            if clause and rank == first:
                failures[node] = clause
        return failures

    def _are_fit(self, ranks: Sequence[int]) -> bool:
        """Return whether the step within the node went well on all of `ranks`."""
        done = self.rendezvous.collect("node-step", ranks, self.seconds + 10)
        return len(done) == len(ranks) and all(done.values())

    def _step(self, group: str, members: Sequence[int], what: str) -> str | None:
        """Return why an all-reduce failed, or None.

        Args:
            group: `node/NODE`, `link/NODE` or `world`.
            members: ranks that take part.
            what: name of the step, for people.
        """
        device = own_device(self.rendezvous.own.local_rank)
        me = members.index(self.rendezvous.own.rank)
        size = len(members)

        def check() -> None:
            store = self.rendezvous.connection(group, self.seconds)
            self.groups.append(_group(store, me, size, device, seconds=self.seconds))
            check_all_reduce(self.groups[-1], me, size, device)

        try:
            bounded(check, self.seconds + 5, what)
        except TimeoutError as error:
            return str(error)
        except Exception as error:  # gloo's and NCCL's errors have no type of their own
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            return f"{what} failed: {text}"
        return None


def check_all_reduce(group: Any, rank: int, size: int, device: torch.device) -> None:
    """Compare the result of an all-reduce with the sum of the ranks' values, computed here.

    Args:
        group: process group of torch.
        rank: this rank in the group.
        size: ranks of the group.
        device: device of the numbers.

    Raises:
        WrongSum: they differ.
    """
    places = torch.arange(ELEMENTS[device.type], device=device)
    # Whole numbers below 2^24: every order of summation gives the same float32.
    table = torch.zeros(PERIOD, device=device)
    for member in range(size):
        table += (torch.arange(PERIOD, device=device) + 7 * member) % PERIOD
    values = ((places + 7 * rank) % PERIOD).float()
    group.allreduce([values]).wait()
    wrong = int((values != table[places % PERIOD]).sum())
    if wrong:
        raise WrongSum(f"{wrong:,} of {len(values):,} sums are wrong")


def _group(store: dist.Store, rank: int, size: int, device: torch.device, *, seconds: float) -> Any:
    timeout = timedelta(seconds=seconds)
    if device.type == "cpu":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    torch.cuda.set_device(device)  # of this thread
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)
