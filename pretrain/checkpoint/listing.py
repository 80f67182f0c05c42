"""The list of a run's checkpoints and the verification of their files, without ranks or torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from pretrain.checkpoint.format import About, StoredFile, read_about, read_index, read_marker
from pretrain.checkpoint.verify import hash_problems, size_problems
from pretrain.errors import UserError
from pretrain.runs.directory import DAMAGED_SUFFIX, GOOD, MARKER, WITHDRAWN, RunDirectory, step_of

THREADS = 16
"""Number of files hashed at once; no training shares the cores with the hashing."""


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
        path: The checkpoint's directory.
        state: State of the checkpoint, by which a run may use it.
        bytes: Size of all its files on the disk.
        saved: Time of completion, or of the last change if incomplete, in seconds since the epoch.
        about: The content of checkpoint.json; None where it is missing or damaged.
        files: The files that COMPLETE names; empty where COMPLETE is missing or damaged.
        problems: A sentence for each damaged or missing file.
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

    @property
    def belongs_to_run(self) -> bool:
        """Return whether a run may resume from the checkpoint, or might before it was damaged."""
        return self.counts or self.state in (State.DAMAGED, State.UNMARKED)

    def as_json(self, now: float) -> dict[str, Any]:
        """Return the entry of `--json`; `now` is in seconds since the epoch."""
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

    Raises:
        UserError: there is no such run, or it cannot be read.
    """
    directory = RunDirectory(run).checkpoints
    if not directory.is_dir():
        raise UserError(f"{run} has no directory {directory.name}; give the directory of a run")
    try:
        entries = [_listed_or_gone(path) for path in sorted(directory.iterdir())]
    except PermissionError as error:
        raise UserError(f"{error.filename} cannot be read ({error.strerror})") from None
    return [entry for entry in entries if entry is not None]


def _listed_or_gone(path: Path) -> Listed | None:
    """Return the entry of a checkpoint; None for another file, or one that is removed meanwhile."""
    try:
        step_of(path.with_name(path.name.partition(".")[0]))
    except ValueError:
        return None
    while path.is_dir():
        try:
            return _listed(path)
        except FileNotFoundError:  # a training removes it, or gives a temporary file its name
            continue
    return None


def _listed(path: Path) -> Listed:
    size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    marker = path / MARKER
    saved = (marker if marker.exists() else path).stat().st_mtime
    problems: list[str] = []
    about = None
    files: dict[str, StoredFile] = {}
    with _noting(problems):
        about = read_about(path)
    if marker.exists():
        with _noting(problems):
            files = read_marker(path)
            read_index(path)
        problems += [_problem(error) for error in size_problems(path, files)]
    state = _state(path, about, bool(problems))
    if state is State.UNMARKED:
        problems.append(f"{marker} is missing, though the other files are there; restore it")
    return Listed(
        path=path,
        state=state,
        bytes=size,
        saved=saved,
        about=about,
        files=files,
        problems=tuple(dict.fromkeys(problems)),
    )


def _problem(error: UserError) -> str:
    """Return an error's sentence without its remedy, which only concerns training."""
    return str(error).partition("; ")[0]


@contextmanager
def _noting(problems: list[str]) -> Iterator[None]:
    """Add an error raised in the block to `problems`."""
    try:
        yield
    except UserError as error:
        problems.append(_problem(error))


def _state(path: Path, about: About | None, has_problems: bool) -> State:
    if "." in path.name:
        return State.ASIDE if DAMAGED_SUFFIX in path.name else State.INCOMPLETE
    if not (path / MARKER).exists():
        if (path / WITHDRAWN).exists():
            return State.WITHDRAWN
        if about is not None:
            return State.UNMARKED
        lost = path in RunDirectory(path.parent.parent).lost_checkpoints()
        return State.DAMAGED if lost else State.UNFINISHED
    if has_problems:
        return State.DAMAGED
    return State.GOOD if (path / GOOD).exists() else State.UNPROVEN


def verified(checkpoint: Listed, say: Callable[[str], None]) -> Listed | None:
    """Hash every file of a checkpoint; return None if a training has removed it meanwhile.

    Args:
        checkpoint: An entry of `list_checkpoints`.
        say: Called with a line of progress every few seconds.
    """
    path = checkpoint.path
    files = {
        name: file
        for name, file in checkpoint.files.items()
        if not any(size_problems(path, {name: file}))  # such a file is among the problems already
    }
    new_problems = [_problem(error) for error in hash_problems(path, files, say, THREADS)]
    if not path.is_dir():
        return None
    problems = tuple(dict.fromkeys([*checkpoint.problems, *new_problems]))
    return replace(
        checkpoint, problems=problems, state=State.DAMAGED if problems else checkpoint.state
    )


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
        f"DP {layout.get('data_parallel_size')}, ZeRO {layout.get('zero_stage')}, "
        f"{layout.get('dtype')}"
    )
