"""Exports kept in a run directory, and what `sample` refuses before it makes one."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pretrain.checkpoint.damage import damaged
from pretrain.errors import UserError
from pretrain.export import run_exports
from pretrain.export.directories import made_beside, refuse_existing
from pretrain.export.run_exports import exported
from pretrain.export.verb import sample
from pretrain.runs.directory import MARKER, RunDirectory
from tests.fabricated_checkpoints import bare_checkpoint
from tests.ranks import ROOT


@pytest.fixture
def run(tmp_path: Path) -> Path:
    bare_checkpoint(RunDirectory(tmp_path), 7)
    (tmp_path / "config.yaml").touch()
    return tmp_path


def test_two_commands_that_want_one_export_at_once(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int | None] = []
    begun = threading.Barrier(2, timeout=10)

    def export(run: Path, out: Path, step: int | None) -> str:
        with made_beside(out):
            steps.append(step)
            time.sleep(0.2)  # the other asks meanwhile
        return ""

    def want() -> Path:
        begun.wait()
        return exported(run)

    monkeypatch.setattr(run_exports, "export_apart", export)
    with ThreadPoolExecutor(2) as both:
        results = [future.result() for future in (both.submit(want), both.submit(want))]
    assert steps == [7] and results == [run / "exports/step_00000007"] * 2


def test_the_next_checkpoint_is_taken_if_a_training_removes_the_newest(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def export(run: Path, out: Path, step: int) -> str:
        """A training saves the next checkpoint and removes this one before it is read."""
        now = RunDirectory(run).checkpoint(step)
        now.rename(now.with_name(f"step_{step + 1:08d}"))
        raise damaged(now / MARKER, "is missing")

    monkeypatch.setattr(run_exports, "export_apart", export)
    with pytest.raises(UserError, match=r"removes each checkpoint .* larger checkpoint\.keep_last"):
        exported(run)
    with pytest.raises(UserError, match=r"step_00000010 was removed while .* start again"):
        exported(run, step=10)


def test_a_directory_that_is_made_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(UserError, match="exists already"), made_beside(out):
        (out / "theirs").mkdir(parents=True)
    assert (out / "theirs").is_dir() and [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_name_that_is_too_long_is_one_sentence(tmp_path: Path) -> None:
    out = tmp_path / ("a" * 300)
    refuse_existing(out)
    with (
        pytest.raises(UserError, match=r"cannot write beside --out .*name too long"),
        made_beside(out),
    ):
        pass


KILLED = """
import os, signal, sys
from pathlib import Path
from pretrain.export.directories import made_beside
with made_beside(Path(sys.argv[1])) as directory:
    (directory / "model.safetensors").write_bytes(bytes(100))
    print(directory, flush=True)
    os.kill(os.getpid(), signal.SIGKILL if sys.argv[2] == "killed" else signal.SIGSTOP)
"""


def test_what_a_killed_export_left_goes_at_the_next_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "out"
    started, places = [], []
    # In this order: who begins removes what a killed one has left.
    for end in ("stopped", "killed"):
        command = [sys.executable, "-c", KILLED, out, end]
        started.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout is not None
        places.append(Path(started[-1].stdout.readline().strip()).parent)
    alive, left = places
    assert started[1].wait(60) == -signal.SIGKILL and left.is_dir() and alive.is_dir()
    foreign = [tmp_path / name for name in (".out.abcdefgh", ".out.more", ".other.abcdefgh")]
    for path in foreign:
        path.mkdir()
        (path / "lock").touch()
        (path / "theirs").touch()
    (tmp_path / ".out.linkedxx").symlink_to(left)
    with made_beside(out) as directory:
        # mkdtemp gives others no permissions.
        assert directory.stat().st_mode == foreign[0].stat().st_mode
    started[0].kill()
    started[0].wait()
    assert out.is_dir() and alive.is_dir() and not left.exists()
    assert all((path / "theirs").is_file() for path in foreign)
    assert (tmp_path / ".out.linkedxx").is_symlink()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"prompt": ["caf\udce9"]}, r"--prompt 'caf\\udce9' is not UTF-8"),
        ({"temperature": 1e-40}, "temperature 1e-40 must be 0 or from 0.0001"),
        ({"seed": -1}, r"seed -1 must be from 0 to 2\^63 - 1"),
        ({"temperature": float("inf")}, "temperature inf must be 0 or from"),
        ({"temperature": float("nan")}, "temperature nan must be 0 or from"),
        ({"top_p": float("nan")}, "top-p nan must be from 0 to 1"),
    ],
)
def test_what_cannot_be_sampled_is_refused_first(
    tmp_path: Path, options: dict[str, object], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        sample(tmp_path / "nowhere", **options)  # type: ignore[arg-type]
