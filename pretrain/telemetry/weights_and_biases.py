"""The same scalars for Weights & Biases (wandb), an optional package: `telemetry.wandb`.

A run has one id, kept in RUN/wandb/id, so a resumed run continues where it was. Steps after the
resumed checkpoint that wandb has already are the same numbers again, and wandb leaves them out.
Where it sends them, or that it only writes files (WANDB_MODE=offline), is said by wandb's own
environment variables.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pretrain.errors import UserError
from pretrain.runs.directory import write_text_atomically

PROJECT = "ora-pretrain"


class WandbRun:
    """An attempt at the run in `run_path`, which continues after `resume_step`; 0: a new run.

    The package is there: `config.refusals` has asked.

    Args:
        settings: {name: value}, what wandb's tables tell runs apart by.
        say: told once if wandb fails on the way. Training continues: these numbers are also in
            metrics.jsonl.

    Raises:
        UserError: wandb does not begin.
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
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT),
                name=run_path.name,
                id=identity.read_text().strip(),
                resume="allow",
                dir=str(run_path),
                config=dict(settings),
                settings=wandb.Settings(
                    silent=True, console="off", disable_git=True, disable_code=True
                ),
            )
        except wandb.Error as error:
            raise UserError(
                f"telemetry.wandb: {' '.join(str(error).split()).rstrip('.')}; run `wandb login` "
                "once, set WANDB_MODE=offline, or set telemetry.wandb=false"
            ) from error

    def write_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Send all scalars of a step.

        Args:
            step: of the optimizer.
            values: {tag: value}.
        """
        self._try(lambda: self._run.log(dict(values), step=step))

    def close(self, *, failed: bool) -> None:
        """Hand over what is not yet sent.

        Args:
            failed: an error ended the run, which wandb then shows as failed, not as finished.
        """
        self._try(lambda: self._run.finish(exit_code=int(failed)))
        self._run = None

    def _try(self, action: Callable[[], None]) -> None:
        if self._run is None:
            return
        try:
            action()
        except Exception as error:
            # Whatever a service outside does, it must not end a training of days.
            self._run = None
            self._say(f"telemetry: wandb gets no more numbers ({type(error).__name__}: {error})")
