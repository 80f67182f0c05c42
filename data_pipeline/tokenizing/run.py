"""Tokenise runs: documents to Megatron shards, in parallel and resumable.

The work is cut into units (`plan`). Each is made by one worker (`work_unit`) and counts when its record is
there; a rerun skips recorded units. When all units are there, shards and the manifest are made of them
(`assemble`). One machine does all of that. Task i of n does the units whose number is i modulo n, in the same
directory or in one of its own that is copied there later. The task that finds all units made makes the
shards; `merge_manifests` makes those that are missing and writes the manifest.
"""

from __future__ import annotations

import contextlib
import functools
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from data_pipeline.errors import DataError
from data_pipeline.io.files import (
    TEMPORARY_SUFFIX,
    read_checked_json,
    to_checked_json,
    write_atomically,
)
from data_pipeline.io.lease import GONE_AFTER, BusyError, Lease, held
from data_pipeline.io.pool import run_tasks
from data_pipeline.shards.manifest import (
    MANIFEST_NAME,
    REJECTS_NAME,
    Manifest,
    check_shards,
    read_manifest,
    rejects_intact,
    verify_advice,
)
from data_pipeline.sources.discovery import Inputs, cut_into_pieces, describe
from data_pipeline.tokenizer.encoder import why_not_fast
from data_pipeline.tokenizer.tokenizer import check_report, identify
from data_pipeline.tokenizing.assemble import Assembler, clean
from data_pipeline.tokenizing.encode_unit import wanted_bytes
from data_pipeline.tokenizing.plan import (
    UNITS_NAME,
    Task,
    TokenizeOptions,
    Unit,
    begin,
    plan_units,
    read_plan,
)
from data_pipeline.tokenizing.rejects import Limits, RejectWatch
from data_pipeline.tokenizing.work_unit import (
    Outcome,
    Report,
    UnitJob,
    UnitWorker,
    has_data,
    read_record,
)

_JOINING = "joining.lock"
_RETRY_SECONDS = 2.0
_COUNTING_SECONDS = 24 * 3600.0
_OF_A_UNIT = re.compile(r"(.+_\d+)\.(ids|json|rejects\.jsonl)\.")


@dataclass(frozen=True)
class Made:
    """Result of a task: the number of its units, how many were made now, and their damaged inputs."""

    units: int
    now: int
    damaged: tuple[str, ...] = ()


def merge_manifests(
    directory: Path,
    workers: int = 1,
    report: Report = lambda progress: None,
    limits: Limits = Limits(),  # noqa: B008 - it is frozen
) -> Manifest:
    """Return the manifest of a directory in which all tasks are done, after making what shards are missing.

    DataError: a unit is missing, or the records belong to different runs; too many lines were rejected; the
    directory is finished and damaged.
    """
    _, units = read_plan(directory)
    if (directory / MANIFEST_NAME).exists():
        return _finished(directory)
    if missing := [unit.record_path for unit in units if not unit.record_path.is_file()]:
        raise DataError(
            f"{directory}: {len(missing)} of {len(units)} units are missing, the first is {missing[0].name}; "
            f"run the tasks that have not finished, or copy their files here"
        )
    with Lease(directory / UNITS_NAME / _JOINING, f"finishing {directory}", GONE_AFTER):
        records = [read_record(unit) for unit in units]
        watch = RejectWatch(limits, directory)
        for record in records:
            watch.add(record)
        watch.check()
        assembler = Assembler(units, records, workers, report)
        for number in sorted(assembler.needed_units()):
            if not has_data(units[number], records[number]):
                raise DataError(
                    f"{units[number].data_path} is missing or cut short; run the tokenize command again, or "
                    f"copy the file here"
                )
        return assembler.finish()


def _finished(directory: Path, hash_files: bool = False) -> Manifest:
    """Return the manifest of a finished directory, after checking its files and cleaning up."""
    manifest = read_manifest(directory)
    check_shards(manifest, hash_files)
    if not rejects_intact(manifest):
        raise DataError(
            f"{directory / REJECTS_NAME} is not as the manifest says; {verify_advice(directory)}"
        )
    if (directory / UNITS_NAME).exists():  # a run was ended between its manifest and its end
        with (
            contextlib.suppress(BusyError, FileNotFoundError),
            Lease(directory / UNITS_NAME / _JOINING, f"finishing {directory}"),
        ):
            clean(directory)
    return manifest


class Run:
    """Run of tokenize on a shard directory, which it begins or continues.

    Args:
        tokenizer: a SentencePiece model or a tokenizer.json.
        verify: hash the shards that are there already, in place of believing their sizes.
        engine: one of `encoder.ENGINES`; the shards do not depend on it.

    Raises DataError: bad input or tokenizer; the directory was begun with others, or is finished and damaged.
    """

    def __init__(
        self,
        inputs: Inputs,
        tokenizer: Path,
        directory: Path,
        options: TokenizeOptions,
        workers: int,
        report: Report,
        limits: Limits = Limits(),  # noqa: B008 - it is frozen
        verify: bool = False,
        engine: str = "auto",
    ) -> None:
        if workers < 1:
            raise DataError(f"--workers {workers} must be at least 1")
        entries = [entry for entry in inputs.passed_over if not entry.expected]
        if limits.strict and entries:
            raise DataError(
                f"{'; '.join(describe(entries))}; remove what is not to be read, or leave out --strict"
            )
        identity = identify(tokenizer, options.allow_lossy, options.eod_token)
        why_not_fast(tokenizer, engine)
        check_report(tokenizer, identity)
        self._directory, self._engine = directory, engine
        self._workers, self._report, self._limits, self._verify = workers, report, limits, verify
        begin(directory, inputs, options, tokenizer, identity)
        self._finished: Manifest | None = None
        sizes: list[int] = []
        if (directory / MANIFEST_NAME).exists():
            self._finished = _finished(directory, verify)
            if limits.strict and self._finished.rejects:
                raise DataError(
                    f"{directory / REJECTS_NAME} names rejected lines of an earlier run without "
                    f"--strict; mend them and choose another --out"
                )
        elif options.max_tokens and (options.sources or options.exclude_sources):
            sizes = self._wanted_sizes(inputs, options)
        self._units = plan_units(inputs.files, directory, options, identity, limits.strict, sizes)

    def _wanted_sizes(self, inputs: Inputs, options: TokenizeOptions) -> list[int]:
        """Return the bytes of wanted text by piece; one task counts them, the others wait for it."""
        path = self._directory / UNITS_NAME / "wanted.json"
        lock = path.with_suffix(".lock")
        with Lease(
            lock, f"counting the text of the sources for {self._directory}", _COUNTING_SECONDS
        ):
            if not path.is_file():
                pieces = [
                    p for file in inputs.files for p in cut_into_pieces(file, options.range_bytes)
                ]
                count = functools.partial(wanted_bytes, options=options)
                counts = run_tasks(count, pieces, self._workers, self._report)
                write_atomically(path, to_checked_json({"bytes": counts}))
            stated: list[int] = read_checked_json(path, "delete it")["bytes"]
            return stated

    def make(self, task: Task = Task(0, 1)) -> Made:  # noqa: B008 - it is frozen
        """Make the units of a task; in a finished directory only check that the inputs are what they were.

        DataError: too many lines were rejected; a worker failed; another process is at it.
        """
        jobs = self._jobs(self._units[task.index :: task.count])
        if self._finished is not None:
            return self._make(jobs)  # and write nothing, not even a lock
        what = f"making {self._directory}"
        if task.count > 1:
            what = f"making task {task.index} of {task.count} of {self._directory}"
        path = self._directory / UNITS_NAME / f"task_{task.index}_of_{task.count}.lock"
        with held(path, what):
            # What killed runs of this task left is removed for all units at once: that reads every name.
            mine = {job.unit.record_path.stem for job in jobs}
            for path in (self._directory / UNITS_NAME).glob(f"*{TEMPORARY_SUFFIX}"):
                match = _OF_A_UNIT.match(path.name)
                if match is not None and match[1] in mine:
                    path.unlink(missing_ok=True)
            return self._make(jobs)

    def _make(self, jobs: list[UnitJob]) -> Made:
        """Make units; where another process is at one, wait only for a machine that may be dead."""
        watch = RejectWatch(self._limits, self._directory)
        outcomes = self._run(jobs, watch)
        deadline = time.monotonic() + GONE_AFTER
        while busy := [number for number, outcome in enumerate(outcomes) if outcome.busy]:
            first = outcomes[busy[0]]
            if first.certain or time.monotonic() > deadline:
                more = f" (and {len(busy) - 1} more units)" if len(busy) > 1 else ""
                raise DataError(f"{first.busy}{more}")
            time.sleep(_RETRY_SECONDS)
            for number, outcome in zip(
                busy, self._run([jobs[n] for n in busy], watch), strict=True
            ):
                outcomes[number] = outcome
        watch.check()
        return Made(len(jobs), sum(outcome.made for outcome in outcomes), tuple(watch.damaged))

    def finish(self) -> Manifest:
        """Return the manifest; make the shards first, if that is still to do. All units must be there."""
        if self._finished is not None:
            return self._finished
        with self._lease():
            return self._assembler().finish()

    def make_shards_if_all_units_are_there(self) -> None:
        """Make the shards, unless a unit is missing or another process is at it; merging does it then."""
        if self._finished is None and all(unit.record_path.is_file() for unit in self._units):
            with contextlib.suppress(BusyError), self._lease():
                self._assembler().make_shards()

    def _assembler(self) -> Assembler:
        records = [read_record(unit) for unit in self._units]
        return Assembler(self._units, records, self._workers, self._report, self._verify)

    def _lease(self) -> Lease:
        return Lease(self._directory / UNITS_NAME / _JOINING, f"finishing {self._directory}")

    def _run(self, jobs: list[UnitJob], watch: RejectWatch) -> list[Outcome]:
        def look(outcome: Outcome) -> None:
            if outcome.record is not None:
                watch.add(outcome.record)

        return run_tasks(UnitWorker(self._engine), jobs, self._workers, self._report, look)

    def _jobs(self, units: list[Unit]) -> list[UnitJob]:
        if (manifest := self._finished) is not None:
            known = {(entry.name, entry.start): asdict(entry) for entry in manifest.inputs}
            return [
                UnitJob(unit, False, [known[piece.file.name, piece.start] for piece in unit.pieces])
                for unit in units
            ]
        # Ids that are gone have become shards, if every unit has been made; else they are lost.
        gone = [
            unit for unit in units if unit.record_path.is_file() and not unit.data_path.is_file()
        ]
        if gone and all(unit.record_path.is_file() for unit in self._units):
            wanted = self._assembler().needed_units()
            return [UnitJob(unit, unit.number in wanted) for unit in units]
        return [UnitJob(unit) for unit in units]
