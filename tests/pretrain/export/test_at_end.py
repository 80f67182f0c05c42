"""The export at the end of a training: it does not outlive the process that started it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pretrain.runs.directory import RunDirectory
from tests.fabricated_checkpoints import bare_checkpoint
from tests.ranks import ROOT, rank_environment

PROGRAM = """
import sys
from pretrain.config.load import load_config
from pretrain.export.run_exports import export_at_end
export_at_end(load_config("demo", sys.argv[1:]).run_directory, "finished")
"""


@pytest.mark.distributed
def test_the_export_ends_with_the_rank_that_waits_for_it(tmp_path: Path) -> None:
    bare_checkpoint(RunDirectory(tmp_path / "run"), 4)
    os.mkfifo(tmp_path / "run/config.yaml")  # which the export would read for ever
    overrides = ["run.name=run", f"run.directory={tmp_path}"]
    rank = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *overrides], cwd=ROOT, env=rank_environment(), text=True
    )
    deadline = time.monotonic() + 60
    children = []
    while time.monotonic() < deadline:
        children = psutil.Process(rank.pid).children()
        # A fork becomes the export a moment later.
        if children and "export" in children[0].cmdline():
            break
        time.sleep(0.01)
    (export,) = children
    assert "export" in export.cmdline()
    rank.kill()
    rank.wait()
    gone, alive = psutil.wait_procs([export], timeout=3)
    for process in alive:
        process.kill()
    assert alive == [] and len(gone) == 1
