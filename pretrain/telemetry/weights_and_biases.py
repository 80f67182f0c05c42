"""The same scalars for Weights & Biases (wandb), an optional package: `telemetry.wandb`.

A run has one id, kept in RUN/wandb/id, so a resumed run continues in the same wandb run. Steps
after the resumed checkpoint that wandb already has are the same numbers again, which wandb skips.
Wandb's environment variables choose its server, or files only (WANDB_MODE=offline).
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from data_pipeline.io.files import write_text_atomically
from pretrain.errors import UserError

PROJECT = "ora-pretrain"
FINISH_SECONDS = 60.0
"""Longest wait for wandb's server at the end; a time limit's signal comes ten minutes before it."""


class WandbRun:
    """An attempt at the run in `run_path`, which continues after `resume_step`; 0: a new run.

    `config.refusals` has checked that the package is installed.

    Args:
        settings: {name: value} by which wandb's tables distinguish runs.
        say: Called if wandb fails. Training continues, since these numbers are also in
            metrics.jsonl.

    Raises:
        UserError: wandb cannot start a new run. A run that continues writes files instead, or
            nothing, since nobody may be there to answer.
    """

    def __init__(
        self,
        run_path: Path,
        resume_step: int,
        settings: Mapping[str, Any],
        say: Callable[[str], None],
    ) -> None:
        import wandb

        self._say = say
        self._run: Any = None
        identity = run_path / "wandb" / "id"
        if resume_step == 0 or not identity.is_file():
            write_text_atomically(identity, uuid.uuid4().hex[:12] + "\n")
        start = partial(
            wandb.init,
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run_path.name,
            id=identity.read_text().strip(),
            resume="allow",
            dir=str(run_path),
            config=dict(settings),
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,
                disable_code=True,
                finish_timeout=FINISH_SECONDS,  # else it waits for its server without an end
            ),
        )
        try:
            self._run = start()
        except Exception as error:  # wandb.Error, and others where its service has gone
            reason = " ".join(str(error).split()).rstrip(".")
            if resume_step == 0:
                raise UserError(
                    f"telemetry.wandb: {reason}; run `wandb login` once, set WANDB_MODE=offline, "
                    "or set telemetry.wandb=false"
                ) from error
            gone = f"telemetry: wandb does not continue the run ({reason})"
            try:
                wandb.teardown()  # it would take the files for those of the run that did not start
                self._run = start(mode="offline")
            except Exception:
                say(f"{gone}; its numbers are in metrics.jsonl alone")
            else:
                say(f"{gone}; `wandb sync {run_path}/wandb/offline-run-*` sends its numbers later")

    def write_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Send all scalars of a step.

        Args:
            values: {tag: value}.
        """
        self._try(lambda: self._run.log(dict(values), step=step))

    def close(self, *, failed: bool) -> None:
        """Send the remaining scalars and finish the wandb run.

        Args:
            failed: Whether an error ended the run, which wandb then shows as failed, not as
                finished.
        """
        self._try(lambda: self._run.finish(exit_code=int(failed)))
        self._run = None

    def _try(self, action: Callable[[], None]) -> None:
        if self._run is None:
            return
        try:
            action()
        except Exception as error:
            # An outside service must not end a training of days, whatever it raises.
            self._run = None
            self._say(f"telemetry: wandb gets no more numbers ({type(error).__name__}: {error})")
