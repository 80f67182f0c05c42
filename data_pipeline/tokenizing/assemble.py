"""Assembly of finished units into shards, rejects.jsonl and the manifest.

A shard holds whole units, in their order, per split and source, up to a size. The units of a shard
follow from the units' records alone, so it does not matter which process makes the shards, when,
or after how many interruptions. The units' files stay until the manifest is written.
"""

from __future__ import annotations

import functools
import hashlib
import shutil
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_pipeline.errors import DataError
from data_pipeline.io.files import TEMPORARY_SUFFIX, Draft, refusing, sha256_file, sync_directory
from data_pipeline.io.pool import Progress
from data_pipeline.shards.manifest import (
    FORMAT_VERSION,
    REJECTS_NAME,
    InputRecord,
    Manifest,
    Shard,
    rejects_intact,
    write_manifest,
)
from data_pipeline.shards.writing import ShardWriter, dtype_for, index_size, shard_name
from data_pipeline.tokenizing.encode_unit import sum_counts
from data_pipeline.tokenizing.plan import UNITS_NAME, TokenizeOptions, Unit, read_plan
from data_pipeline.tokenizing.unit_files import UnitGroup, copy_group, unit_groups
from data_pipeline.tokenizing.work_unit import Record, Report

_Groups = dict[tuple[str, str], UnitGroup]


@dataclass(frozen=True)
class ShardPlan:
    """Plan of a shard: its place in the directory and the parts of units that it holds."""

    name: str
    number: int
    split: str
    source: str
    parts: tuple[UnitGroup, ...]


def plan_shards(units: Iterable[_Groups], options: TokenizeOptions, dtype: str) -> list[ShardPlan]:
    """Plan the shards of all units, by split, source and number.

    A shard is closed before the unit that would make it larger than `shard_bytes`.

    Args:
        units: Groups of every unit, in the order of the units.
        options: Name and size of the shards.

    Raises:
        DataError: If two sources would share a file name.
    """
    by_source: dict[tuple[str, str], list[list[UnitGroup]]] = {}
    sizes: dict[tuple[str, str], int] = {}
    for groups in units:
        for key, part in groups.items():
            size = part.tokens * np.dtype(dtype).itemsize + index_size(part.documents)
            shards = by_source.setdefault(key, [])
            if not shards or sizes[key] + size > options.shard_bytes:
                shards.append([])
                sizes[key] = 0
            shards[-1].append(part)
            sizes[key] += size
    plans: list[ShardPlan] = []
    source_by_name: dict[str, str] = {}
    # A file system, or an archive's way through one, may not tell Wiki from wiki.
    first_by_letters: dict[str, str] = {}
    for source in sorted({source for _, source in by_source}):
        first_by_letters.setdefault(source.casefold(), source)
    for (split, source), shards in sorted(by_source.items()):
        for number, parts in enumerate(shards):
            repeated = first_by_letters[source.casefold()] != source
            name = shard_name(options.name, split, source, number, with_hash=repeated)
            if (other := source_by_name.setdefault(name, source)) != source:
                raise DataError(
                    f"sources {other!r} and {source!r} would share the file name {name}"
                )
            plans.append(ShardPlan(name, number, split, source, parts=tuple(parts)))
    return plans


def assemble(units: list[Unit], records: list[Record], workers: int, report: Report) -> Manifest:
    """Make the shards, rejects.jsonl and the manifest, and remove the units' files.

    Threads make the shards: reading, hashing and writing release Python's lock.

    Args:
        units: All units of a directory, in order.
        workers: Number of threads.
        report: Callback for the progress.

    Raises:
        DataError: If there is no usable text, a unit's file is damaged, or something cannot be
            written; shards under way are finished first.
    """
    directory = units[0].directory
    tokenizer = units[0].tokenizer
    copy = directory / tokenizer.stored_as
    if sha256_file(copy) != tokenizer.sha256:
        raise DataError(f"{copy} is not the tokenizer of {directory}/plan.json; restore it")
    dtype = dtype_for(tokenizer.vocab_size)
    pairs = list(zip(units, records, strict=True))
    groups = (unit_groups(record, unit.data_path, dtype) for unit, record in pairs)
    plans = plan_shards(groups, units[0].options, dtype)
    if not plans:
        raise _no_text(units, records)
    report(Progress("", tokens_to_join=sum(part.tokens for plan in plans for part in plan.parts)))
    with ThreadPoolExecutor(workers, "join") as pool:
        make = functools.partial(_make_shard, directory=directory, dtype=dtype, report=report)
        running = [pool.submit(make, plan) for plan in plans]
        try:
            shards = [future.result() for future in running]
        finally:
            pool.shutdown(cancel_futures=True)
    # The names of the shards must be on the disk before a manifest vouches for them.
    sync_directory(directory)
    plan, _ = read_plan(directory)
    inputs = (entry for record in records for entry in record["inputs"])
    manifest = Manifest(
        directory=directory,
        format_version=FORMAT_VERSION,
        name=plan["options"]["name"],
        tokenizer=plan["tokenizer"],
        dtype=dtype,
        options=plan["options"],
        inputs=tuple(InputRecord(**entry) for entry in inputs),
        shards=tuple(shards),
        rejects=_sum(records, "rejects"),
        unusual=_sum(records, "unusual"),
        excluded_documents=_sum(records, "excluded_documents"),
        origin=plan["origin"],
        passed_over=tuple(plan["passed_over"]),
        rejects_sha256=_write_rejects(directory / REJECTS_NAME, pairs),
        encoding=sum_counts(records),
    )
    write_manifest(manifest)
    clean(directory)
    return manifest


def clean(directory: Path) -> None:
    """Remove from a finished directory the units and the temporary files of killed runs."""
    for stale in directory.glob(f"*{TEMPORARY_SUFFIX}"):
        stale.unlink(missing_ok=True)
    shutil.rmtree(directory / UNITS_NAME, ignore_errors=True)


def _no_text(units: list[Unit], records: list[Record]) -> DataError:
    counts = _sum(records, "rejects")
    excluded = _sum(records, "excluded_documents")
    counts |= {f"of source {name}": count for name, count in excluded.items()}
    summary = ", ".join(f"{count:,} {reason}" for reason, count in counts.items()) or "no lines"
    inputs = sum(len(unit.files) for unit in units)
    entries = (entry for record in records for entry in record["inputs"])
    if damage := [f"{entry['name']}: {entry['damaged']}" for entry in entries if entry["damaged"]]:
        return DataError(
            f"the {inputs} inputs hold no usable text ({summary}); restore the damaged ones, the "
            f"first is {damage[0]}"
        )
    return DataError(
        f"the {inputs} inputs hold no usable text ({summary}); check --text-key and --source"
    )


def _sum(records: list[Record], key: str) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for record in records:
        counts.update(record[key])
    return dict(sorted(counts.items()))


def _make_shard(plan: ShardPlan, directory: Path, dtype: str, report: Report) -> Shard:
    try:
        with ShardWriter(directory / plan.name, dtype) as writer:
            for part in plan.parts:
                copy_group(part, writer)
                report(Progress("", joined_tokens=part.tokens))
            counts_and_hashes = writer.finish()
    except OSError as error:
        raise DataError(
            f"cannot write the shard {plan.name} to {directory}: {error.strerror or error}; "
            f"finished units are kept, run the same command again to continue"
        ) from error
    return Shard(
        name=plan.name,
        number=plan.number,
        split=plan.split,
        source=plan.source,
        text_bytes=sum(part.text_bytes for part in plan.parts),
        units=tuple(part.unit for part in plan.parts),
        unit_documents=tuple(part.documents for part in plan.parts),
        **counts_and_hashes,
    )


def _write_rejects(path: Path, pairs: list[tuple[Unit, Record]]) -> str:
    """Join the units' rejects; return their SHA-256, empty without rejects."""
    for unit, record in pairs:
        if not rejects_intact(unit.rejects_path, record["rejects_sha256"]):
            raise DataError(
                f"{unit.rejects_path} is missing or damaged; delete {unit.record_path.name} "
                f"beside it and run the same tokenize command again"
            )
    sources = [unit.rejects_path for unit, record in pairs if record["rejects_sha256"]]
    if not sources:
        path.unlink(missing_ok=True)
        return ""
    digest = hashlib.sha256()
    with refusing(f"write {path}"):
        with Draft(path) as stream:
            for source in sources:
                with open(source, "rb") as lines:
                    for line in lines:
                        digest.update(line)
                        stream.write(line)
        sync_directory(path.parent)
    return digest.hexdigest()
