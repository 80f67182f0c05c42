"""What is known of an input and of a shard, and their way from JSON."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True)
class InputRecord:
    """An input as it was when it was tokenised: a file, or bytes [start, end) of one.

    size: of the whole file.
    sha256: of these bytes.
    lines: that begin in these bytes.
    documents: that were taken from them, in all splits and sources.
    rejected, unusual: lines of it that rejects.jsonl names as left out, and as kept.
    damaged: what of the file could not be read, in words; empty if all could.
    version: what the store calls its content, of an input that is no file of the machine's.
    """

    name: str
    size: int
    start: int
    end: int
    sha256: str
    lines: int
    documents: int
    rejected: int = 0
    unusual: int = 0
    damaged: str = ""
    version: str = ""

    @property
    def has_rejects(self) -> bool:
        """Whether rejects.jsonl names something of it."""
        return bool(self.rejected or self.unusual or self.damaged)


@dataclass(frozen=True)
class Shard:
    """One .bin/.idx pair. `name` is the file name without ending; `tokens` count end-of-document ids too.

    number: counts the shards of a split and source (of an old directory: the unit of work).
    units, unit_documents: the units of work whose documents it holds, in this order, and how many of each.
    """

    name: str
    number: int
    split: str
    source: str
    documents: int
    tokens: int
    text_bytes: int
    bin_bytes: int
    bin_sha256: str
    idx_bytes: int
    idx_sha256: str
    units: tuple[int, ...] = ()
    unit_documents: tuple[int, ...] = ()


def input_from_json(value: dict[str, Any]) -> InputRecord:
    """An input as `asdict` and JSON give it; before there were remote ones, none had a version.

    Raises:
        TypeError, KeyError: it is none.
    """
    return from_dict(InputRecord, {"version": ""} | value)


def shard_from_json(value: dict[str, Any]) -> Shard:
    """A shard as `asdict` and JSON give it.

    Raises:
        TypeError, KeyError: it is none.
    """
    lists = {key: tuple(value[key]) for key in ("units", "unit_documents")}
    if not all(type(number) is int for numbers in lists.values() for number in numbers):
        raise TypeError("units should be numbers")
    return from_dict(Shard, value | lists)


def from_dict(kind: type[_T], value: dict[str, Any]) -> _T:
    """A flat dataclass from JSON; every field must be there with its type, and no other.

    Raises:
        TypeError: a field is missing, unknown or of another type.
    """
    result = kind(**value)
    for entry in fields(kind):  # type: ignore[arg-type]
        if type(value[entry.name]).__name__ != str(entry.type).partition("[")[0]:
            raise TypeError(f"{entry.name} should be {entry.type}")
    return result
