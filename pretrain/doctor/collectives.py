"""All-reduces that the ranks make together, within each node and over all ranks.

This order finds the faulty node, because ranks of one node depend on that node alone. Every step
runs in a thread with a time limit, on a process group of its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from pretrain.doctor.rendezvous import Rendezvous, bounded, first_line
from pretrain.ranks.devices import own_device

ELEMENTS = {"cuda": 1 << 26, "cpu": 1 << 20}
"""float32: 256 MiB, which NCCL splits into many pieces; 4 MiB."""
PERIOD = 1021
"""A prime: no two ranks, and no two slices of a ring, have the same numbers in the same place."""


def all_reduce_failures(
    rendezvous: Rendezvous, nodes: Mapping[str, Sequence[int]], seconds: float
) -> dict[str, str]:
    """All-reduce within this rank's node, then over all ranks; collective over all of them.

    Args:
        nodes: {node: its ranks, in rank order}.
        seconds: Time limit of each step.

    Returns:
        {"node", "world": reason of the failure}; a step that succeeded is missing.
    """
    # The watchdog of torch's NCCL group would end the whole process when a collective hangs,
    # before the failure is reported. The time limit here is our own.
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    groups: list[Any] = []  # kept to the end: closing one early fails the peer that still reads

    def all_reduce(name: str, members: Sequence[int]) -> None:
        device = own_device(rendezvous.launch.local_rank)
        store = rendezvous.connection(name, seconds)
        group_rank = members.index(rendezvous.launch.rank)
        groups.append(_group(store, group_rank, len(members), device, seconds=seconds))
        check_all_reduce(groups[-1], group_rank, len(members), device)

    steps = {"node": ("all-reduce within the node", nodes[rendezvous.node])}
    if len(nodes) > 1:
        ranks_of_all = [rank for ranks in nodes.values() for rank in ranks]
        steps["world"] = ("all-reduce over all ranks", sorted(ranks_of_all))
    failures = {}
    for step, (description, members) in steps.items():
        name = f"{step}/{members[0]}"
        try:
            bounded(partial(all_reduce, name, members), seconds + 5, description)
        except TimeoutError as error:
            failures[step] = str(error)
        except Exception as error:  # gloo's and NCCL's errors have no type of their own
            failures[step] = f"{description} failed: {first_line(error)}"
    return failures


def check_all_reduce(group: Any, rank: int, size: int, device: torch.device) -> None:
    """Compare the result of an all-reduce with the sum of the ranks' values, computed locally.

    Raises:
        RuntimeError: the sums differ.
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
        raise RuntimeError(f"{wrong:,} of {len(values):,} sums are wrong")


def _group(store: dist.Store, rank: int, size: int, device: torch.device, *, seconds: float) -> Any:
    timeout = timedelta(seconds=seconds)
    if device.type == "cpu":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    torch.cuda.set_device(device)  # of this thread
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)
