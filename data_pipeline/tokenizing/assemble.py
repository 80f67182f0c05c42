"""Shards out of finished units: whole units, in their order, per split and source, up to a size.

Which units a shard holds follows from the units' records alone, so it does not matter who joins them, when,
or how often that was interrupted. A shard that is done has a note beside the units' records; the ids of a
unit are removed when all its shards are done, so that a corpus is never on the disk twice as a whole.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.errors import DataError
from data_pipeline.io.files import TEMPORARY_SUFFIX, read_checked_json, to_checked_json
from data_pipeline.io.pool import Progress
from data_pipeline.shards.manifest import Shard, file_problem, shard_from_json
from data_pipeline.shards.writing import ShardWriter, index_size, shard_name
from data_pipeline.tokenizing.plan import UNITS_NAME, TokenizeOptions
from data_pipeline.tokenizing.unit_files import UnitGroup, copy_group

_Report = Callable[[Progress], None]
_Groups = dict[tuple[str, str], UnitGroup]


@dataclass(frozen=True)
class ShardPlan:
    """A shard to be made of these parts of units."""

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
    """The shards of all units, by split, source and number.

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
    """The shard, if it has been made of these units and its files are as they were written.

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
    return shard if is_intact(shard, directory, hash_files) else None


def is_intact(shard: Shard, directory: Path, hash_files: bool = False) -> bool:
    """Whether a shard's files are there, with their sizes and, if asked for, their hashes."""
    for ending, size, digest in (
        ("bin", shard.bin_bytes, shard.bin_sha256),
        ("idx", shard.idx_bytes, shard.idx_sha256),
    ):
        if file_problem(directory / f"{shard.name}.{ending}", size, digest if hash_files else None):
            return False
    return True


def join(plan: ShardPlan, directory: Path, dtype: str, report: _Report) -> Shard:
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
    report: _Report,
    hash_files: bool = False,
) -> list[Shard]:
    """Every shard, in the order of the plans: those that are done as they are, the others made now.

    Threads do it: reading, hashing and writing let go of Python's lock.

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
    """Not flushed to the disk: one that a power failure garbles only costs its shard another making."""
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}") from error


def _note(plan: ShardPlan, directory: Path) -> Path:
    return directory / UNITS_NAME / f"{plan.name}.shard"
