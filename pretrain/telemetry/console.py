"""Progress for people: a progress line on a terminal, plain lines in a log file."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from data_pipeline.io.words import shown
from pretrain.runs.tags import (
    GRADIENT_NORM,
    LEARNING_RATE,
    LOSS,
    PERPLEXITY,
    PERPLEXITY_OF_SOURCE,
    TOKENS_PER_SECOND,
    VALIDATION_LOSS,
)


class StepDisplay:
    """A display of steps on `console` (standard output by default).

    On a terminal every step redraws one line, which fits 80 columns up to a million steps, and
    messages appear above this line, wrapped between words. Elsewhere a line is printed for the
    first and the last step and otherwise at most one in `seconds_between_lines`, and nothing is
    wrapped. A validation always gets its own line.
    """

    def __init__(
        self,
        total_steps: int,
        resume_step: int,
        console: Console | None = None,
        seconds_between_lines: float = 5.0,
    ) -> None:
        self._console = console or Console(file=sys.stdout)
        self._total_steps = total_steps
        self._resume_step = resume_step
        self._seconds_between_lines = seconds_between_lines
        self._started = time.monotonic()
        self._last_line = -math.inf
        whole = Column(no_wrap=True, min_width=8)
        cut = Column(no_wrap=True, overflow="crop")
        self._bar = Progress(
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TextColumn("left", table_column=Column(no_wrap=True)),
            TimeRemainingColumn(table_column=whole),
            # The last column is the one to be cut on a narrow terminal.
            TextColumn("{task.fields[numbers]}", table_column=cut),
            console=self._console,
        )
        self._task = self._bar.add_task(
            "train", total=total_steps, completed=resume_step, numbers=""
        )
        if self._console.is_terminal:
            self._bar.start()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a step.

        Args:
            metrics: {tag: value}.
        """
        speed = f"{metrics[TOKENS_PER_SECOND.tag]:,.0f} tokens/s"
        numbers = (
            f"loss {metrics[LOSS.tag]:.4f}  lr {metrics[LEARNING_RATE.tag]:.2e}  "
            f"grad norm {metrics[GRADIENT_NORM.tag]:.3f}  {speed}"
        )
        now = time.monotonic()
        if self._console.is_terminal:
            short = f"loss {metrics[LOSS.tag]:.4f}  norm {metrics[GRADIENT_NORM.tag]:.3f}  {speed}"
            self._bar.update(self._task, completed=step, numbers=short)
        elif now - self._last_line >= self._seconds_between_lines or step == self._total_steps:
            self._last_line = now
            self.say(f"step {step}/{self._total_steps}  {numbers}  {self._remaining(step, now)}")
        if VALIDATION_LOSS.tag in metrics:
            by_source = PERPLEXITY_OF_SOURCE.members(metrics)
            sources = ", ".join(f"{source} {value:.2f}" for source, value in by_source.items())
            self.say(
                f"step {step}/{self._total_steps}  validation loss "
                f"{metrics[VALIDATION_LOSS.tag]:.4f}  perplexity {metrics[PERPLEXITY.tag]:.2f}  "
                f"({sources})"
            )

    def say(self, message: str) -> None:
        """Print a message verbatim, without markup; in a log, on one line."""
        log = not self._console.is_terminal
        self._console.print(shown(message), soft_wrap=log, markup=False, highlight=False)

    def close(self) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def _remaining(self, step: int, now: float) -> str:
        """Return the time left at this attempt's pace, including validations and checkpoints."""
        seconds_a_step = (now - self._started) / max(1, step - self._resume_step)
        seconds = seconds_a_step * (self._total_steps - step)
        minutes, seconds_left = divmod(round(seconds), 60)
        return f"{minutes // 60}:{minutes % 60:02d}:{seconds_left:02d} left"
