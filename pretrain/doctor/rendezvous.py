"""Where the ranks meet: a key-value store on rank 0, every wait of which ends, and who should be there.

A process group cannot say who is missing: it hangs, or fails on whoever happened to wait for the missing
rank. Here every rank writes its own keys, and rank 0 reads each rank's with a deadline.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from pretrain.errors import UserError
from pretrain.ranks.environment import (
    LaunchEnvironment,
    launcher_listens,
    meeting_point,
    node_name,
    restarts,
)
from pretrain.ranks.groups import wait_for_first_rank

T = TypeVar("T")


class NoAnswer(Exception):
    """Rank 0 cannot be reached, or no longer."""


@dataclass(frozen=True)
class Place:
    """Which process this is. `node` is the name that `sbatch --exclude` knows."""

    rank: int
    local_rank: int
    world_size: int
    node: str

    @staticmethod
    def read() -> Place:
        """From the launcher's environment.

        Raises:
            UserError: a half-set environment.
        """
        launch = LaunchEnvironment.read()
        return Place(launch.rank, launch.local_rank, launch.world_size, node_name())


class Meeting:
    """This rank's access to the common store. Values are JSON.

    Args:
        seconds: how long to wait for rank 0.

    Raises:
        NoAnswer: rank 0 does not answer.
        UserError: on rank 0, if it cannot listen.
    """

    def __init__(self, place: Place, seconds: float) -> None:
        self.place = place
        # A process on its own needs no store that others reach.
        self._address = meeting_point()
        # A launcher's store (torchrun, --local-ranks) outlives its ranks: a rank that it has started again
        # must not read old answers.
        self._prefix = f"doctor/{restarts()}"
        self._store = self._open(seconds, first=True)

    def connection(self, name: str, seconds: float) -> dist.Store:
        """A store of its own for a process group: a wait on a connection blocks all others on it."""
        store = self._store if self._address is None else self._open(seconds, first=False)
        return dist.PrefixStore(f"{self._prefix}/{name}", store)

    def post(self, key: str, value: Any) -> None:
        """Let every rank know.

        Raises:
            NoAnswer
        """
        try:
            self._store.set(f"{self._prefix}/{key}", json.dumps(value))
        except RuntimeError as error:  # torch.distributed's own errors are RuntimeErrors
            raise NoAnswer(str(error)) from error

    def read(self, key: str, seconds: float) -> Any:
        """The value once it is there; None if it does not come in time.

        Raises:
            NoAnswer
        """
        name = f"{self._prefix}/{key}"
        try:
            self._store.wait([name], timedelta(seconds=max(0.001, seconds)))
            return json.loads(self._store.get(name))
        except dist.DistStoreError:
            return None
        except RuntimeError as error:
            raise NoAnswer(str(error)) from error

    def collect(self, key: str, ranks: Iterable[int], seconds: float) -> dict[int, Any]:
        """`KEY/RANK` of every rank that posts it in time.

        Raises:
            NoAnswer
        """
        deadline = time.monotonic() + seconds
        found = {rank: self.read(f"{key}/{rank}", deadline - time.monotonic()) for rank in ranks}
        return {rank: value for rank, value in found.items() if value is not None}

    def _open(self, seconds: float, *, first: bool) -> dist.Store:
        if self._address is None:
            return dist.HashStore()
        address, port = self._address
        host = first and self.place.rank == 0 and not launcher_listens()
        timeout = timedelta(seconds=seconds)
        try:
            if not host:
                wait_for_first_rank(timeout)
            return dist.TCPStore(address, port, None, host, timeout, wait_for_workers=False)
        except (RuntimeError, OSError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            if host:
                raise UserError(
                    f"rank 0 on node {self.place.node} cannot listen at MASTER_ADDR={address} "
                    f"MASTER_PORT={port} ({reason}); set them to the head node's address and a free port"
                ) from error
            raise NoAnswer(f"{address}:{port}: {reason}") from error


def bounded(action: Callable[[], T], seconds: float, what: str) -> T:
    """The result of `action`, or TimeoutError.

    The action runs in a thread: a read from a dead file server and a collective whose peer is gone cannot be
    interrupted, only left behind.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(action())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(max(0.0, seconds))
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"{what} did not end within {seconds:.0f} s")
    return results[0]
