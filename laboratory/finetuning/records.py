"""Rows of JSONL and parquet files by column."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from data_pipeline.io.files import open_regular
from data_pipeline.io.forms import parse_json
from pretrain.errors import UserError

SUFFIXES = (".jsonl", ".parquet")


@dataclass(frozen=True)
class Record:
    """Row of a file.

    Attributes:
        origin: File and line, for messages.
        fields: {column: value}.
    """

    origin: str
    fields: Mapping[str, Any]

    def value(self, name: str) -> Any:
        """Return the value of a column.

        Raises:
            UserError: the record has none.
        """
        if (value := self.fields.get(name)) is None:
            raise UserError(f"{self.origin} has no {name}; it has {', '.join(self.fields)}")
        return value

    def text(self, name: str) -> str:
        """Return the same as `value`, which must be text.

        Raises:
            UserError: it is not text, or as `value`.
        """
        value = self.value(name)
        if not isinstance(value, str) or value != value.encode(errors="replace").decode():
            raise UserError(f"{self.origin}: {name} is {value!r}, which is not text")
        return value


def read_records(path: Path) -> Iterator[Record]:
    """Read the rows of a file.

    Raises:
        UserError: the file cannot be read.
    """
    if path.suffix == ".jsonl":
        return _jsonl(path)
    if path.suffix == ".parquet":
        return _parquet(path)
    raise UserError(f"{path}: give a file that ends in {', '.join(SUFFIXES)}")


def _jsonl(path: Path) -> Iterator[Record]:
    try:
        # Only \n ends a line: a text may hold the other characters at which str.splitlines would
        # cut it.
        with TextIOWrapper(open_regular(path), encoding="utf-8-sig", newline="\n") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    origin = f"{path}, line {number}"
                    yield Record(origin, _json_object(origin, line))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 ({error}); convert it") from error


def _json_object(origin: str, line: str) -> dict[str, Any]:
    try:
        fields = parse_json(line)
    except ValueError as error:
        raise UserError(f"{origin} is not JSON ({error}); fix the line") from error
    if not isinstance(fields, dict):
        raise UserError(f"{origin} is not a JSON object; give one with a key for each column")
    return fields


def _parquet(path: Path) -> Iterator[Record]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        rows = (
            fields
            for batch in ParquetFile(open_regular(path)).iter_batches()
            for fields in batch.to_pylist()
        )
        for number, fields in enumerate(rows, start=1):
            yield Record(f"{path}, row {number}", fields)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except ArrowException as error:
        raise UserError(
            f"{path} cannot be read as parquet: {' '.join(str(error).split())}"
        ) from error
