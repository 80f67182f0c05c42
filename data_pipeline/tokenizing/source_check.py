"""Comparison of shards with their source text."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from data_pipeline.errors import DataError
from data_pipeline.io.files import read_checked_json
from data_pipeline.io.forms import in_form
from data_pipeline.shards.manifest import MANIFEST_NAME, InputRecord, Manifest, Shard
from data_pipeline.shards.reading import open_shard
from data_pipeline.sources.data_sets import DataShard, is_data_set
from data_pipeline.sources.records import content_hash, read_documents
from data_pipeline.tokenizer.tokenizer import Tokenizer, open_tokenizer
from data_pipeline.tokenizing.plan import LOCATION_NAME, PLAN_NAME, Unit, read_plan

_DOCUMENTS_PER_SHARD = 64


class _Location(TypedDict):
    inputs: str


_LOCATION = TypeAdapter(_Location)


def compare_with_source(
    manifest: Manifest, inputs: str | Path | None = None, most_units: int = 4
) -> tuple[list[str], str]:
    """Read the inputs of some units again and look for a decoded sample of their shards in them.

    Args:
        inputs: Directory of the inputs, or their data set; None is what was tokenised.
        most_units: Number of units to compare, spread evenly over all.

    Returns:
        Problems, each a clause that begins with a file's path, and a remark on what was compared,
        or why not.

    Raises:
        DataError: If plan and manifest contradict each other or cannot be read, or `inputs` are not
            what was tokenised.
    """
    path = os.path.expanduser(str(inputs)) if inputs else _location(manifest.directory)
    if not path or not (is_data_set(path) or Path(path).is_dir()):
        reason = f"the inputs are not at {path}" if path else f"there is no {LOCATION_NAME}"
        if inputs:
            raise _other_inputs(f"{path} is not the directory of the inputs")
        return [], f"not compared with the source text: {reason}; give --inputs"
    if manifest.in_parts or manifest.options.get("max_tokens"):
        return [], "not compared with the source text: an earlier version took parts of the inputs"
    try:
        _, units = read_plan(manifest.directory, path)
    except DataError as error:
        if inputs or not is_data_set(path):
            raise
        return [], f"not compared with the source text: {error}"
    records = {entry.name: entry for entry in manifest.inputs}
    parts: dict[int, list[_Part]] = {}
    for shard in manifest.shards:
        first = 0
        for unit, documents in zip(shard.units, shard.unit_documents, strict=True):
            parts.setdefault(unit, []).append(_Part(shard, first, documents))
            first += documents
    numbers = sorted(parts)
    planned = {file.name for unit in units for file in unit.files}
    if records.keys() != planned or not parts or numbers[-1] >= len(units):
        raise DataError(
            f"{manifest.directory}: {PLAN_NAME} and {MANIFEST_NAME} have other inputs; restore them"
        )
    chosen = sorted({numbers[i] for i in np.linspace(0, len(numbers) - 1, most_units).astype(int)})
    tokenizer = open_tokenizer(manifest.tokenizer_path)
    problems: list[str] = []
    documents = compared = 0
    for number in chosen:
        unit = units[number]
        if difference := _input_difference(unit, records):
            if inputs:
                raise _other_inputs(difference)
            return problems, f"not compared with the source text: {difference}"
        unit_problems, count = _unit_problems(manifest, unit, parts[number], tokenizer)
        problems += unit_problems
        documents += count
        compared += 1
    return problems, f"{documents} documents of {compared} units are as in the source text"


@dataclass(frozen=True)
class _Part:
    """Documents of a unit in one shard."""

    shard: Shard
    first: int
    documents: int


def _other_inputs(problem: str) -> DataError:
    return DataError(f"{problem}; the shards are whole: give --inputs as they were tokenised")


def _location(directory: Path) -> str | None:
    path = directory / LOCATION_NAME
    if not path.is_file():
        return None
    remedy = "delete it, or give --inputs"
    return in_form(read_checked_json(path, remedy), _LOCATION, path, remedy)["inputs"]


def _input_difference(unit: Unit, known: dict[str, InputRecord]) -> str | None:
    """Describe the first input of the unit that is not as tokenised; None if all are."""
    for file in unit.files:
        record = known[file.name]
        path = file.path
        if isinstance(path, DataShard):
            same = path.version == record.version
        elif not path.is_file():
            return f"{path} is missing"
        else:
            same = path.stat().st_size == record.size and record.sha256 == content_hash(
                file, unit.options.keys
            )
        if not same:
            return f"{path} is not what was tokenised"
    return None


def _unit_problems(
    manifest: Manifest, unit: Unit, parts: list[_Part], tokenizer: Tokenizer
) -> tuple[list[str], int]:
    """Return the problems and the number of documents that were looked for."""
    looked_for = _sample(manifest, parts, tokenizer)
    count = len(looked_for)
    seen: Counter[tuple[str, str]] = Counter()
    for file in unit.files:
        for document in read_documents(file, unit.options.keys):
            if unit.options.takes(document.source):
                split = unit.options.split_of(document.text.encode())
                seen[split, document.source] += 1
                text = tokenizer.survivor(document.text)
                looked_for.pop(_key(text, split, document.source), None)
    names = ", ".join(file.name for file in unit.files)
    problems = [
        f"{prefix}.bin: document {number} is not a document of this split and source in {names}"
        for prefix, number in looked_for.values()
    ]
    stored = {(part.shard.split, part.shard.source): part.documents for part in parts}
    problems += [
        f"{manifest.directory}: unit {unit.number} has {stored.get(key, 0):,} documents of "
        f"{key[1]} in {key[0]}, its inputs {names} have {seen[key]:,}"
        for key in sorted(stored.keys() | seen.keys())
        if stored.get(key, 0) != seen[key]
    ]
    return problems, count


def _sample(
    manifest: Manifest, parts: list[_Part], tokenizer: Tokenizer
) -> dict[bytes, tuple[Path, int]]:
    """Decode some documents of a unit; return the shard and number of each, by `_key`."""
    sample: dict[bytes, tuple[Path, int]] = {}
    for part in parts:
        shard = part.shard
        opened = open_shard(manifest, shard)
        ends = np.cumsum(opened.lengths)
        last = part.first + part.documents - 1
        for number in np.linspace(part.first, last, _DOCUMENTS_PER_SHARD).astype(int).tolist():
            ids = opened.tokens[ends[number] - opened.lengths[number] : ends[number] - 1].tolist()
            key = _key(tokenizer.decode(ids), shard.split, shard.source)
            sample[key] = (manifest.prefix(shard), number)
    return sample


def _key(text: str, split: str, source: str) -> bytes:
    return hashlib.blake2b(f"{split}\0{source}\0{text}".encode(), digest_size=16).digest()
