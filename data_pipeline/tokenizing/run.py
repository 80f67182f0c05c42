"""Documents -> Megatron shards, in parallel and resumable.

The work is cut into units (see `plan`); each is made by one worker (see `unit`) and counts when its record is
there. A rerun skips recorded units. When all units are there, shards are made of them (`joining`) and the
manifest is written (`finish`). One machine does all of that; task i of n does the units whose number is i
modulo n, in the same directory or in one of its own that is copied there later. The task that finds all units
made joins them; `merge_manifests` does what of that is still to do, and writes the manifest.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.errors import DataError
from data_pipeline.io.files import TEMPORARY_SUFFIX
from data_pipeline.io.lease import GONE_AFTER, BusyError, Lease, held
from data_pipeline.io.pool import Progress, run_tasks
from data_pipeline.shards.manifest import MANIFEST_NAME, REJECTS_NAME, Manifest, read_manifest, rejects_intact
from data_pipeline.shards.writing import dtype_for
from data_pipeline.sources.discovery import InputFile
from data_pipeline.sources.survey import PassedOver, describe, unread
from data_pipeline.tokenizer.encoder import why_not_fast
from data_pipeline.tokenizer.tokenizer import check_report, identify
from data_pipeline.tokenizing.assemble import done_shard, is_intact, plan_shards
from data_pipeline.tokenizing.beginning import begin
from data_pipeline.tokenizing.finish import Finisher
from data_pipeline.tokenizing.plan import UNITS_NAME, TokenizeOptions, Unit, plan_units, read_plan
from data_pipeline.tokenizing.rejects import Limits, RejectWatch
from data_pipeline.tokenizing.task import Corpus, Task
from data_pipeline.tokenizing.unit_files import unit_groups
from data_pipeline.tokenizing.work_unit import Outcome, Record, UnitJob, UnitWorker, has_data, read_record

_Report = Callable[[Progress], None]
_JOINING = "joining.lock"
_RETRY_SECONDS = 2.0
_OF_A_UNIT = re.compile(r"(.+_\d+)\.(ids|json|rejects\.jsonl)\.")


@dataclass(frozen=True)
class Made:
    """What a task came to: its units, how many of them were made now, and their damaged inputs."""

    units: int
    now: int
    damaged: tuple[str, ...] = ()


def tokenize(
    files: list[InputFile],
    tokenizer_path: Path,
    directory: Path,
    options: TokenizeOptions,
    workers: int,
    report: _Report,
    limits: Limits = Limits(),  # noqa: B008 - it is frozen
    passed_over: Sequence[PassedOver] = (),
    verify: bool = False,
    engine: str = "auto",
) -> tuple[Manifest, int]:
    """Make a shard directory, or finish one that the same call began.

    Args:
        verify: hash what is there already, in place of believing its sizes.
        engine: one of `engine.ENGINES`; the shards do not depend on it.

    Returns:
        (the manifest, how many units were made now; the others were finished before).

    Raises:
        DataError: bad options, input or tokenizer; the directory was begun with others; too many lines were
        rejected; a worker failed; another process is at it.
    """
    corpus = Corpus(files, tokenizer_path, directory, options, passed_over, engine)
    run = _Run(corpus, workers, report, limits, verify)
    made = run.make(Task(0, 1))
    return run.finish(), made.now


def make_task(
    files: list[InputFile],
    tokenizer_path: Path,
    directory: Path,
    options: TokenizeOptions,
    workers: int,
    report: _Report,
    task: Task,
    limits: Limits = Limits(),  # noqa: B008 - it is frozen
    passed_over: Sequence[PassedOver] = (),
    verify: bool = False,
    engine: str = "auto",
) -> Made:
    """Make the units of one task; if they were the last, the shards too. There is no manifest yet.

    Raises:
        DataError: as `tokenize`.
    """
    corpus = Corpus(files, tokenizer_path, directory, options, passed_over, engine)
    run = _Run(corpus, workers, report, limits, verify)
    made = run.make(task)
    run.join_if_all_are_there()
    return made


def merge_manifests(
    directory: Path,
    workers: int = 1,
    report: _Report = lambda progress: None,
    limits: Limits = Limits(),  # noqa: B008 - it is frozen
) -> Manifest:
    """The manifest of a directory in which all tasks are done, after making what shards are missing.

    Raises:
        DataError: a unit is missing, or the records belong to different runs; too many lines were rejected.
    """
    _, units = read_plan(directory)
    if (directory / MANIFEST_NAME).exists():
        return _finished_already(directory, units, Finisher(directory, workers, report))
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
        for number in sorted(_wanted_units(units, records)):
            if not has_data(units[number], records[number]):
                raise DataError(
                    f"{units[number].data_path} is missing or cut short; run the tokenize command again, or "
                    f"copy the file here"
                )
        return Finisher(directory, workers, report).finish(units, records)


def _finished_already(directory: Path, units: list[Unit], finisher: Finisher) -> Manifest:
    """The manifest of a finished directory; shards that are damaged are made of what tasks made again."""
    manifest = read_manifest(directory)
    wanted = _broken_units(manifest, units, hash_files=False)
    if missing := [number for number in sorted(wanted) if not units[number].record_path.is_file()]:
        raise DataError(
            f"{directory} is damaged, and unit {missing[0]} has not been made again; run the tokenize command"
        )
    if wanted:
        with Lease(directory / UNITS_NAME / _JOINING, f"finishing {directory}", GONE_AFTER):
            finisher.mend(manifest, units, {number: read_record(units[number]) for number in wanted})
    return manifest


class _Run:
    """One call of tokenize on one directory."""

    def __init__(self, corpus: Corpus, workers: int, report: _Report, limits: Limits, verify: bool) -> None:
        corpus.options.check()
        limits.check()
        if workers < 1:
            raise DataError(f"--workers {workers} must be at least 1")
        if limits.strict and (entries := unread(corpus.passed_over)):
            raise DataError(
                f"{'; '.join(describe(entries))}; remove what is not to be read, or leave out --strict"
            )
        identity = identify(corpus.tokenizer, corpus.options.allow_lossy, corpus.options.eod_token)
        why_not_fast(corpus.tokenizer, corpus.engine)
        check_report(corpus.tokenizer, identity)
        self._directory, self._engine = corpus.directory, corpus.engine
        self._workers, self._report, self._limits, self._verify = workers, report, limits, verify
        begin(
            corpus.files,
            corpus.directory,
            corpus.options,
            identity,
            corpus.tokenizer,
            corpus.passed_over,
        )
        self._units = plan_units(corpus.files, corpus.directory, corpus.options, identity, limits.strict)
        self._finished: Manifest | None = None
        if (corpus.directory / MANIFEST_NAME).exists():
            self._finished = read_manifest(corpus.directory)
            if limits.strict and self._finished.rejects:
                raise DataError(
                    f"{corpus.directory / REJECTS_NAME} names rejected lines of an earlier run without "
                    f"--strict; mend them and choose another --out"
                )

    def make(self, task: Task) -> Made:
        """Make the units of a task."""
        task.check()
        jobs = self._jobs(self._units[task.index :: task.count])
        if self._finished is not None and not any(job.needs_data for job in jobs):
            return self._make(jobs)  # and write nothing, not even a lock
        what = f"making {self._directory}"
        if task.count > 1:
            what = f"making task {task.index} of {task.count} of {self._directory}"
        path = self._directory / UNITS_NAME / f"task_{task.index}_of_{task.count}.lock"
        with held(path, what):
            self._remove_stale(jobs)
            return self._make(jobs)

    def _remove_stale(self, jobs: list[UnitJob]) -> None:
        """Remove what killed runs of this task left. Once: to look for a unit's own reads every name."""
        mine = {job.unit.record_path.stem for job in jobs}
        for path in (self._directory / UNITS_NAME).glob(f"*{TEMPORARY_SUFFIX}"):
            match = _OF_A_UNIT.match(path.name)
            if match is not None and match[1] in mine:
                path.unlink(missing_ok=True)

    def _make(self, jobs: list[UnitJob]) -> Made:
        """Make units; where somebody else is at one, wait only for a machine that may be dead."""
        watch = RejectWatch(self._limits, self._directory)
        outcomes = self._run(jobs, watch)
        deadline = time.monotonic() + GONE_AFTER
        while busy := [number for number, outcome in enumerate(outcomes) if outcome.busy]:
            first = outcomes[busy[0]]
            if first.certain or time.monotonic() > deadline:
                more = f" (and {len(busy) - 1} more units)" if len(busy) > 1 else ""
                raise DataError(f"{first.busy}{more}")
            time.sleep(_RETRY_SECONDS)
            for number, outcome in zip(busy, self._run([jobs[n] for n in busy], watch), strict=True):
                outcomes[number] = outcome
        watch.check()
        return Made(len(jobs), sum(outcome.made for outcome in outcomes), watch.damaged())

    def finish(self) -> Manifest:
        """The shards and the manifest, when all units are there."""
        finisher = Finisher(self._directory, self._workers, self._report, self._verify)
        if self._finished is not None:
            made = {unit.number: read_record(unit) for unit in self._units if unit.record_path.is_file()}
            if made or not rejects_intact(self._finished):
                with self._lease():
                    finisher.mend(self._finished, self._units, made)
            return self._finished
        with self._lease():
            return finisher.finish(self._units, [read_record(unit) for unit in self._units])

    def join_if_all_are_there(self) -> None:
        """Make the shards, unless a unit is missing or somebody else is at it; merging does it then."""
        if self._finished is not None or not all(unit.record_path.is_file() for unit in self._units):
            return
        try:
            with self._lease():
                records = [read_record(unit) for unit in self._units]
                Finisher(self._directory, self._workers, self._report, self._verify).join(
                    self._units, records
                )
        except BusyError:
            return

    def _lease(self) -> Lease:
        return Lease(self._directory / UNITS_NAME / _JOINING, f"finishing {self._directory}")

    def _run(self, jobs: list[UnitJob], watch: RejectWatch) -> list[Outcome]:
        def look(outcome: Outcome) -> None:
            if outcome.record is not None:
                watch.add(outcome.record)

        return run_tasks(UnitWorker(self._engine), jobs, self._workers, self._report, look)

    def _jobs(self, units: list[Unit]) -> list[UnitJob]:
        if (manifest := self._finished) is not None:
            wanted = _broken_units(manifest, self._units, self._verify)
            known = {(entry.name, entry.start): entry for entry in manifest.inputs}
            return [
                UnitJob(unit, unit.number in wanted, tuple(known[p.file.name, p.start] for p in unit.pieces))
                for unit in units
            ]
        # Ids that are gone have become shards, if every unit has been made; else they are lost.
        gone = [unit for unit in units if unit.record_path.is_file() and not unit.data_path.is_file()]
        if gone and all(unit.record_path.is_file() for unit in self._units):
            records = [read_record(unit) for unit in self._units]
            wanted = _wanted_units(self._units, records, self._verify)
            return [UnitJob(unit, unit.number in wanted) for unit in units]
        return [UnitJob(unit) for unit in units]


def _wanted_units(units: list[Unit], records: list[Record], hash_files: bool = False) -> set[int]:
    """The units whose ids are needed: those of shards that are not there yet."""
    dtype = dtype_for(units[0].tokenizer.vocab_size)
    groups = [unit_groups(r, u.data_path, dtype) for u, r in zip(units, records, strict=True)]
    plans = plan_shards(groups, units[0].options, dtype)
    directory = units[0].directory
    return {
        part.unit for plan in plans if done_shard(plan, directory, hash_files) is None for part in plan.parts
    }


def _broken_units(manifest: Manifest, units: list[Unit], hash_files: bool) -> set[int]:
    """The units to make again for a finished directory: those of damaged shards, and of damaged rejects."""
    broken = [s for s in manifest.shards if not is_intact(s, manifest.directory, hash_files)]
    wanted = {number for shard in broken for number in shard.units}
    if not rejects_intact(manifest):
        named = {(entry.name, entry.start) for entry in manifest.inputs if entry.has_rejects}
        wanted |= {u.number for u in units if any((p.file.name, p.start) in named for p in u.pieces)}
    return wanted
