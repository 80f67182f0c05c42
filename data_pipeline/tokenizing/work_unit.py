"""One unit of work: pieces of input in, ids and a record out.

One worker does everything for a unit - decompress, hash, parse, split, encode, write - so ids never travel
between processes. The record, written last, makes the unit count; the ids wait beside it until all units are
there and shards are made of them. What is written is a function of the inputs and the options only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data_pipeline.errors import DataError
from data_pipeline.io.files import (
    read_checked_json,
    sha256_file,
    to_checked_json,
    write_atomically,
)
from data_pipeline.io.lease import BusyError, Lease
from data_pipeline.io.pool import Progress
from data_pipeline.shards.manifest import InputRecord
from data_pipeline.shards.writing import dtype_for
from data_pipeline.sources.containers import hash_of
from data_pipeline.tokenizer.encoder import Engine, open_engine
from data_pipeline.tokenizing.encode_unit import UnitMaker
from data_pipeline.tokenizing.plan import Unit
from data_pipeline.tokenizing.unit_files import data_size

_REMEDY = "delete it and run the same tokenize command again"

Report = Callable[[Progress], None]
Record = dict[str, Any]


@dataclass(frozen=True)
class UnitJob:
    """A unit and what is known of it.

    needs_data: its ids are wanted, for shards that are not there yet.
    finished: its inputs as a finished directory's manifest has them; then only missing data is made again.
    """

    unit: Unit
    needs_data: bool = True
    finished: tuple[InputRecord, ...] | None = None


@dataclass(frozen=True)
class Outcome:
    """What came of a unit. `record` None: nothing to do, or somebody else is at it (`busy`)."""

    record: Record | None
    made: bool = False
    busy: str = ""
    certain: bool = False


class UnitWorker:
    """Makes units one after the other; a process has one, so that it loads the tokenizer once."""

    def __init__(self, engine: str = "auto") -> None:
        """`engine` is one of `engine.ENGINES`."""
        self._engine_name = engine
        self._path = Path()
        self._engine: Engine | None = None

    def __call__(self, job: UnitJob, report: Report) -> Outcome:
        """Make a unit's ids and record, unless they are there or somebody else is making them.

        Raises:
            DataError: an unreadable input or one that changed, a reject under `strict`, or a failed write.
        """
        unit = job.unit
        report(Progress(unit.pieces[0].file.name))
        try:
            if (outcome := _there_already(job, report)) is not None:
                return outcome
            with Lease(unit.lock_path, f"making unit {unit.number} of {unit.directory}"):
                # Another may have finished it a moment ago.
                return _there_already(job, report) or self._make(job, report)
        except BusyError as error:
            return Outcome(None, busy=str(error), certain=error.certain)
        except OSError as error:
            raise DataError(
                f"cannot write the shards of {unit.pieces[0].file.name} to {unit.directory}: "
                f"{error.strerror or error}; finished units are kept, run the same command again to continue"
            ) from error

    def _make(self, job: UnitJob, report: Report) -> Outcome:
        unit = job.unit
        maker = UnitMaker(unit, report, self._load(unit.directory / unit.tokenizer.stored_as))
        try:
            inputs = [asdict(maker.read(piece, number)) for number, piece in enumerate(unit.pieces)]
            groups = maker.finish()
        finally:
            maker.discard()
        if job.finished is not None:
            _check_inputs(unit, [asdict(entry) for entry in job.finished], inputs)
        record = _identity(unit) | {"inputs": inputs, "groups": groups, **maker.counts()}
        # A name that is lost with the machine's power costs its unit another making, and nothing else.
        write_atomically(unit.record_path, to_checked_json(record), durable=False)
        return Outcome(record, made=True)

    def _load(self, path: Path) -> Engine:
        if self._engine is None or path != self._path:
            self._path, self._engine = path, open_engine(path, self._engine_name)
        return self._engine


def _there_already(job: UnitJob, report: Report) -> Outcome | None:
    """The outcome of a unit of which nothing has to be made; None if something has."""
    unit = job.unit
    before = read_record(unit) if unit.record_path.exists() else None
    if before is None and job.finished is None:
        return None
    _check_inputs(unit, before["inputs"] if before else [asdict(entry) for entry in job.finished or ()])
    if _is_incomplete(job, before):
        return None
    if unit.strict and before is not None and before["rejects"]:
        raise DataError(
            f"{unit.rejects_path} names rejected lines of an earlier run without --strict; "
            f"mend them and choose another --out"
        )
    report(Progress(unit.pieces[0].file.name, skipped_bytes=sum(piece.size for piece in unit.pieces)))
    return Outcome(before)


def _identity(unit: Unit) -> Record:
    return {"unit": unit.number, "options": unit.options.as_json(), "tokenizer": unit.tokenizer.sha256}


def read_record(unit: Unit) -> Record:
    """The record of a unit that has been made.

    Raises:
        DataError: it is damaged, or of another run.
    """
    record = read_checked_json(unit.record_path, _REMEDY)
    if any(record.get(key) != value for key, value in _identity(unit).items()):
        raise DataError(f"{unit.record_path} belongs to another run; choose another --out")
    return record


def has_data(unit: Unit, record: Record) -> bool:
    """Whether the unit's ids wait beside its record."""
    path, dtype = unit.data_path, dtype_for(unit.tokenizer.vocab_size)
    return path.is_file() and path.stat().st_size == data_size(record, dtype)


def _is_incomplete(job: UnitJob, record: Record | None) -> bool:
    """Whether something of the unit has to be made."""
    if record is None:
        return job.needs_data
    rejects, digest = job.unit.rejects_path, record["rejects_sha256"]
    if bool(digest) != rejects.is_file() or (digest and sha256_file(rejects) != digest):
        return True
    return job.needs_data and not has_data(job.unit, record)


def _check_inputs(unit: Unit, known: list[dict[str, Any]], now: list[dict[str, Any]] | None = None) -> None:
    """Are the inputs (`now`, or as they lie there) those that the unit was made from?"""
    for number, (piece, old) in enumerate(zip(unit.pieces, known, strict=True)):
        stated = old["name"], old["size"], old["start"], old["end"]
        same = stated == (piece.file.name, piece.file.size, piece.start, piece.end)
        if now is not None:
            same = same and old["sha256"] == now[number]["sha256"]
        elif piece.file.version:
            # What the store says is believed: to hash an object is to fetch all of it once more.
            same = same and old["version"] == piece.file.version
        else:
            same = same and old["sha256"] == hash_of(piece)
        if not same:
            raise DataError(
                f"input {piece.file.path} changed after its shards were made; "
                f"restore it or choose another --out"
            )
