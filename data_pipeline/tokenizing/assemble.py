"""Assembly of finished units into shards, rejects.jsonl and the manifest.

A shard is made of whole units, in their order, per split and source, up to a size. The units of a shard
follow from the units' records alone, so it does not matter who makes the shards, when, or how often that was
interrupted. A finished shard has a note beside the units' records; the ids of a unit are removed when all its
shards are finished, so that a corpus is never on the disk twice as a whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.errors import DataError
from data_pipeline.io.files import (
    TEMPORARY_SUFFIX,
    publish,
    read_checked_json,
    sha256_file,
    sync,
    sync_directory,
    temporary_path,
    to_checked_json,
    utf8,
)
from data_pipeline.io.pool import Progress
from data_pipeline.shards.manifest import (
    FORMAT_VERSION,
    REJECTS_NAME,
    InputRecord,
    Manifest,
    Shard,
    file_problem,
    from_dict,
    shard_from_json,
    write_manifest,
)
from data_pipeline.shards.writing import ShardWriter, dtype_for, index_size, shard_name
from data_pipeline.tokenizer.identity import TokenizerIdentity
from data_pipeline.tokenizing.encode_unit import sum_counts
from data_pipeline.tokenizing.plan import UNITS_NAME, TokenizeOptions, Unit, read_plan
from data_pipeline.tokenizing.unit_files import UnitGroup, copy_group, unit_groups
from data_pipeline.tokenizing.work_unit import Record, Report

_Groups = dict[tuple[str, str], UnitGroup]


@dataclass(frozen=True)
class Assembler:
    """Assembler of a directory's units. `verify`: shards that are there are hashed, not only measured."""

    directory: Path
    workers: int
    report: Report
    verify: bool = False

    def make_shards(self, units: list[Unit], records: list[Record]) -> list[Shard]:
        """Make the shards of all units.

        Raises:
            DataError: there is no usable text, a unit's ids are damaged, or something cannot be written.
        """
        plan, _ = read_plan(self.directory)
        tokenizer = from_dict(TokenizerIdentity, plan["tokenizer"])
        if sha256_file(self.directory / tokenizer.stored_as) != tokenizer.sha256:
            raise DataError(
                f"{self.directory / tokenizer.stored_as} is not the tokenizer of {self.directory}/plan.json; "
                f"restore it"
            )
        if not any(record["groups"] for record in records):
            counts = _sum(records, "rejects")
            counts |= {f"of source {n}": c for n, c in _sum(records, "excluded_documents").items()}
            why = ", ".join(f"{count:,} {reason}" for reason, count in counts.items()) or "no lines"
            raise DataError(
                f"the {len(plan['inputs'])} inputs hold no usable text ({why}); check --text-key and --source"
            )
        plans, dtype = _shards_of(units, records), dtype_for(tokenizer.vocab_size)
        return join_all(plans, self.directory, dtype, self.workers, self.report, self.verify)

    def finish(self, units: list[Unit], records: list[Record]) -> Manifest:
        """Make the shards and the manifest of all units, and remove what was under way.

        Raises:
            DataError: as `make_shards`.
        """
        shards = self.make_shards(units, records)
        sync_directory(self.directory)
        plan, _ = read_plan(self.directory)
        tokenizer = from_dict(TokenizerIdentity, plan["tokenizer"])
        inputs = tuple(from_dict(InputRecord, entry) for record in records for entry in record["inputs"])
        manifest = Manifest(
            directory=self.directory,
            format_version=FORMAT_VERSION,
            name=plan["options"]["name"],
            tokenizer=tokenizer,
            dtype=dtype_for(tokenizer.vocab_size),
            options=plan["options"],
            inputs=inputs,
            shards=tuple(shards),
            rejects=_sum(records, "rejects"),
            unusual=_sum(records, "unusual"),
            excluded_documents=_sum(records, "excluded_documents"),
            origin=plan["origin"],
            passed_over=tuple(plan["passed_over"]),
            rejects_sha256=_write_rejects(self.directory, inputs, units, records),
            encoding=sum_counts(records),
        )
        write_manifest(manifest)
        clean(self.directory)
        return manifest


def clean(directory: Path) -> None:
    """Remove what was under way in a finished directory, and what killed runs left."""
    for stale in directory.glob(f"*{TEMPORARY_SUFFIX}"):
        stale.unlink(missing_ok=True)
    shutil.rmtree(directory / UNITS_NAME, ignore_errors=True)


def units_to_join(units: list[Unit], records: list[Record], hash_files: bool = False) -> set[int]:
    """Return the units whose ids are needed: those of shards that are not finished.

    Args:
        hash_files: as in `done_shard`.
    """
    plans, directory = _shards_of(units, records), units[0].directory
    unfinished = (plan for plan in plans if done_shard(plan, directory, hash_files) is None)
    return {part.unit for plan in unfinished for part in plan.parts}


def _shards_of(units: list[Unit], records: list[Record]) -> list[ShardPlan]:
    dtype = dtype_for(units[0].tokenizer.vocab_size)
    groups = [unit_groups(r, u.data_path, dtype) for u, r in zip(units, records, strict=True)]
    return plan_shards(groups, units[0].options, dtype)


@dataclass(frozen=True)
class ShardPlan:
    """Shard to be made of parts of units."""

    name: str
    number: int
    split: str
    source: str
    parts: tuple[UnitGroup, ...]

    @property
    def documents(self) -> int:
        return sum(part.documents for part in self.parts)

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.parts)


def plan_shards(units: Iterable[_Groups], options: TokenizeOptions, dtype: str) -> list[ShardPlan]:
    """Plan the shards of all units, by split, source and number.

    A shard is closed before the unit that would make it larger than `shard_bytes`.

    Raises:
        DataError: two sources have the same file name.
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
    named: dict[str, str] = {}
    for (split, source), shards in sorted(by_source.items()):
        for number, parts in enumerate(shards):
            name = shard_name(options.name, split, source, number)
            if (other := named.setdefault(name, source)) != source:
                raise DataError(f"sources {other!r} and {source!r} would share the file name {name}")
            plans.append(ShardPlan(name, number, split, source, tuple(parts)))
    return plans


def done_shard(plan: ShardPlan, directory: Path, hash_files: bool = False) -> Shard | None:
    """Return the shard, if it has been made of these units and its files are as they were written.

    Args:
        hash_files: compare the files' content, not only their sizes.
    """
    path = _note(plan, directory)
    try:
        shard = shard_from_json(read_checked_json(path, "delete it")) if path.is_file() else None
    except (DataError, KeyError, TypeError):
        return None  # a damaged note is none: the shard is made again
    if shard is None:
        return None
    units = tuple(part.unit for part in plan.parts)
    if (shard.units, shard.documents, shard.tokens) != (units, plan.documents, plan.tokens):
        return None
    for ending, size, digest in (
        ("bin", shard.bin_bytes, shard.bin_sha256),
        ("idx", shard.idx_bytes, shard.idx_sha256),
    ):
        if file_problem(directory / f"{shard.name}.{ending}", size, digest if hash_files else None):
            return None
    return shard


def join(plan: ShardPlan, directory: Path, dtype: str, report: Report) -> Shard:
    """Make one shard, and its note.

    Raises:
        DataError: a unit's ids are damaged or gone, or the shard cannot be written.
    """
    writer = None
    try:
        writer = ShardWriter(directory / plan.name, dtype)
        for part in plan.parts:
            copy_group(part, writer)
            report(Progress("", joined_tokens=part.tokens))
        made: dict[str, Any] = writer.finish()
    except FileNotFoundError as error:
        raise DataError(f"{error.filename} is missing; run the same tokenize command again") from error
    except OSError as error:
        raise DataError(
            f"cannot write the shard {plan.name} to {directory}: {error.strerror or error}; finished units "
            f"and shards are kept, run the same command again to continue"
        ) from error
    finally:
        if writer is not None:
            writer.discard()
    shard = Shard(
        name=plan.name,
        number=plan.number,
        split=plan.split,
        source=plan.source,
        text_bytes=sum(part.text_bytes for part in plan.parts),
        units=tuple(part.unit for part in plan.parts),
        unit_documents=tuple(part.documents for part in plan.parts),
        **made,
    )
    _write_note(_note(plan, directory), to_checked_json(asdict(shard)))
    return shard


def join_all(
    plans: list[ShardPlan],
    directory: Path,
    dtype: str,
    workers: int,
    report: Report,
    hash_files: bool = False,
) -> list[Shard]:
    """Return every shard, in the order of the plans; those that are not finished are made now.

    Threads make them: reading, hashing and writing let go of Python's lock.

    Raises:
        DataError: as `join`; the shards under way are finished first.
    """
    done = {plan.name: done_shard(plan, directory, hash_files) for plan in plans}
    left: dict[Path, int] = {}
    for plan in plans:
        for part in plan.parts:
            left[part.path] = left.get(part.path, 0) + (done[plan.name] is None)
    # In the order of their first units: when one begins at a unit, all units before it are used up.
    todo = sorted((plan for plan in plans if done[plan.name] is None), key=lambda p: p.parts[0].unit)
    report(Progress("", tokens_to_join=sum(plan.tokens for plan in todo)))

    with ThreadPoolExecutor(workers, "join") as pool:
        running = {pool.submit(join, plan, directory, dtype, report): plan for plan in todo}
        try:
            while running:
                ended, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in ended:
                    plan = running.pop(future)
                    done[plan.name] = future.result()
                    for part in plan.parts:
                        left[part.path] -= 1
                        if left[part.path] == 0:
                            part.path.unlink(missing_ok=True)
        finally:
            pool.shutdown(cancel_futures=True)
    return [shard for plan in plans if (shard := done[plan.name]) is not None]


def _write_note(path: Path, content: bytes) -> None:
    """Write a note, not flushed to the disk: losing one only costs its shard another making."""
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}") from error


def _note(plan: ShardPlan, directory: Path) -> Path:
    return directory / UNITS_NAME / f"{plan.name}.shard"


def _write_rejects(
    directory: Path, inputs: tuple[InputRecord, ...], units: list[Unit], records: list[Record]
) -> str:
    """Write rejects.jsonl from those of the units; return its SHA-256, or nothing if there are no rejects.

    Lines of a file that was read in parts are counted from its beginning.

    Raises:
        DataError: a unit's file is damaged, or rejects.jsonl cannot be written.
    """
    path, digest = directory / REJECTS_NAME, hashlib.sha256()
    stated = zip(units, (record["rejects_sha256"] for record in records), strict=True)
    sources = [(unit, sha256) for unit, sha256 in stated if sha256]
    if not sources:
        path.unlink(missing_ok=True)
        return ""
    for unit, sha256 in sources:
        if file_problem(unit.rejects_path, None, sha256):
            raise DataError(
                f"{unit.rejects_path} is missing or damaged; delete {unit.record_path.name} beside it and "
                f"run the same tokenize command again"
            )
    temporary = temporary_path(path)
    try:
        with open(temporary, "wb") as stream:
            for line in _reject_lines(inputs, [unit for unit, _ in sources]):
                digest.update(line)
                stream.write(line)
            sync(stream)
        publish(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise DataError(f"cannot write {path}: {error.strerror or error}") from error
    return digest.hexdigest()


def _reject_lines(inputs: tuple[InputRecord, ...], units: Iterable[Unit]) -> Iterator[bytes]:
    before: dict[tuple[str, int], int] = {}
    lines = 0
    for record in inputs:
        lines = 0 if record.start == 0 else lines
        before[record.name, record.start] = lines
        lines += record.lines
    for unit in units:
        with open(unit.rejects_path, "rb") as stream:
            for line in stream:
                entry = json.loads(line)
                entry["line"] += before[entry["file"], entry.pop("start")]
                yield utf8(json.dumps(entry, ensure_ascii=False) + "\n")


def _sum(records: list[Record], key: str) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for record in records:
        counts.update(record[key])
    return dict(sorted(counts.items()))
