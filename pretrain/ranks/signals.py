"""Signals that ask for a stop, as flags that the loop reads between steps.

Imports nothing heavy on purpose: the handlers must be in place before torch is imported, or an
early signal kills the rank.
"""

from __future__ import annotations

import signal
from types import FrameType

from pretrain.ranks.environment import speaks_for_all


class StopSignals:
    """Flags that say by which signal this process was asked to stop.

    SIGUSR1 asks for a checkpoint with more to do; SIGTERM and the first Ctrl-C for a checkpoint and
    an end. A second Ctrl-C interrupts at once.
    """

    def __init__(self) -> None:
        self.continue_later = False
        self.stop = False

    def install(self) -> StopSignals:
        """Put the handlers in place (main thread only)."""
        signal.signal(signal.SIGUSR1, self._on_signal)
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        return self

    def ignore(self) -> None:
        """Ignore signals from here on: a late one must not change the exit code.

        Python puts the default action back when it ends, but leaves ignored signals ignored.
        """
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self.continue_later = True
            return
        if number == signal.SIGINT:
            if self.stop:
                raise KeyboardInterrupt
            if speaks_for_all():
                print("stopping after this step (Ctrl-C again to stop at once)", flush=True)
        self.stop = True
