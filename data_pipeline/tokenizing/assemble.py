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
    Draft,
    read_checked_json,
    refusing,
    sha256_file,
    sync_directory,
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
    shard_files,
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
class ShardPlan:
    """Shard to be made of parts of units."""

    name: str
    number: int
    split: str
    source: str
    parts: tuple[UnitGroup, ...]

    @property
    def counts(self) -> dict[str, Any]:
        """Return what the finished shard states of its documents."""
        return {
            "documents": sum(part.documents for part in self.parts),
            "tokens": sum(part.tokens for part in self.parts),
            "text_bytes": sum(part.text_bytes for part in self.parts),
            "units": tuple(part.unit for part in self.parts),
            "unit_documents": tuple(part.documents for part in self.parts),
        }


def plan_shards(units: Iterable[_Groups], options: TokenizeOptions, dtype: str) -> list[ShardPlan]:
    """Plan the shards of all units, by split, source and number.

    A shard is closed before the unit that would make it larger than `shard_bytes`.
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
                raise DataError(
                    f"sources {other!r} and {source!r} would share the file name {name}"
                )
            plans.append(ShardPlan(name, number, split, source, tuple(parts)))
    return plans


class Assembler:
    """Assembler of all units of a directory, from their records, by so many threads.

    `verify`: hash the shards that are there, in place of believing their sizes.
    """

    def __init__(
        self,
        units: list[Unit],
        records: list[Record],
        workers: int,
        report: Report,
        verify: bool = False,
    ) -> None:
        self._units, self._records = units, records
        self._workers, self._report, self._verify = workers, report, verify
        self._directory = units[0].directory
        self._dtype = dtype_for(units[0].tokenizer.vocab_size)
        groups = [
            unit_groups(r, u.data_path, self._dtype) for u, r in zip(units, records, strict=True)
        ]
        self._plans = plan_shards(groups, units[0].options, self._dtype)

    def needed_units(self) -> set[int]:
        """Return the units whose ids are needed: those of shards that are not finished."""
        unfinished = (plan for plan in self._plans if self._finished(plan) is None)
        return {part.unit for plan in unfinished for part in plan.parts}

    def make_shards(self) -> list[Shard]:
        """Return every shard, in the order of the plan; those that are not finished are made now.

        Threads make them: reading, hashing and writing let go of Python's lock. DataError: there is no usable
        text, a unit's ids are damaged, or something cannot be written; shards under way are finished first.
        """
        tokenizer = self._units[0].tokenizer
        if sha256_file(self._directory / tokenizer.stored_as) != tokenizer.sha256:
            raise DataError(
                f"{self._directory / tokenizer.stored_as} is not the tokenizer of "
                f"{self._directory}/plan.json; restore it"
            )
        if not self._plans:
            counts = self._sum("rejects")
            counts |= {f"of source {n}": c for n, c in self._sum("excluded_documents").items()}
            why = ", ".join(f"{count:,} {reason}" for reason, count in counts.items()) or "no lines"
            inputs = sum(piece.start == 0 for unit in self._units for piece in unit.pieces)
            raise DataError(
                f"the {inputs} inputs hold no usable text ({why}); check --text-key and --source"
            )
        done = {plan.name: self._finished(plan) for plan in self._plans}
        left: Counter[Path] = Counter()
        for plan in self._plans:
            left.update({part.path: int(done[plan.name] is None) for part in plan.parts})
        # In the order of their first units: when one begins at a unit, all units before it are used up.
        todo = [plan for plan in self._plans if done[plan.name] is None]
        todo.sort(key=lambda plan: plan.parts[0].unit)
        self._report(
            Progress("", tokens_to_join=sum(part.tokens for plan in todo for part in plan.parts))
        )
        with ThreadPoolExecutor(self._workers, "join") as pool:
            running = {pool.submit(self._make, plan): plan for plan in todo}
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
        return [shard for plan in self._plans if (shard := done[plan.name]) is not None]

    def finish(self) -> Manifest:
        """Make the shards and the manifest, and remove what was under way; DataError as `make_shards`."""
        shards = self.make_shards()
        sync_directory(self._directory)
        plan, _ = read_plan(self._directory)
        inputs = tuple(
            from_dict(InputRecord, entry) for record in self._records for entry in record["inputs"]
        )
        manifest = Manifest(
            directory=self._directory,
            format_version=FORMAT_VERSION,
            name=plan["options"]["name"],
            tokenizer=from_dict(TokenizerIdentity, plan["tokenizer"]),
            dtype=self._dtype,
            options=plan["options"],
            inputs=inputs,
            shards=tuple(shards),
            rejects=self._sum("rejects"),
            unusual=self._sum("unusual"),
            excluded_documents=self._sum("excluded_documents"),
            origin=plan["origin"],
            passed_over=tuple(plan["passed_over"]),
            rejects_sha256=self._write_rejects(inputs),
            encoding=sum_counts(self._records),
        )
        write_manifest(manifest)
        clean(self._directory)
        return manifest

    def _sum(self, key: str) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for record in self._records:
            counts.update(record[key])
        return dict(sorted(counts.items()))

    def _note(self, plan: ShardPlan) -> Path:
        return self._directory / UNITS_NAME / f"{plan.name}.shard"

    def _finished(self, plan: ShardPlan) -> Shard | None:
        """Return the shard, if it has been made of these units and its files are as they were written."""
        path = self._note(plan)
        try:
            shard = (
                shard_from_json(read_checked_json(path, "delete it")) if path.is_file() else None
            )
        except (DataError, KeyError, TypeError):
            return None  # a damaged note is none: the shard is made again
        if shard is None or any(getattr(shard, key) != value for key, value in plan.counts.items()):
            return None
        files = shard_files(
            self._directory / plan.name, shard, hash_bin=self._verify, hash_idx=self._verify
        )
        return None if any(file_problem(*file) for file in files) else shard

    def _make(self, plan: ShardPlan) -> Shard:
        """Make one shard, and its note."""
        try:
            with ShardWriter(self._directory / plan.name, self._dtype) as writer:
                for part in plan.parts:
                    copy_group(part, writer)
                    self._report(Progress("", joined_tokens=part.tokens))
                made = writer.finish()
        except FileNotFoundError as error:
            raise DataError(
                f"{error.filename} is missing; run the same tokenize command again"
            ) from error
        except OSError as error:
            raise DataError(
                f"cannot write the shard {plan.name} to {self._directory}: {error.strerror or error}; "
                f"finished units and shards are kept, run the same command again to continue"
            ) from error
        shard = Shard(plan.name, plan.number, plan.split, plan.source, **plan.counts | made)
        path = self._note(plan)
        temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
        with refusing(f"write {path}"):
            # Not flushed to the disk: losing a note only costs its shard another making.
            temporary.write_bytes(to_checked_json(asdict(shard)))
            os.replace(temporary, path)
        return shard

    def _write_rejects(self, inputs: tuple[InputRecord, ...]) -> str:
        """Write rejects.jsonl from those of the units; return its SHA-256, empty if there are no rejects."""
        path, digest = self._directory / REJECTS_NAME, hashlib.sha256()
        stated = zip(
            self._units, (record["rejects_sha256"] for record in self._records), strict=True
        )
        sources = [(unit, sha256) for unit, sha256 in stated if sha256]
        if not sources:
            path.unlink(missing_ok=True)
            return ""
        for unit, sha256 in sources:
            if file_problem(unit.rejects_path, None, sha256):
                raise DataError(
                    f"{unit.rejects_path} is missing or damaged; delete {unit.record_path.name} beside it "
                    f"and run the same tokenize command again"
                )
        with refusing(f"write {path}"):
            with Draft(path) as stream:
                for line in _reject_lines(inputs, [unit for unit, _ in sources]):
                    digest.update(line)
                    stream.write(line)
            sync_directory(self._directory)
        return digest.hexdigest()


def _reject_lines(inputs: tuple[InputRecord, ...], units: list[Unit]) -> Iterator[bytes]:
    """Yield the units' rejects; lines of a file that was read in parts are counted from its beginning."""
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


def clean(directory: Path) -> None:
    """Remove what was under way in a finished directory, and what killed runs left."""
    for stale in directory.glob(f"*{TEMPORARY_SUFFIX}"):
        stale.unlink(missing_ok=True)
    shutil.rmtree(directory / UNITS_NAME, ignore_errors=True)
