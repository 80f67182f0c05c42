"""Signals that ask for a stop, as flags that the loop reads between steps.

Imports nothing heavy on purpose: the handlers must be in place before torch is imported, or an
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
"""Asks for a checkpoint with more to do: a site's warning of a time limit or of a preemption."""
STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Asks for a checkpoint and an end: a person's, a site's, or that of a terminal that goes away."""


def handle_requests(handler: Callable[[int, FrameType | None], None]) -> dict[int, Any]:
    """Give a handler to every signal that asks for an end (main thread only).

    Under nohup SIGHUP comes ignored, and stays so.

    Args:
        handler: called with the number of the signal and the frame that it interrupts.

    Returns:
        {signal: its handler before}.
    """
    before: dict[int, Any] = {}
    for number in (*CONTINUE_LATER, *STOP):
        if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
            continue
        before[number] = signal.signal(number, handler)
    return before


class StopSignals:
    """Flags that say how this process was asked to stop.

    A second Ctrl-C interrupts at once.
    """

    def __init__(self) -> None:
        self.continue_later = False
        self.stop = False

    def install(self) -> StopSignals:
        """Put the handlers in place (main thread only)."""
        handle_requests(self._on_signal)
        return self

    def ignore(self) -> None:
        """Ignore signals from here on: a late one must not change the exit code.

        Python puts the default action back when it ends, but leaves ignored signals ignored.
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
