"""checkpoint.export_at_end: the export of a finished run, by a process of its own.

The run is finished before, and stays so: what goes wrong here is said, and the export can be made later.
"""

from __future__ import annotations

import os
import subprocess
import sys

from pretrain.config.tree import Config
from pretrain.errors import UserError
from pretrain.export.architectures import architecture_of
from pretrain.export.packages import require_transformers
from pretrain.export.select_checkpoint import find_checkpoint
from pretrain.ranks.environment import speaks_for_all, without_launcher
from pretrain.runs.directory import FINISHED, RunDirectory

_TIMEOUT = 6 * 3600


def check_can_export(config: Config) -> None:
    """Refuse before step 1 what would be refused after the last.

    Raises:
        UserError: transformers is missing, or has no class for this model.
    """
    try:
        require_transformers("export")
        architecture_of(config)
    except UserError as error:
        raise UserError(f"checkpoint.export_at_end: {error}") from error


def export_at_end(config: Config, state: str) -> None:
    """Export a finished run into its run directory (rank 0), unless that has been done."""
    run = RunDirectory(config.run_path)
    if state != FINISHED or not speaks_for_all():
        return
    out = run.exports / find_checkpoint(run, None).name
    if out.exists():
        return
    command = [sys.executable, "-m", "pretrain", "export", str(run.path), "--out", str(out)]
    try:
        done = subprocess.run(
            command, env=without_launcher(os.environ), capture_output=True, text=True, timeout=_TIMEOUT
        )
    except subprocess.TimeoutExpired:
        problem = f"it was not done after {_TIMEOUT // 3600} hours"
    else:
        if done.returncode == 0:
            print(f"exported: {done.stdout.strip()}", flush=True)
            return
        problem = done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
    print(
        f"warning: the run is finished, but its export failed ({problem.removeprefix('error: ')}); try again "
        f"with `python -m pretrain export {run.path} --out {out}`",
        file=sys.stderr,
        flush=True,
    )
