"""Pairs of a source and its translation from files.

pairs.tsv                   source and translation between tabs; a header names the columns, or is left out
pairs.jsonl, *.parquet      {"source": …, "target": …}, or the hub's {"translation": {"en": …, "de": …}}
text.en and text.de         two files, line by line
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pretrain.errors import UserError
from pretrain.finetuning.records import SUFFIXES, Record, read_lines, read_records, text_column

_NESTED = "translation"


@dataclass(frozen=True)
class Pair:
    """Text and its translation.

    Attributes:
        place: file and line.
    """

    source: str
    target: str
    place: str


def read_pairs(option: str, paths: Sequence[Path], source: str, target: str) -> list[Pair]:
    """Read the pairs of files that have both, one after the other, or of two files line by line.

    Args:
        option: that named the files, for messages.
        source, target: names of the columns.

    Raises:
        UserError: a file cannot be read, a row has no such columns, or a text is empty.
    """
    if all(path.suffix in SUFFIXES for path in paths):
        pairs = [
            _pair(record, source, target)
            for path in paths
            for record in read_records(path, (source, target), headless=(source, target))
        ]
    elif len(paths) == 2:
        pairs = _aligned(paths[0], paths[1])
    else:
        raise UserError(
            f"{option}: give files that end in {', '.join(SUFFIXES)}, or two others: first the file of the "
            "sources, then that of the translations"
        )
    if not pairs:
        raise UserError(f"{option} {paths[0]}: there are no pairs")
    for pair in pairs:
        if not pair.source.strip() or not pair.target.strip():
            raise UserError(f"{pair.place}: source or translation is empty; mend the line or leave it out")
    return pairs


def _aligned(source: Path, target: Path) -> list[Pair]:
    sources, targets = read_lines(source), read_lines(target)
    if len(sources) != len(targets):
        raise UserError(
            f"{source} has {len(sources)} lines, {target} {len(targets)}: each line must be the other's"
        )
    lines = enumerate(zip(sources, targets, strict=True), start=1)
    return [Pair(one, other, f"{source} and {target}, line {number}") for number, (one, other) in lines]


def _pair(record: Record, source: str, target: str) -> Pair:
    nested = record.fields.get(_NESTED)
    if isinstance(nested, dict):
        record = Record(record.place, nested)
    return Pair(text_column(record, (source,)), text_column(record, (target,)), record.place)
