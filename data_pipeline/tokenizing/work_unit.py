"""Worker for units of work: input files in, ids and a record out.

One worker does everything for a unit - decompress, hash, parse, split, encode, write - so ids never
travel between processes. The record, written last, makes the unit count; the ids stay beside the
record until all units are recorded and the shards are made. The files are a function of the inputs
and the options only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from data_pipeline.errors import DataError
from data_pipeline.io.files import as_json, read_checked_json, to_checked_json, write_atomically
from data_pipeline.io.forms import Count, in_form
from data_pipeline.io.pool import Progress
from data_pipeline.shards.manifest import InputRecord
from data_pipeline.shards.writing import dtype_for
from data_pipeline.sources.records import content_hash
from data_pipeline.tokenizer.encoder import Encoder, open_encoder
from data_pipeline.tokenizing.encode_unit import make_unit
from data_pipeline.tokenizing.plan import Unit
from data_pipeline.tokenizing.unit_files import StatedGroup, data_size

# Part of a record; raise it when the files of a unit change, so that runs do not mix versions.
_RECORD_VERSION = 2
_REMEDY = "delete it and run the same tokenize command again"

Report = Callable[[Progress], None]
Record = dict[str, Any]


class _Stated(TypedDict):
    """Content of a record besides the identity of its run."""

    unit: Count
    inputs: list[InputRecord]
    groups: list[StatedGroup]
    rejects: dict[str, Count]
    unusual: dict[str, Count]
    excluded_documents: dict[str, Count]
    engines: dict[str, Count]
    compared_documents: Count
    lossy_documents: Count
    rejects_sha256: str


_RECORD = TypeAdapter(_Stated)


@dataclass(frozen=True)
class UnitJob:
    """Order to make a unit, or only to check its inputs.

    Attributes:
        unit: Unit to make or check.
        known: Inputs that the unit was made from before, which must not have changed; None if it
            has not been made.
        make: Whether to make the unit (again).
    """

    unit: Unit
    known: list[Record] | None = None
    make: bool = True


class UnitWorker:
    """Maker of a run's units, one after the other; each process has one.

    Args:
        engine: One of `encoder.ENGINES`.
    """

    def __init__(self, engine: str = "auto") -> None:
        self._engine = engine
        self._encoder: Encoder | None = None

    def __call__(self, job: UnitJob, report: Report) -> Record | None:
        """Check a unit's inputs, then make its ids and record.

        Args:
            report: Callback for the progress.

        Returns:
            Record of the unit; None if the inputs were only checked.

        Raises:
            DataError: If an input is unreadable or has changed, a line is rejected under `strict`,
                or a write fails.
        """
        unit = job.unit
        name = unit.files[0].name
        report(Progress(name))
        try:
            if job.known is not None:
                _check_inputs(unit, job.known)
            if not job.make:
                report(Progress(name, skipped_bytes=sum(file.size for file in unit.files)))
                return None
            encoder = self._load(unit.directory / unit.tokenizer.stored_as)
            record = _identity(unit) | make_unit(unit, encoder, report)
            # If a power failure loses the name, only this unit has to be made again.
            write_atomically(unit.record_path, to_checked_json(record), durable=False)
            return record
        except OSError as error:
            raise DataError(
                f"cannot write the shards of {name} to {unit.directory}: "
                f"{error.strerror or error}; finished units are kept, run the same command again "
                f"to continue"
            ) from error

    def _load(self, path: Path) -> Encoder:
        if self._encoder is None:  # all units of a run have one tokenizer
            self._encoder = open_encoder(path, self._engine)
        return self._encoder


def _identity(unit: Unit) -> Record:
    return {
        "version": _RECORD_VERSION,
        "unit": unit.number,
        "options": as_json(unit.options),
        "tokenizer": unit.tokenizer.sha256,
    }


def read_record(unit: Unit) -> Record:
    """Read the record of a unit that has been made.

    Raises:
        DataError: If the record is damaged, or of another run.
    """
    record = read_checked_json(unit.record_path, _REMEDY)
    if any(record.get(key) != value for key, value in _identity(unit).items()):
        raise DataError(f"{unit.record_path} belongs to another run; choose another --out")
    content = _RECORD.dump_python(in_form(record, _RECORD, unit.record_path, _REMEDY))
    if [entry["name"] for entry in content["inputs"]] != [file.name for file in unit.files]:
        raise DataError(f"{unit.record_path} names other inputs; {_REMEDY}")
    return content


def has_data(unit: Unit, record: Record) -> bool:
    """Return whether the file of the unit's ids exists and has the size that its record implies."""
    path = unit.data_path
    size = data_size(record, dtype_for(unit.tokenizer.vocab_size))
    return path.is_file() and path.stat().st_size == size


def _check_inputs(unit: Unit, known: list[Record]) -> None:
    """Raise DataError if an input is not the one that the unit was made from."""
    for file, old in zip(unit.files, known, strict=True):
        same = (old["name"], old["size"], old["end"]) == (file.name, file.size, file.size)
        if file.version:
            # A data set's version is trusted: hashing its rows would fetch all of them once more.
            same = same and old["version"] == file.version
        else:
            same = same and old["sha256"] == content_hash(file, unit.options.keys)
        if not same:
            raise DataError(
                f"input {file.path} changed after its shards were made; restore it or choose "
                f"another --out"
            )
