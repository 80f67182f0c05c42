"""Seals: what is to be shown, by which measure and runs, hashed before the first run.

The file, of `pretrain.runs.seals`, holds {hypotheses, measure, seeds, settings, …}. `verdict` says
what the runs beside a seal make of its hypotheses.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from data_pipeline.io.files import hash_file, strict_json, write_json
from data_pipeline.io.forms import parse_json
from laboratory.runs.finished import FinishedRun
from laboratory.study.sealed import Sealed, Text, design_of, design_settings
from pretrain.config.removed import LAST_WITH_THEM, present_key, removed_sentence
from pretrain.config.resolved import FILE_FACTS
from pretrain.errors import UserError
from pretrain.reporting.text import setting_text
from pretrain.runs.environment import STARTED, data_changes, git_commit
from pretrain.runs.facts import read_facts
from pretrain.runs.seals import (
    SEALS,
    content_digest,
    intact_seals,
    is_intact,
    read_seal_file,
    seal_files,
)

_SHOWN_KEYS = 3
"""Changed settings of a run that are named."""
_LONGEST = 80
"""Characters of a setting that are shown."""


class _SealFile(BaseModel):
    sealed: Sealed
    sha256: Text


@dataclass(frozen=True)
class Seal:
    """A seal as its file has it.

    Attributes:
        path: The file.
        directory: Directory of the runs, without links.
        sealed: Sealed content.
        raw: The same as plain JSON, of which the hash is.
        intact: Whether the content still has the hash.
        lost: SHA-256 of the seals that runs or seals of the directory name, and that are gone or
            changed.
    """

    path: Path
    directory: Path
    sealed: Sealed
    raw: Mapping[str, Any]
    intact: bool
    lost: tuple[str, ...] = ()

    def beside(self, runs: Iterable[FinishedRun]) -> list[FinishedRun]:
        """Return those of the runs that lie beside the seal."""
        return [run for run in runs if run.path.resolve().parent == self.directory]

    def own_runs(self, runs: Iterable[FinishedRun]) -> dict[str, dict[int, FinishedRun]]:
        """Return {design: {seed: run}} of those of the runs that are sealed and lie beside it."""
        sealed = self.sealed.runs
        by_design: dict[str, dict[int, FinishedRun]] = {
            design: {} for design in self.sealed.settings
        }
        for run in self.beside(runs):
            design = design_of(run.config["run"]["name"], run.seed)
            if (design, run.seed) in sealed:
                by_design[design][run.seed] = run
        return by_design

    def strangers(self, runs: Sequence[FinishedRun], designs: Iterable[str]) -> list[FinishedRun]:
        """Return those of the runs that are of sealed designs, by name or settings, but not sealed.

        Args:
            runs: Any finished runs.
            designs: Designs of the seal.
        """
        settings = {design: self.sealed.settings[design] for design in designs}
        sealed_paths = {
            run.path for by_seed in self.own_runs(runs).values() for run in by_seed.values()
        }
        return [
            run
            for run in runs
            if run.path not in sealed_paths
            and (
                design_of(run.config["run"]["name"], run.seed) in settings
                or design_settings(run.config) in settings.values()
            )
        ]

    def changes_of(self, run: FinishedRun, design: str) -> list[str]:
        """Return clauses on differences of a run from the sealed one: settings, data, time.

        Args:
            run: A run of `own_runs`.
            design: Design of the run.
        """
        was = dict(self.sealed.settings[design])
        now = design_settings(run.config)
        for key, value in self.sealed.other_seeds.get(design, {}).items():
            section, _, name = key.partition(".")
            was[key] = run.seed if value is None else value
            now[key] = run.config.get(section, {}).get(name)
        for key, fact in FILE_FACTS.items():
            was[f"the content of {key}"] = self.sealed.contents.get(design, {}).get(key)
            now[f"the content of {key}"] = run.environment.get(fact)
        keys = sorted(key for key in now.keys() | was.keys() if now.get(key) != was.get(key))
        clauses = [
            f"{key} is {_short(now.get(key))} in {run.name}, sealed {_short(was.get(key))}"
            for key in keys[:_SHOWN_KEYS]
        ]
        clauses += [
            f"{present_key(key)} was {_short(value)} in {run.name} up to step {step}"
            for key, value, step in run.earlier_settings
            if present_key(key) in was
        ][:_SHOWN_KEYS]
        clauses += [
            f"{clause} in {run.name} from step {step} on"
            for clause, step in data_changes(run.environment)
        ][:_SHOWN_KEYS]
        digest = content_digest(self.raw)
        starts = _starts(run.environment)
        first = starts[0]
        trunk = first.get("branched_from") or {}
        if "started" not in first or self._is_before(first["started"]):
            clauses.append(f"{run.name} began before, or does not say when")
        elif self.intact and any(digest not in start.get("seals", digest) for start in starts):
            clauses.append(f"{run.name} started without this seal beside it")
        elif trunk.get("started") and self._is_before(trunk["started"]):
            clauses.append(f"the trunk that {run.name} branched from began before")
        if run.data_fingerprint not in self.sealed.data:
            clauses.append(f"{run.name} has other data")
        return clauses

    def _is_before(self, started: str) -> bool:
        """Return whether something started before the seal."""
        return datetime.strptime(started, STARTED) < datetime.strptime(self.sealed.sealed, STARTED)

    def notes(self, by_design: Mapping[str, Mapping[int, FinishedRun]]) -> list[str]:
        """Return clauses on changes around the runs: grid file, number of runs, commit.

        Args:
            by_design: Sealed runs, of `own_runs`.
        """
        sealed = self.sealed
        clauses = []
        if not _is_still(Path(sealed.grid.file), sealed.grid.sha256):
            clauses.append(f"the grid file {sealed.grid.file:.{_LONGEST}} has changed or is gone")
        runs = [run for of_design in by_design.values() for run in of_design.values()]
        lacking = len(sealed.runs) - len(runs)
        if lacking and sealed.fixed_n:
            clauses.append(f"{lacking} of the sealed runs are not among these")
        sealed_commit = str(sealed.commit)
        starts = chain.from_iterable(_starts(run.environment) for run in runs)
        commits = {str(run.environment.get("git_commit")) for run in runs}
        for start in starts:  # those of a branch name the commit of its trunk too
            parts = (start, start.get("branched_from", {}))
            commits |= {str(part["git_commit"]) for part in parts if "git_commit" in part}
        clauses += [
            f"runs are of commit {commit[:12]}, sealed at {sealed_commit[:12]}"
            for commit in sorted(commits)
            if commit != sealed_commit
        ]
        if any(commit.endswith("+") for commit in (*commits, sealed_commit)):
            clauses.append("a checkout had uncommitted changes")
        return clauses

    def unrecorded(self, by_design: Mapping[str, Mapping[int, FinishedRun]]) -> list[str]:
        """Return clauses on what older versions recorded neither in the seal nor in its runs.

        Args:
            by_design: Sealed runs, of `own_runs`.
        """
        clauses = []
        runs = [run for of_design in by_design.values() for run in of_design.values()]
        older = [run for run in runs if any("seals" not in s for s in _starts(run.environment))]
        if older:
            clauses.append(
                f"{len(older)} of {len(runs)} runs were started by a version that did not record "
                "the seals beside them"
            )
        if self.sealed.earlier_seals is None:
            clauses.append("the seal is of a version that did not name the seals before it")
        sealed = chain.from_iterable(self.raw.get("settings", {}).values())
        lacking = sorted(design_settings({}).keys() - map(present_key, sealed))
        if lacking:
            clauses.append(f"not in the seal, and counted at their defaults: {', '.join(lacking)}")
        return clauses


def _starts(environment: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the starts of a run, of its environment.json."""
    return environment.get("segments") or [environment]


def _short(value: Any) -> str:
    return f"{setting_text(value):.{_LONGEST}}"


def _is_still(path: Path, sha256: str) -> bool:
    try:
        return path.is_file() and hash_file(path) == sha256
    except OSError:  # a name that no file can have, or a file that may not be read
        return False


def write_seal(directory: Path, content: Mapping[str, Any], begun: Sequence[str]) -> Seal | None:
    """Write a seal beside the runs, or return an existing one of the same content.

    Args:
        directory: Directory of the runs.
        content: Fields of `Sealed`, and any others, but for `earlier_seals`, `commit` and `sealed`.
        begun: Names of the runs that have begun.

    Returns:
        The seal; None where a run has begun, because nothing can be sealed then.

    Raises:
        UserError: the seal cannot be written.
    """
    content = json.loads(json.dumps(strict_json(content)))
    for seal in read_seals([directory]).seals:
        if (seal.intact or begun) and _asks_the_same(seal, content, bool(begun)):
            return seal
    if begun:
        return None
    raw = {**content, "earlier_seals": intact_seals(directory), "commit": git_commit()}
    raw["sealed"] = datetime.now().astimezone().strftime(STARTED)
    digest = content_digest(raw)
    path = directory / SEALS / f"{digest[:12]}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"sealed": raw, "sha256": digest})
    except OSError as error:
        reason = error.strerror or error
        raise UserError(
            f"the seal {path} cannot be written ({reason}); fix {path.parent}"
        ) from None
    return Seal(path, directory.resolve(), Sealed.model_validate(raw), raw=raw, intact=True)


def _asks_the_same(seal: Seal, content: Mapping[str, Any], begun: bool) -> bool:
    """Return whether a seal holds the given content.

    Args:
        seal: Seal beside the runs.
        content: Fields of `Sealed`, through JSON.
        begun: A run is there, so nothing is sealed anew. The grid file may then be spelt otherwise
            or have another comment: settings, seeds and data are what counts, and `notes` says that
            the file has changed.
    """
    was = {**seal.raw, "settings": seal.sealed.settings}
    counted = content.keys() - ({"grid"} if begun else set())
    # A seal of an older version lacks what it did not know.
    return all(was.get(key, content[key]) == content[key] for key in counted)


@dataclass(frozen=True)
class SealsRead:
    """Seals of directories of runs.

    Attributes:
        seals: Those that could be read.
        problems: A sentence on each file that could not, and on seals that are gone.
        lost: {directory, without links: SHA-256 of the seals that are gone or changed there}.
    """

    seals: tuple[Seal, ...]
    problems: tuple[str, ...]
    lost: Mapping[Path, tuple[str, ...]]


def read_seals(directories: Iterable[Path]) -> SealsRead:
    """Read the seals of directories of runs, and report files that cannot be read."""
    seals: list[Seal] = []
    problems: list[str] = []
    lost: dict[Path, tuple[str, ...]] = {}
    places = {directory.resolve(): directory for directory in directories}
    for resolved, directory in sorted(places.items()):
        beside = _read_directory(directory, problems)
        lost[resolved] = _lost_seals(directory, beside)
        seals += [replace(seal, lost=lost[resolved]) for seal in beside]
        if lost[resolved]:
            problems.append(f"{directory / SEALS} lacks {lost_text(lost[resolved])}; restore them")
    return SealsRead(tuple(seals), tuple(problems), lost)


def _read_directory(directory: Path, problems: list[str]) -> list[Seal]:
    """Return the seals beside the runs of a directory.

    Args:
        problems: List that gets a sentence on each file that cannot be read.
    """
    try:
        paths = seal_files(directory)
    except OSError as error:
        problems.append(_problem(directory / SEALS, error))
        return []
    seals = []
    for path in paths:
        try:
            seals.append(_read_seal(path, directory.resolve()))
        except (OSError, ValueError, RecursionError) as error:
            problems.append(_problem(path, error))
    return seals


def _lost_seals(directory: Path, seals: Iterable[Seal]) -> tuple[str, ...]:
    """Return the SHA-256 of seals that runs or seals name, and that are not there as they were.

    All runs of the directory count, whether they are compared or not: a seal may be of others.
    """
    named_digests = {digest for seal in seals for digest in seal.sealed.earlier_seals or ()}
    for environment in sorted(directory.glob("*/environment.json")):
        with suppress(OSError, UserError):  # of a run that is not compared, or refused elsewhere
            starts = _starts(read_facts(environment))
            named_digests.update(*(start.get("seals", ()) for start in starts))
    return tuple(sorted(named_digests - {*intact_seals(directory)}))


def lost_text(lost: Sequence[str]) -> str:
    """Return a clause on lost seals with the first digits of their hashes."""
    count = f"{len(lost)} seal{'s' if len(lost) > 1 else ''}"
    digits = ", ".join(digest[:12] for digest in lost)
    return f"{count} named by runs or by later seals, gone or changed ({digits})"


def _read_seal(path: Path, directory: Path) -> Seal:
    text = read_seal_file(path)
    if why := _removed_form(text):
        raise _RemovedFormError(why)
    file = _SealFile.model_validate_json(text, strict=True)
    raw = parse_json(text)["sealed"]
    intact = is_intact(path, content_digest(raw), file.sha256)
    return Seal(path, directory, file.sealed, raw=raw, intact=intact)


class _RemovedFormError(ValueError):
    """Seal of a form that this version does not judge."""


def _removed_form(text: bytes) -> str | None:
    """Return a clause on why a seal's form is not judged; None if it is."""
    try:
        content = json.loads(text)["sealed"]
        settings = [pair for values in content["settings"].values() for pair in values.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None  # which the model of the file says in full
    if content.get("predictions"):
        return f"it has predictions of `ladder`, which {LAST_WITH_THEM} judges"
    if not {"measure", "other_seeds"} <= content.keys():
        return (
            "it does not state its measure and seeds, as seals of version 0.4 and before; "
            f"{LAST_WITH_THEM} judges it"
        )
    return next(filter(None, (removed_sentence(key, value) for key, value in settings)), None)


def _problem(path: Path, error: Exception) -> str:
    """Return the sentence on a seal file that cannot be read."""
    if isinstance(error, _RemovedFormError):
        return str(UserError(f"the seal {path} is not judged: {error}"))
    reason = str(error)
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        reason = ": ".join(
            part for part in (".".join(map(str, first["loc"])), first["msg"]) if part
        )
    if isinstance(error, OSError):
        reason = error.strerror or reason
    sentence = f"{path} is not a valid seal file ({reason:.200}); restore it, or move it away"
    return str(UserError(sentence))  # which escapes what does not print
