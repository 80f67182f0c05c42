"""Starting the real command line in tests, interrupting it, and comparing what it left on disk.

Every call starts an interpreter that imports torch and the rest anew, which takes seconds: it is
for what is about processes (exit codes, signals, kills, what is printed). Else tests/ranks.py has
warm ones.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

from pretrain.runs.metrics_file import read_metrics
from pretrain.runs.tags import METRICS
from tests.ranks import ROOT, rank_environment, run_program

MEASURED = {metric.tag for metric in METRICS if metric.measured}
"""Tags whose values are clock or memory readings; every other value must repeat exactly."""


def cli(
    arguments: Sequence[str], timeout: float = 500, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `python -m pretrain ARGUMENTS` to its end; `environment` is added to the usual one."""
    command = [sys.executable, "-m", "pretrain", *arguments]
    return run_program(command, environment or {}, timeout=timeout)


def train(
    overrides: Sequence[str], ranks: int, timeout: float = 500
) -> subprocess.CompletedProcess[str]:
    """Run `python -m pretrain train demo OVERRIDES --local-ranks RANKS` to its end."""
    return cli(["train", "demo", *overrides, "--local-ranks", str(ranks)], timeout)


def assert_refused(done: subprocess.CompletedProcess[str], *fragments: str) -> None:
    """Exit code 2 and, on stderr, one sentence and nothing else, with all of `fragments`."""
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    assert "Traceback" not in done.stdout
    for fragment in fragments:
        assert fragment in lines[0]


def files_under(directory: Path) -> dict[str, bytes]:
    """Every file below `directory` with its content."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


@contextmanager
def started(
    overrides: Sequence[str], ranks: int, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[psutil.Popen]:
    """The same, in the background; whatever of it is left is killed at the end."""
    words = ["train", "demo", *overrides, "--local-ranks", str(ranks)]
    command = [sys.executable, "-m", "pretrain", *words]
    with log.open("w") as output:
        env = rank_environment() | dict(environment or {})
        launcher = psutil.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=output)
        family = [launcher]
        try:
            yield launcher
        finally:
            if launcher.is_running():
                family += launcher.children(recursive=True)
                launcher.kill()
            psutil.wait_procs(family, timeout=30)


def held_before(step: int) -> dict[str, str]:
    """Return the environment in which rank 0 waits before a step for a signal to stop."""
    return {"PYTHONPATH": f"{ROOT / 'tests/slurm/hold'}:{ROOT}", "HOLD_AT": str(step)}


def wait_until(
    condition: Callable[[], bool], launcher: psutil.Popen, what: str, timeout: float = 300
) -> None:
    """Poll until `condition`; fails if the run ends first or the time is over."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert launcher.poll() is None, f"the run ended before {what}"
        assert time.monotonic() < deadline, f"waited {timeout} s for {what}"
        time.sleep(0.01)


def logged_steps(run: Path) -> list[int]:
    """Steps in metrics.jsonl, in file order; a torn last line is left out."""
    path = run / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.is_file() else []
    return [int(line.split('"step":')[1].split(",")[0]) for line in lines]


def deterministic_metrics(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without clock and memory readings."""
    return [
        {key: value for key, value in record.items() if key not in MEASURED}
        for record in read_metrics(run / "metrics.jsonl")
    ]


def checkpoint_tensors(checkpoint: Path) -> dict[str, Any]:
    """Masters and moments of all parameters, whole, their steps, and the run's counters.

    Put together from the files alone, so that it can be held against what the program reads from
    them.
    """
    files = {file.name: load_file(file) for file in checkpoint.glob("*.safetensors")}
    about = json.loads((checkpoint / "checkpoint.json").read_text())
    tensors = {
        f"{part}/{key}": value
        for part in ("position", "counters")
        for key, value in about[part].items()
    }
    for name, stored in json.loads((checkpoint / "parameters.json").read_text()).items():
        tensors[f"step/{name}"] = stored["step"]
        for kind in ("master", *stored.get("states", ("exp_avg", "exp_avg_sq"))):
            tensors[f"{kind}/{name}"] = full = torch.full(stored["shape"], torch.nan)
            for piece in stored["slices"]:
                block = piece["block"]
                rows = full.narrow(block["dim"], block["first"], block["last"] - block["first"])
                flat = rows.flatten()
                flat[piece["start"] :][: piece["length"]] = files[piece["file"]][f"{kind}/{name}"]
                rows.copy_(flat.view(rows.shape))
    return tensors


def assert_same_checkpoint(checkpoint: Path, other: Path, more_than: int = 20) -> None:
    """Two checkpoints have the same `checkpoint_tensors` bit for bit, and more than so many."""
    ours = checkpoint_tensors(checkpoint)
    theirs = checkpoint_tensors(other)
    assert ours.keys() == theirs.keys() and len(ours) > more_than
    assert [key for key in ours if not equal(ours[key], theirs[key])] == [], checkpoint


def assert_resumed_exactly(run: Path, again: Path, more_than: int = 20) -> None:
    """A run that was resumed has the records and the last checkpoint of the uninterrupted one."""
    assert (again / "state").read_text() == "finished\n"
    segments = json.loads((again / "environment.json").read_text())["segments"]
    assert segments[-1]["first_step"] > 1  # trained anew it would be the same, too
    assert deterministic_metrics(again) == deterministic_metrics(run) != []
    last = f"checkpoints/step_{max(logged_steps(run)):08d}"
    assert_same_checkpoint(again / last, run / last, more_than)


def equal(a: Any, b: Any) -> bool:
    """Bitwise for tensors, == for the rest."""
    if torch.is_tensor(a):
        return torch.is_tensor(b) and a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and a == b
