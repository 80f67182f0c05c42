"""Rows of TSV, JSONL and parquet files by column.

A TSV is GLUE's: a tab ends a field, a quotation mark is a letter like any other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.errors import UserError

SUFFIXES = (".tsv", ".jsonl", ".parquet")


@dataclass(frozen=True)
class Record:
    """Row of a file.

    Attributes:
        place: file and line, for messages.
        fields: {column: value}.
    """

    place: str
    fields: Mapping[str, Any]

    def value(self, names: Sequence[str]) -> Any:
        """Return the value of the first of these columns that the record has.

        Raises:
            UserError: the record has none of them, or nothing in it.
        """
        for name in names:
            if (value := self.fields.get(name)) is not None:
                return value
        raise UserError(
            f"{self.place} has no {' or '.join(names)}; it has {', '.join(self.fields)}"
        )

    def text(self, names: Sequence[str]) -> str:
        """Return the same as `value`, which must be text.

        Raises:
            UserError: it is not text, or as `value`.
        """
        value = self.value(names)
        if not isinstance(value, str):
            raise UserError(f"{self.place}: {' or '.join(names)} is {value!r}, which is not text")
        return value


def read_records(
    path: Path, wanted: Sequence[str], headless: Sequence[str] = ()
) -> Iterator[Record]:
    """Read the rows of a file.

    Args:
        path: of the file.
        wanted: names of columns; the first line of a TSV is its header if one of them is in it.
        headless: the columns of a TSV that has no header; empty: it must have one.

    Raises:
        UserError: the file cannot be read, or a row is not as the first.
    """
    if path.suffix == ".tsv":
        return _tsv(path, wanted, headless)
    if path.suffix == ".jsonl":
        return _jsonl(path)
    if path.suffix == ".parquet":
        return _parquet(path)
    raise UserError(f"{path}: give a file that ends in {', '.join(SUFFIXES)}")


def _tsv(path: Path, wanted: Sequence[str], headless: Sequence[str]) -> Iterator[Record]:
    header: Sequence[str] = ()
    for number, line in _numbered_lines(path):
        cells = line.split("\t")
        if not header:
            if set(cells) & set(wanted):
                header = cells
                continue
            if len(cells) != len(headless):
                raise UserError(
                    f"{path}, line 1: the header names none of {', '.join(wanted)}; it is "
                    f"'{line[:80]}'"
                )
            header = headless
        if len(cells) != len(header):
            raise UserError(
                f"{path}, line {number} has {len(cells)} fields between tabs where {len(header)} "
                "belong; fix the line or leave it out"
            )
        yield Record(f"{path}, line {number}", dict(zip(header, cells, strict=True)))


def _jsonl(path: Path) -> Iterator[Record]:
    for number, line in _numbered_lines(path):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}, line {number} is not JSON ({error}); fix the line") from error
        if not isinstance(fields, dict):
            raise UserError(
                f"{path}, line {number} is not a JSON object; give one with a key for each column"
            )
        yield Record(f"{path}, line {number}", fields)


def _parquet(path: Path) -> Iterator[Record]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        rows = (
            fields for batch in ParquetFile(path).iter_batches() for fields in batch.to_pylist()
        )
        for number, fields in enumerate(rows, start=1):
            yield Record(f"{path}, row {number}", fields)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except ArrowException as error:
        raise UserError(
            f"{path} cannot be read as parquet: {' '.join(str(error).split())}"
        ) from error


def _numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        # Only \n ends a line: a text may hold the other characters at which str.splitlines would
        # cut it.
        with path.open(encoding="utf-8-sig", newline="\n") as file:
            for number, line in enumerate(file, start=1):
                yield number, line.rstrip("\r\n")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 ({error}); convert it") from error
