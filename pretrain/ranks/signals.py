"""Signals that ask for a stop, as flags that the loop reads between steps.

This file imports nothing heavy: the handlers must be installed before torch is imported, or an
early signal kills the rank.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

from pretrain.ranks.environment import speaks_for_all
from pretrain.ranks.output import say_at_once

CONTINUE_LATER = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
"""Signals for a checkpoint of a run to be continued: a site's warning of a time limit or of a
preemption."""
STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals for a checkpoint and an end, from a person, a site or a terminal that closes."""


def handle_requests(handler: Callable[[int, FrameType | None], None]) -> dict[int, Any]:
    """Install a handler for every signal that asks for an end (main thread only).

    SIGHUP stays ignored where nohup has set it so.

    Args:
        handler: Called with the number of the signal and the interrupted frame.

    Returns:
        {signal: its earlier handler}.
    """
    earlier_handlers: dict[int, Any] = {}
    for number in (*CONTINUE_LATER, *STOP):
        if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
            continue
        earlier_handlers[number] = signal.signal(number, handler)
    return earlier_handlers


class StopSignals:
    """Flags for the kind of stop that signals have asked of this process.

    A second Ctrl-C interrupts at once.
    """

    def __init__(self) -> None:
        self.continue_later = False
        self.stop = False

    def install(self) -> StopSignals:
        """Install the handlers (main thread only)."""
        handle_requests(self._on_signal)
        return self

    def ignore(self) -> None:
        """Ignore signals from here on, so that a late one cannot change the exit code.

        At its end Python restores default actions, but leaves ignored signals ignored.
        """
        for number in (*CONTINUE_LATER, *STOP):
            signal.signal(number, signal.SIG_IGN)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number in CONTINUE_LATER:
            self.continue_later = True
            return
        if number == signal.SIGINT:
            if self.stop:
                raise KeyboardInterrupt
            if speaks_for_all():
                say_at_once("stopping after this step (Ctrl-C again to stop at once)")
        self.stop = True
