"""The list of a run's checkpoints and the verification of their files, without ranks, model or torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from pretrain.checkpoint.format import About, StoredFile, read_about, read_index, read_marker
from pretrain.checkpoint.verify import check_hash, check_size
from pretrain.errors import UserError
from pretrain.runs.directory import DAMAGED_SUFFIX, GOOD, MARKER, WITHDRAWN, RunDirectory, step_of

MOST_THREADS = 16


class State(Enum):
    """The state of a checkpoint; `--json` prints the names, the table prints the values."""

    GOOD = "good"
    UNPROVEN = "no loss of it yet"
    WITHDRAWN = "withdrawn: no finite loss"
    UNFINISHED = "unfinished"
    UNMARKED = f"all files but {MARKER}"
    DAMAGED = "damaged"
    ASIDE = "damaged, kept aside"
    INCOMPLETE = f"no {MARKER}, kept aside"


@dataclass(frozen=True)
class Listed:
    """A directory in RUN/checkpoints.

    Attributes:
        bytes: size of all its files on the disk.
        saved: time of completion, or of the last change if incomplete, in seconds since the epoch.
        files: the files that COMPLETE names; empty where COMPLETE is missing or damaged.
    """

    path: Path
    state: State
    bytes: int
    saved: float
    about: About | None
    files: dict[str, StoredFile]
    problems: tuple[str, ...]

    @property
    def counts(self) -> bool:
        """Return whether a run may resume from the checkpoint."""
        return self.state in (State.GOOD, State.UNPROVEN)

    def as_json(self, now: float) -> dict[str, Any]:
        about = self.about
        return {
            "path": str(self.path),
            "step": about.position.step if about else None,
            "tokens": about.position.consumed_tokens if about else None,
            "bytes": self.bytes,
            "layout": about.layout if about else None,
            "age_seconds": round(now - self.saved, 3),
            "state": self.state.name.lower(),
            "problems": list(self.problems),
        }


def list_checkpoints(run: Path) -> list[Listed]:
    """List every checkpoint of a run, oldest first; files are checked by their sizes only.

    Raises UserError: there is no such run, or it cannot be read.
    """
    directory = RunDirectory(run).checkpoints
    if not directory.is_dir():
        raise UserError(f"{run} has no directory {directory.name}; give the directory of a run")
    try:
        found = [
            _listed_or_gone(path) for path in sorted(directory.iterdir()) if _is_checkpoint(path)
        ]
        return [each for each in found if each is not None]
    except PermissionError as error:
        raise UserError(f"{error.filename} cannot be read ({error.strerror})") from None


def _is_checkpoint(path: Path) -> bool:
    try:
        step_of(path.with_name(path.name.partition(".")[0]))
    except ValueError:
        return False
    return path.is_dir()


def _listed_or_gone(path: Path) -> Listed | None:
    """Return the entry of a checkpoint; None if it is removed meanwhile: a run may be training."""
    while True:
        try:
            return _listed(path)
        except FileNotFoundError:  # also a temporary file that has its name now
            if not path.is_dir():
                return None


def _listed(path: Path) -> Listed:
    sizes = [file.stat().st_size for file in path.iterdir() if file.is_file()]
    marker = path / MARKER
    saved = (marker if marker.exists() else path).stat().st_mtime
    problems: list[str] = []
    about, files = None, {}
    with _noting(problems):
        about = read_about(path)
    if marker.exists():
        with _noting(problems):
            files = read_marker(path)
            read_index(path)
        for name, expected in files.items():
            with _noting(problems):
                check_size(path / name, expected)
    state = _state(path, about, bool(problems))
    if state is State.UNMARKED:
        problems.append(f"{marker} is missing, though the other files are there; restore it")
    unique = tuple(dict.fromkeys(problems))
    return Listed(path, state, sum(sizes), saved, about, files, unique)


@contextmanager
def _noting(problems: list[str]) -> Iterator[None]:
    """Add an error that is raised inside to `problems`, without its remedy, which only concerns training."""
    try:
        yield
    except UserError as error:
        problems.append(str(error).partition("; ")[0])


def _state(path: Path, about: About | None, has_problems: bool) -> State:
    if "." in path.name:
        return State.ASIDE if DAMAGED_SUFFIX in path.name else State.INCOMPLETE
    if not (path / MARKER).exists():
        if (path / WITHDRAWN).exists():
            return State.WITHDRAWN
        return State.UNFINISHED if about is None else State.UNMARKED
    if has_problems:
        return State.DAMAGED
    return State.GOOD if (path / GOOD).exists() else State.UNPROVEN


def verify_all(
    checkpoints: list[Listed], progress: Callable[[int], None]
) -> Iterator[tuple[Listed, tuple[str, ...]]]:
    """Hash every file of each checkpoint, many files at once.

    `progress`: called with the number of bytes of each chunk, on any thread. Yields (checkpoint, a sentence
    for each damaged or missing file).
    """
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as pool:
        for checkpoint in checkpoints:
            problems: list[str] = []
            hashing = [
                pool.submit(check_hash, checkpoint.path / name, file, progress)
                for name, file in checkpoint.files.items()
                if _has_size(checkpoint.path / name, file)  # else it is among the problems already
            ]
            for future in hashing:
                with _noting(problems):
                    future.result()
            if checkpoint.path.is_dir():  # else a training has removed it meanwhile
                yield checkpoint, tuple(dict.fromkeys([*checkpoint.problems, *sorted(problems)]))


def _has_size(file: Path, expected: StoredFile) -> bool:
    with suppress(OSError):
        return file.stat().st_size == expected.bytes
    return False


def age_text(seconds: float) -> str:
    """Return a duration in the largest unit in which it is at least 1, such as `1.5 h`."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def layout_text(layout: dict[str, Any]) -> str:
    """Return a layout as text: `4 ranks: TP 2 x DP 2, ZeRO 1, fp32`."""
    ranks = layout.get("world_size")
    return (
        f"{ranks} rank{'' if ranks == 1 else 's'}: TP {layout.get('tensor_model_parallel_size')} x "
        f"DP {layout.get('data_parallel_size')}, ZeRO {layout.get('zero_stage')}, {layout.get('dtype')}"
    )
