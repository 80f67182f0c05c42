"""The watch that names a missing rank: every rank posts its progress for the others to read.

A thread of each rank writes the rank's progress into the rendezvous store several times per
timeout. When a collective times out, the ranks read the store: a silent rank has stopped or lost
its node; a rank that still writes is behind, and says where. Ranks 0 and 1 read the store all the
time and end a run in which another rank was silent for the whole timeout, even if no collective
fails.

The ranks then end at once, because no collective can finish after one rank has left it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from data_pipeline.io.forms import parse_json
from pretrain.ranks.environment import LaunchEnvironment, node_name
from pretrain.ranks.groups import ParallelContext, agree
from pretrain.ranks.idle import PATIENCE, Idleness, file_in_use, waited_for

EXIT_CODE = 2
LOST = 1
"""The exit code of a rank that has lost another; not a user error, so a job continues."""
NEWEST = "the newest checkpoint"
SIGNS_IN_TIMEOUT = 8
MOST_SECONDS_BETWEEN = 10.0
LATE = 2.5
"""A rank is late with its next sign after this many intervals between signs."""
LOOKOUTS = (0, 1)
"""Ranks that read all signs all the time; the others read them after a failed collective."""
_STORE_ERRORS = (RuntimeError, OSError, ValueError)
_IN_VAIN = ("timed out", "timeout")
"""Words in the timeout errors of gloo, of NCCL's blocking waits and of torch's store."""
_GONE = ("connection reset", "connection closed", "broken pipe", "remote process exited")
"""Words in the errors of gloo and NCCL when the process at the other end has ended."""


@dataclass(frozen=True)
class Sign:
    """A sign of life that a rank posts.

    Attributes:
        number: Number of the sign.
        host: The rank's node.
        passed: Number of stages that the rank has entered.
        stage: The stage entered last.
        held: The file that the rank waits for if it is idle; "" if it is not.
    """

    number: int
    host: str
    passed: int
    stage: str
    held: str = ""


def end_process(sentence: str, code: int = EXIT_CODE, store: Any = None) -> NoReturn:
    """Print the sentence, unless another rank has printed one, and end this process at once.

    Use this where raising an error would hang, because its handlers wait for the same thing.

    Args:
        store: Store in which the ranks agree on who prints; by default the rendezvous store.
    """
    first = True
    with suppress(*_STORE_ERRORS):
        first = (_get_default_store() if store is None else store).add("said", 1) == 1
    if first:
        print(f"error: {sentence}", file=sys.stderr, flush=True)
    os._exit(code)


def _newest() -> str:
    return NEWEST


class Watch:
    """A rank's part of the watch; all ranks create theirs together, after the rendezvous.

    Args:
        held: Returns a clause about anything that holds up every rank, or ""; called after a
            collective has timed out.

    Attributes:
        saved: Returns the name of what the same command continues from.
    """

    def __init__(
        self, launch: LaunchEnvironment, timeout_seconds: float, held: Callable[[], str] = str
    ) -> None:
        self._held = held
        self.saved: Callable[[], str] = _newest
        self._rank = launch.rank
        self._ranks = range(launch.world_size)
        self._timeout = timeout_seconds
        self.seconds_between_signs = min(MOST_SECONDS_BETWEEN, timeout_seconds / SIGNS_IN_TIMEOUT)
        self._host = node_name()
        self._passed, self._stage = 0, "its start"
        self._signs: dict[int, Sign] = {}
        self._silent = dict.fromkeys(self._ranks, 0.0)
        self._idle = Idleness()
        self._last_round = time.monotonic()
        self._suspended = 0.0
        self._rounds_since = 0
        self._of = threading.get_ident()
        self._ended = threading.Event()
        self._using_store = threading.RLock()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._whole_store: Any = None
        if len(self._ranks) > 1:
            store: Any = _get_default_store()
            store = store.clone()  # a separate client, so that its timeout is not the collectives'
            store.set_timeout(timedelta(seconds=max(1.0, self.seconds_between_signs)))
            self._whole_store = store
            # A process that trains several times, as tests do, meets at the same store, so every
            # watch gets its own prefix.
            self._store = dist.PrefixStore(f"watch/{store.add(f'watch/{self._rank}', 1)}", store)
        self._thread.start()

    def at(self, stage: str) -> None:
        """Enter a stage; all ranks enter the same stages in the same order."""
        self._passed, self._stage = self._passed + 1, stage

    def note_progress(self) -> None:
        """Reset the idle timer: this rank waits for one that is making progress."""
        self._idle.seconds = 0.0

    def close(self) -> None:
        """Stop the watch's thread."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def explain(self, error: BaseException) -> None:
        """End this process with a sentence if `error` is a collective's timeout or lost connection.

        Any other error returns.
        """
        message = str(error).lower()
        gone = any(word in message for word in _GONE)
        if len(self._ranks) == 1 or not (gone or any(word in message for word in _IN_VAIN)):
            return
        self._note_suspension()
        if self._suspended:
            self._end(self._was_suspended(), LOST)
        if gone:
            self._end(self._lost(), LOST)
        seconds = (LATE + 1) * self.seconds_between_signs
        if self._rank not in LOOKOUTS:
            self._look(0.0)
            time.sleep(seconds)
            self._look(seconds)
        elif not self._late():  # the thread looks
            time.sleep(seconds)
        self._end(self.sentence())

    def _run(self) -> None:
        number = 0
        entered = self._passed
        while not self._ended.is_set():
            number += 1
            self._rounds_since += 1
            # A process that was suspended has not seen the silence of the others meanwhile, so one
            # round counts for two intervals at most.
            self._note_suspension()
            now = time.monotonic()
            passed = min(now - self._last_round, 2 * self.seconds_between_signs)
            self._last_round = now
            self._idle.look(passed)
            if entered != self._passed:
                entered = self._passed
                self._idle.seconds = 0.0
            if len(self._ranks) > 1:
                self._post(number, passed)
            if self._idle.seconds > PATIENCE * self._timeout and not self._ended.is_set():
                self._end(self._own_wait())
            silence = max(self._silent.values())
            if silence > self._timeout + self.seconds_between_signs and not self._ended.is_set():
                self._end(self.sentence())
            self._ended.wait(self.seconds_between_signs)

    def _note_suspension(self) -> None:
        """Note for how long this process has just stood still, if for longer than a round takes.

        A suspension, as of a whole job by its scheduler or of a laptop, lets the timeouts of
        collectives pass. It is forgotten once the ranks have had the time to meet again.
        """
        still = time.monotonic() - self._last_round - self.seconds_between_signs
        if still > LATE * self.seconds_between_signs:
            self._suspended = still
            self._rounds_since = 0
        elif self._rounds_since > SIGNS_IN_TIMEOUT:
            self._suspended = 0.0

    def _was_suspended(self) -> str:
        return (
            f"rank {self._rank} on {self._host} was suspended for {self._suspended:.0f} s at "
            f"{self._stage}, and a collective waits {self._timeout:g} s (parallel.timeout_seconds) "
            f"at most; {self._again()}"
        )

    def _post(self, number: int, passed: float) -> None:
        """Post this rank's sign; the lookouts then read all signs."""
        idle = self._idle.seconds > LATE * self.seconds_between_signs
        held = str(file_in_use(self._of) or "") if idle else ""
        sign = Sign(number, self._host, self._passed, self._stage, held=held)
        try:
            with self._using_store:
                self._store.set(str(self._rank), json.dumps(vars(sign)))
        except _STORE_ERRORS:
            # The store lives in rank 0, or in the launcher, which ends all ranks.
            self._silent[0] += passed
        else:
            if self._rank in LOOKOUTS:
                self._look(passed)

    def _own_wait(self) -> str:
        """Return the sentence about this rank, which has been idle for too long.

        It waits for a file, or in a collective for a rank that posts the file it waits for.
        """
        if len(self._ranks) > 1:
            self._look(0.0)
        if any(sign.held for rank, sign in self._signs.items() if rank != self._rank):
            return self.sentence()
        return (
            f"rank {self._rank} on {self._host} waited {self._idle.seconds:.0f} s "
            f"(parallel.timeout_seconds is {self._timeout:g}) at {self._stage}: "
            f"{self._held() or waited_for(file_in_use(self._of))}; then {self._again()}"
        )

    def _look(self, passed: float) -> None:
        """Read all signs, `passed` seconds after the previous look."""
        with suppress(*_STORE_ERRORS), self._using_store:
            # Reading a key that does not exist yet would block until the store's timeout.
            come = [r for r in self._ranks if r in self._signs or self._store.check([str(r)])]
            texts = self._store.multi_get([str(rank) for rank in come])
            for rank, text in zip(come, texts, strict=True):
                sign = Sign(**parse_json(text))
                previous = self._signs.get(rank)
                silent = previous is not None and previous.number == sign.number
                self._silent[rank] = self._silent[rank] + passed if silent else 0.0
                self._signs[rank] = sign

    def _late(self) -> list[int]:
        """Return the other ranks that have posted no new sign for too long."""
        late = LATE * self.seconds_between_signs
        return [
            rank for rank, seconds in self._silent.items() if seconds > late and rank != self._rank
        ]

    def _end(self, sentence: str, code: int = EXIT_CODE) -> NoReturn:
        with self._using_store:
            end_process(sentence, code, self._whole_store)

    def _lost(self) -> str:
        return (
            f"rank {self._rank} on {self._host} lost its connection to another rank at "
            f"{self._stage}: that one has ended, or its node is gone; look at its log and its "
            f"node; then {self._again()}"
        )

    def _again(self) -> str:
        return f"the same command continues from {self.saved()}"

    def sentence(self) -> str:
        """Return the sentence that names the missing rank, as far as the signs tell."""
        waited = f"rank {self._rank} waited {self._timeout:g} s (parallel.timeout_seconds)"
        waiting = f"{waited} at {self._stage}"
        again = f"; then {self._again()}"
        silent = self._late()
        if silent:
            names = " and ".join(self._name(rank) for rank in silent[:4])
            more = f" and {len(silent) - 4} more" if len(silent) > 4 else ""
            return (
                f"{names}{more} gave no sign while {waiting}: it was stopped, or its node is gone; "
                f"look at its node and its log{again}"
            )
        signs = {rank: sign for rank, sign in self._signs.items() if rank != self._rank}
        held = next((rank for rank, sign in signs.items() if sign.held), None)
        if held is not None:
            why = self._held() or waited_for(Path(signs[held].held))
            return f"{self._name(held)} did not come while {waiting}: {why}{again}"
        if why := self._held():
            return f"{waiting}: {why}{again}"
        behind = min(signs, key=lambda rank: signs[rank].passed, default=None)
        if behind is not None and signs[behind].passed < self._passed:
            late = f"{self._name(behind)} did not come while {waiting}"
            return f"{late}; look at what holds it, in its log{again}"
        return f"{waiting} and no rank is behind: look at the network between the nodes{again}"

    def _name(self, rank: int) -> str:
        sign = self._signs.get(rank)
        return f"rank {rank} on {sign.host} (last seen at {sign.stage})" if sign else f"rank {rank}"


@contextmanager
def watching(
    launch: LaunchEnvironment, timeout_seconds: float, held: Callable[[], str] = str
) -> Iterator[Watch]:
    """Watch over the block: a collective that times out ends the process with a sentence.

    Args:
        timeout_seconds: Timeout of a collective.
        held: Returns a clause about anything that holds up every rank, or "".
    """
    watch = Watch(launch, timeout_seconds, held)
    try:
        yield watch
    except RuntimeError as error:
        watch.explain(error)
        raise
    finally:
        watch.close()


@contextmanager
def others_waiting(context: ParallelContext, watch: Watch) -> Iterator[None]:
    """Make the other ranks wait before the block until rank 0 has left it (collective).

    Computing the order of the samples takes time in proportion to their number, 79 s for 100
    billion tokens (docs/data-format.md), and a collective waits for parallel.timeout_seconds at
    most. So a thread of rank 0 tells the others that the work goes on. If rank 0 hangs, its own
    watch ends it; if it is gone, the watches of the others notice.
    """
    if context.world_size == 1:
        yield
    elif context.is_first:
        ended = threading.Event()
        with ThreadPoolExecutor(1, "teller") as teller:
            told = teller.submit(_tell, ended, context.device, watch.seconds_between_signs)
            try:
                yield
            finally:
                ended.set()
                told.result()  # raises if another rank is gone
    else:
        while agree([0.0], context.device)[0] > 0:
            watch.note_progress()
        yield


def _tell(ended: threading.Event, device: torch.device, every: float) -> None:
    """Tell the other ranks every few seconds that the work goes on, and at last that it ended."""
    while not ended.wait(every):
        agree([1.0], device)
    agree([0.0], device)
