"""Tokenise runs: documents to Megatron shards, in parallel and resumable.

The work is divided into units (`plan`). One worker makes each unit (`work_unit`) and writes its
record last; a rerun skips recorded units. Once all units are recorded, `finish` makes the shards
and the manifest (`assemble`). One machine can do all of this. Task i of n makes only the units
whose number is i modulo n, in the same directory or in another one that is copied there later.
"""

from __future__ import annotations

import contextlib
import pickle
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data_pipeline.errors import DataError
from data_pipeline.io.files import TEMPORARY_SUFFIX, is_abandoned
from data_pipeline.io.lease import BusyError, Lease, held
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
from data_pipeline.sources.data_sets import in_memory
from data_pipeline.sources.discovery import Inputs, describe, find_inputs, shards_of
from data_pipeline.tokenizer.encoder import why_not_fast
from data_pipeline.tokenizer.tokenizer import check_report, identify
from data_pipeline.tokenizing.assemble import assemble, clean
from data_pipeline.tokenizing.plan import (
    UNITS_NAME,
    Task,
    TokenizeOptions,
    Unit,
    at_planned_revision,
    begin,
    plan_units,
    read_plan,
)
from data_pipeline.tokenizing.rejects import Limits, RejectWatch
from data_pipeline.tokenizing.work_unit import (
    Record,
    Report,
    UnitJob,
    UnitWorker,
    has_data,
    read_record,
)

_JOINING = "joining.lock"
_OF_A_UNIT = re.compile(r"(.+_\d+)\.(ids|json|rejects\.jsonl)\.")


@dataclass(frozen=True)
class Made:
    """Result of a task: the number of its units, how many were made now, the damaged inputs."""

    units: int
    now: int
    damaged: tuple[str, ...] = ()


def finish(
    directory: Path,
    workers: int = 1,
    report: Report = lambda progress: None,
    limits: Limits = Limits(),  # noqa: B008 - it is frozen
) -> Manifest:
    """Make the shards of a directory whose units are all made, and return the manifest.

    Args:
        workers: Threads that make shards.
        report: Callback for the progress.
        limits: Limits on rejected lines.

    Raises:
        DataError: If a unit is missing, records belong to different runs, too many lines were
            rejected, the directory is finished and damaged, or another process is finishing it.
    """
    _require(workers)
    _, units = read_plan(directory)
    if (directory / MANIFEST_NAME).exists():
        return _finished(directory)
    if missing := [unit.record_path for unit in units if not unit.record_path.is_file()]:
        raise DataError(
            f"{directory}: {len(missing)} of {len(units)} units are missing, the first is "
            f"{missing[0].name}; run the tasks that have not finished, or copy their files here"
        )
    with held(directory / UNITS_NAME / _JOINING, f"finishing {directory}"):
        if (directory / MANIFEST_NAME).exists():  # the previous holder made it
            return _finished(directory)
        records = [read_record(unit) for unit in units]
        watch = RejectWatch(limits, directory)
        for record in records:
            watch.add(record)
        watch.check()
        for unit, record in zip(units, records, strict=True):
            if not has_data(unit, record):
                raise DataError(
                    f"{unit.data_path} is missing or cut short; run the tokenize command again, or "
                    f"copy the file here"
                )
        return assemble(units, records, workers, report)


def tokenize_data(
    data: Any,
    tokenizer: Path,
    directory: Path,
    options: TokenizeOptions,
    workers: int = 1,
    limits: Limits = Limits(),  # noqa: B008 - it is frozen
) -> Manifest:
    """Make the shards of a data set in memory, or of an input that `find_inputs` takes.

    Args:
        data: Dataset, IterableDataset, iterable of texts, or one input as a path or string.
        workers: Number of processes; texts that are no Dataset are read in this one.

    Raises:
        DataError: As `Run`; or the data set cannot be sent to other processes.
    """
    if isinstance(data, str | Path):
        inputs = find_inputs(at_planned_revision([str(data)], directory), options.keys)
    else:
        inputs = shards_of(in_memory(data, options.keys.text_keys[0]), options.keys)
    if inputs.data_set is not None and not inputs.data_set.address and workers > 1:
        try:
            pickle.dumps(inputs.files)
        except Exception as error:  # whatever the data set is made of raises
            raise DataError(
                f"workers {workers}: the data set cannot be sent to other processes ({error}); "
                f"give workers=1, or save it with save_to_disk"
            ) from error
    run = Run(inputs, tokenizer, directory, options, workers=workers, limits=limits)
    run.make()
    return run.finish()


def _require(workers: int) -> None:
    if workers < 1:
        raise DataError(f"--workers {workers} must be at least 1")


def _finished(directory: Path) -> Manifest:
    """Return the manifest of a finished directory after checking its files and cleaning up."""
    manifest = read_manifest(directory)
    check_shards(manifest)
    rejects = directory / REJECTS_NAME
    if not rejects_intact(rejects, manifest.rejects_sha256):
        raise DataError(f"{rejects} is not as the manifest says; {verify_advice(directory)}")
    if (directory / UNITS_NAME).exists():  # a run was killed right after its manifest
        with (
            contextlib.suppress(BusyError, FileNotFoundError),
            Lease(directory / UNITS_NAME / _JOINING, f"finishing {directory}"),
        ):
            clean(directory)
    return manifest


class Run:
    """Run of tokenize that begins or continues a shard directory.

    Args:
        tokenizer: SentencePiece model or tokenizer.json.
        workers: Number of processes; the shards do not depend on it.
        report: Callback for the progress.
        engine: One of `encoder.ENGINES`; the shards do not depend on it.

    Raises:
        DataError: If input or tokenizer are bad, or the directory was begun with others or is
            finished and damaged.
    """

    def __init__(
        self,
        inputs: Inputs,
        tokenizer: Path,
        directory: Path,
        options: TokenizeOptions,
        workers: int,
        report: Report = lambda progress: None,
        limits: Limits = Limits(),  # noqa: B008 - it is frozen
        engine: str = "auto",
    ) -> None:
        _require(workers)
        entries = [entry for entry in inputs.passed_over if not entry.expected]
        if limits.strict and entries:
            raise DataError(
                f"{'; '.join(describe(entries))}; remove what is not to be read, or leave out "
                f"--strict"
            )
        identity = identify(tokenizer, options.allow_lossy, options.eod_token)
        why_not_fast(tokenizer, engine)
        check_report(tokenizer, identity)
        self._directory = directory
        self._engine = engine
        self._workers = workers
        self._report = report
        self._limits = limits
        begin(directory, inputs=inputs, options=options, model=tokenizer, tokenizer=identity)
        self._units = plan_units(
            inputs.files, directory, options, tokenizer=identity, strict=limits.strict
        )
        self._manifest: Manifest | None = None
        if (directory / MANIFEST_NAME).exists():
            self._manifest = _finished(directory)
            if limits.strict and self._manifest.rejects:
                raise _rejects_recorded(directory / REJECTS_NAME)

    def input_bytes(self, task: Task) -> int:
        """Return the bytes of a task's inputs on disk."""
        units = self._units[task.index :: task.count]
        return sum(file.size for unit in units for file in unit.files)

    def make(self, task: Task = Task(0, 1)) -> Made:  # noqa: B008 - it is frozen
        """Make the units of a task; in a finished directory, only check the inputs.

        Raises:
            DataError: If too many lines were rejected, an input changed, a worker failed, or
                another process is making the same task.
        """
        units = self._units[task.index :: task.count]
        if self._manifest is not None:  # the directory may be read-only: not even a lock
            self._check(units, self._manifest)
            return Made(len(units), 0, tuple(self._manifest.damaged))
        work = f"making {self._directory}"
        if task.count > 1:
            work = f"making task {task.index} of {task.count} of {self._directory}"
        path = self._directory / UNITS_NAME / f"task_{task.index}_of_{task.count}.lock"
        with held(path, work):
            self._remove_leftovers(units)
            result = self._make(units)
        # Another run may have finished the directory meanwhile: units made too late are removed.
        if (self._directory / MANIFEST_NAME).exists():
            self._manifest = _finished(self._directory)
        return result

    def finish(self) -> Manifest:
        """Return the manifest, after making the shards if they are not made yet."""
        if self._manifest is not None:
            return self._manifest
        return finish(self._directory, self._workers, self._report, self._limits)

    def _check(self, units: list[Unit], manifest: Manifest) -> None:
        """Raise DataError if an input is not the one that a finished directory was made from."""
        if manifest.in_parts:
            raise DataError(
                f"{self._directory} was made by an earlier version, which read large inputs in "
                f"parts; train on it as it is, or tokenise again into a new directory"
            )
        records = {entry.name: asdict(entry) for entry in manifest.inputs}
        jobs = [UnitJob(unit, [records[file.name] for file in unit.files], False) for unit in units]
        run_tasks(UnitWorker(), jobs, self._workers, self._report)

    def _make(self, units: list[Unit]) -> Made:
        """Make the units that are not recorded, or whose files are incomplete."""
        records = {unit.number: read_record(unit) for unit in units if unit.record_path.is_file()}
        watch = RejectWatch(self._limits, self._directory)
        for unit in units:
            if (record := records.get(unit.number)) is not None:
                if unit.strict and record["rejects"]:
                    raise _rejects_recorded(unit.rejects_path)
                watch.add(record)
        jobs = [_job(unit, records.get(unit.number)) for unit in units]

        def look(record: Record | None) -> None:
            if record is not None and record["unit"] not in records:
                watch.add(record)

        run_tasks(UnitWorker(self._engine), jobs, self._workers, self._report, look=look)
        watch.check()
        made_now = sum(job.make for job in jobs)
        return Made(len(units), made_now, tuple(watch.damaged))

    def _remove_leftovers(self, units: list[Unit]) -> None:
        """Remove temporary files that killed runs left of these units.

        One pass over the directory serves all units. A run with another number of tasks may be
        making the same units, so only abandoned files go.
        """
        unit_names = {unit.record_path.stem for unit in units}
        for path in (self._directory / UNITS_NAME).glob(f"*{TEMPORARY_SUFFIX}"):
            match = _OF_A_UNIT.match(path.name)
            if match is not None and match[1] in unit_names and is_abandoned(path):
                path.unlink(missing_ok=True)


def _job(unit: Unit, record: Record | None) -> UnitJob:
    """Return the order to make a unit, or only to check the inputs of a complete one."""
    if record is None:
        return UnitJob(unit)
    rejects = rejects_intact(unit.rejects_path, record["rejects_sha256"])
    return UnitJob(unit, record["inputs"], make=not (rejects and has_data(unit, record)))


def _rejects_recorded(path: Path) -> DataError:
    return DataError(
        f"{path} names rejected lines of an earlier run without --strict; fix them and choose "
        f"another --out"
    )
