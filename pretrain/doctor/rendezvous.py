"""Rendezvous of the ranks: a key-value store on rank 0 in which every wait has a time limit.

A process group cannot say which rank is missing: it hangs, or fails on the rank that happened to
wait for the missing one. Here every rank writes its own keys, and rank 0 reads them with a
deadline.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
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
    """Rank 0 cannot be reached, or can no longer be reached."""


class Rendezvous:
    """Access of this rank to the common store; values are JSON.

    Args:
        launch: This rank.
        seconds: Time to wait for rank 0.

    Raises:
        NoAnswer: rank 0 does not answer.
        UserError: rank 0 cannot listen.
    """

    def __init__(self, launch: LaunchEnvironment, seconds: float) -> None:
        self.launch = launch
        self.node = node_name()
        self._address = meeting_point()  # None: a single process needs no store that others reach
        self._store = self._open(seconds, host=launch.rank == 0 and not launcher_listens())

    def connection(self, name: str, seconds: float) -> dist.Store:
        """Return a separate connection for a process group: a wait on one blocks its other users.

        Args:
            name: Name of the group; it keeps the group's keys apart from those of others.
            seconds: Time to wait for rank 0.

        Raises:
            NoAnswer: rank 0 does not answer.
        """
        store = self._store if self._address is None else self._open(seconds, host=False)
        return dist.PrefixStore(name, store)

    def post(self, key: str, value: Any) -> None:
        """Write a JSON value that every rank can read.

        Raises:
            NoAnswer: rank 0 does not answer.
        """
        try:
            self._store.set(key, json.dumps(value))
        except RuntimeError as error:  # torch.distributed's own errors are RuntimeErrors
            raise NoAnswer(str(error)) from error

    def read(self, key: str, seconds: float) -> Any:
        """Return a value, or None if it does not come in time.

        Raises:
            NoAnswer: rank 0 does not answer.
        """
        try:
            self._store.wait([key], timedelta(seconds=max(0.001, seconds)))
            return json.loads(self._store.get(key))
        except dist.DistStoreError:
            return None
        except RuntimeError as error:
            raise NoAnswer(str(error)) from error

    def collect(self, key: str, ranks: Iterable[int], seconds: float) -> dict[int, Any]:
        """Return {rank: value of `KEY/RANK`} of every rank that posts in time.

        Args:
            seconds: Time to wait for all ranks together.

        Raises:
            NoAnswer: rank 0 does not answer.
        """
        deadline = time.monotonic() + seconds
        values = {rank: self.read(f"{key}/{rank}", deadline - time.monotonic()) for rank in ranks}
        return {rank: value for rank, value in values.items() if value is not None}

    def _open(self, seconds: float, *, host: bool) -> dist.Store:
        # A launcher's store (torchrun, --local-ranks) outlives its ranks: a restarted rank must not
        # read old answers.
        prefix = f"doctor/{restarts()}"
        if self._address is None:
            return dist.PrefixStore(prefix, dist.HashStore())
        address, port = self._address
        timeout = timedelta(seconds=seconds)
        try:
            if not host:
                wait_for_first_rank(timeout)
            store = dist.TCPStore(
                address, port, is_master=host, timeout=timeout, wait_for_workers=False
            )
        except (RuntimeError, OSError) as error:
            reason = first_line(error)
            if host:
                raise UserError(
                    f"rank 0 on node {self.node} cannot listen at MASTER_ADDR={address} "
                    f"MASTER_PORT={port} ({reason}); set them to the head node's address and a "
                    "free port"
                ) from error
            raise NoAnswer(f"{address}:{port}: {reason}") from error
        return dist.PrefixStore(prefix, store)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or the error's type if it has none."""
    return str(error).partition("\n")[0] or type(error).__name__


def bounded(action: Callable[[], T], seconds: float, description: str) -> T:
    """Return the result of `action` if it ends within a time limit.

    The action runs in a thread, which is abandoned at the limit: neither a read from a dead file
    server nor a collective whose peer is gone can be interrupted.

    Args:
        seconds: Time limit.
        description: Name of the action, for the error.

    Raises:
        TimeoutError: the action did not end in time.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(action())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return done.result(max(0.0, seconds))
    except TimeoutError as error:
        if done.done():  # the TimeoutError of the action itself
            raise
        raise TimeoutError(f"{description} did not end within {seconds:.0f} s") from error
