"""What ranks find out together: all-reduce within each node, of the head node with each other, over all.

In this order, because only it can name a node: the ranks of a node depend on that node alone, a pair of
nodes on the way between them. Every step runs beside the main thread with a time limit, on process groups
of its own that share nothing with one another.
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

from pretrain.doctor.rendezvous import Meeting, bounded
from pretrain.ranks.devices import use_cuda

ELEMENTS = {"cuda": 1 << 26, "cpu": 1 << 20}  # float32: 256 MiB, at which NCCL is at its best; 4 MiB
PERIOD = 1021  # prime: no two ranks, and no two slices of a ring, have the same numbers at the same place
REPEATS = 3


class WrongSum(Exception):
    """An all-reduce gave another result than arithmetic."""


@dataclass
class Collectives:
    """One rank's part in all steps.

    Attributes:
        nodes: node -> its ranks, in rank order; the head node first.
        seconds: limit of each step.
        found: {"node" | "link" | "world": GB/s}, on rank 0 "links": {node: GB/s}, and what went wrong:
            "failures" and "link_failures".
    """

    meeting: Meeting
    nodes: Mapping[str, Sequence[int]]
    seconds: float
    say: Callable[[str], None]
    groups: list[Any] = field(default_factory=list)
    """Kept to the end: a rank that closes a group early fails the peer that is still reading."""
    found: dict[str, Any] = field(
        default_factory=lambda: {"failures": {}, "links": {}, "link_failures": {}, "world": None}
    )

    def run(self) -> dict[str, Any]:
        """Every step (collective over all ranks of `nodes`); returns `found`."""
        # The watchdog of torch's NCCL group ends the whole process when a collective hangs: then nobody could
        # say so. The time limit is ours.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        place = self.meeting.place
        mine = self.nodes[place.node]
        self.say("the all-reduce within the node")
        self._step("node", f"node/{place.node}", mine, self.found["failures"], "all-reduce within the node")
        self.meeting.post(f"node-step/{place.rank}", not self.found["failures"])
        self._links()
        if place.rank == 0:
            fit = not self.found["link_failures"] and self._all_fit()
            self.meeting.post("world-step", fit)
        limit = (self.seconds + 5) * (len(self.nodes) + 1)
        if self.meeting.read("world-step", limit) and len(self.nodes) > 1:
            self.say("the all-reduce over all ranks")
            everybody = sorted(rank for ranks in self.nodes.values() for rank in ranks)
            self._step(
                "world", "world", everybody, self.found["failures"], "all-reduce over all ranks", key="world"
            )
        return self.found

    def _links(self) -> None:
        """The head node's first rank with each other node's first rank, one after the other."""
        place = self.meeting.place
        leaders = {node: ranks[0] for node, ranks in self.nodes.items()}
        (head, first), *others = leaders.items()
        for node, leader in others:
            if place.rank not in (first, leader):
                continue
            if not all(self.meeting.read(f"node-step/{rank}", self.seconds + 10) for rank in (first, leader)):
                continue  # that node has its problem already
            what = f"all-reduce between nodes {head} and {node}"
            self.say(f"the {what}")
            # Only rank 0 speaks of links: the other end sees the same failure.
            failures = self.found["link_failures"] if place.rank == first else {}
            speed = self._step("link", f"link/{node}", [first, leader], failures, what, key=node)
            if place.rank == first:
                self.found["links"][node] = speed

    def _all_fit(self) -> bool:
        everybody = [rank for ranks in self.nodes.values() for rank in ranks]
        done = self.meeting.collect("node-step", everybody, self.seconds + 10)
        return len(done) == len(everybody) and all(done.values())

    def _step(
        self,
        name: str,
        group: str,
        members: Sequence[int],
        failures: dict[str, str],
        what: str,
        key: str = "node",
    ) -> float | None:
        """Record the speed, or why there is none."""
        rank, device = self.meeting.place.rank, _device(self.meeting.place.local_rank)

        def measure() -> float | None:
            store = self.meeting.connection(group, self.seconds)
            me, size = members.index(rank), len(members)
            self.groups.append(_group(store, me, size, device, timedelta(seconds=self.seconds)))
            return all_reduce_speed(self.groups[-1], me, size, device)

        try:
            self.found[name] = bounded(measure, self.seconds + 5, what)
        except Exception as error:  # gloo's and NCCL's errors have no type of their own
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            failures[key] = text if isinstance(error, TimeoutError) else f"{what} failed: {text}"
            return None
        return self.found[name]


def all_reduce_speed(group: Any, rank: int, size: int, device: torch.device) -> float | None:
    """Bus bandwidth of the best of a few all-reduces, in GB/s: 2 (n-1)/n · bytes / time, as nccl-tests.

    A rank alone has none.

    Raises:
        WrongSum: the result differs from the sum, computed here, of what the ranks put in.
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


def _group(store: dist.Store, rank: int, size: int, device: torch.device, timeout: timedelta) -> Any:
    if device.type == "cpu":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    torch.cuda.set_device(device)  # of this thread
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _device(local_rank: int) -> torch.device:
    return torch.device("cuda", local_rank) if use_cuda() else torch.device("cpu")
