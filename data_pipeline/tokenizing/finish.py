"""The end of a shard directory: units to shards, rejects.jsonl, the manifest, and nothing else left over."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.errors import DataError
from data_pipeline.io.files import (
    TEMPORARY_SUFFIX,
    publish,
    sha256_file,
    sync,
    sync_directory,
    temporary_path,
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
    input_from_json,
    rejects_intact,
    write_manifest,
)
from data_pipeline.shards.writing import dtype_for
from data_pipeline.tokenizer.identity import TokenizerIdentity
from data_pipeline.tokenizing.assemble import ShardPlan, join_all, plan_shards
from data_pipeline.tokenizing.encoding import sum_counts
from data_pipeline.tokenizing.plan import UNITS_NAME, Unit, read_plan
from data_pipeline.tokenizing.unit_files import unit_groups
from data_pipeline.tokenizing.work_unit import Record

_Report = Callable[[Progress], None]


@dataclass(frozen=True)
class Finisher:
    """Puts the units of a directory together. `verify`: what is there is hashed, not only measured."""

    directory: Path
    workers: int
    report: _Report
    verify: bool = False

    def join(self, units: list[Unit], records: list[Record]) -> list[Shard]:
        """Make the shards of all units.

        Raises:
            DataError: there is no usable text, a unit's ids are damaged, or something cannot be written.
        """
        plan, _ = read_plan(self.directory)
        dtype = dtype_for(self._tokenizer(plan).vocab_size)
        groups = [unit_groups(r, u.data_path, dtype) for u, r in zip(units, records, strict=True)]
        if not any(groups):
            counts = _sum(records, "rejects")
            counts |= {f"of source {n}": c for n, c in _sum(records, "excluded_documents").items()}
            why = ", ".join(f"{count:,} {reason}" for reason, count in counts.items()) or "no lines"
            raise DataError(
                f"the {len(plan['inputs'])} inputs hold no usable text ({why}); check --text-key and --source"
            )
        return self._join(plan_shards(groups, units[0].options, dtype), dtype)

    def finish(self, units: list[Unit], records: list[Record]) -> Manifest:
        """Make the shards and the manifest of all units.

        Raises:
            DataError: as `join`.
        """
        shards = self.join(units, records)
        sync_directory(self.directory)
        plan, _ = read_plan(self.directory)
        tokenizer = from_dict(TokenizerIdentity, plan["tokenizer"])
        inputs = tuple(input_from_json(entry) for record in records for entry in record["inputs"])
        digests = {record["unit"]: record["rejects_sha256"] for record in records}
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
            rejects_sha256=_write_rejects(self.directory, inputs, units, digests),
            encoding=sum_counts(records),
        )
        write_manifest(manifest)
        self._clean()
        return manifest

    def mend(self, manifest: Manifest, units: list[Unit], records: dict[int, Record]) -> None:
        """Make the shards (and rejects) of a finished directory again that are not as they were.

        Args:
            units: all of the directory.
            records: of the units that were made again, by number.

        Raises:
            DataError: they did not come out as they were, or cannot be written.
        """
        groups = {n: unit_groups(r, units[n].data_path, manifest.dtype) for n, r in records.items()}
        wanted = [shard for shard in manifest.shards if all(number in groups for number in shard.units)]
        plans = []
        for shard in wanted:
            parts = [groups[number].get((shard.split, shard.source)) for number in shard.units]
            found = tuple(part for part in parts if part is not None)
            plans.append(ShardPlan(shard.name, shard.number, shard.split, shard.source, found))
        for old, new in zip(wanted, self._join(plans, manifest.dtype), strict=True):
            if new != old:
                raise DataError(
                    f"{manifest.prefix(new)}.bin came out otherwise than the manifest says; choose another "
                    f"--out, and keep this directory for a comparison"
                )
        if not rejects_intact(manifest):
            digests = {number: record["rejects_sha256"] for number, record in records.items()}
            written = _write_rejects(self.directory, manifest.inputs, units, digests)
            if written != manifest.rejects_sha256:
                raise DataError(f"{self.directory / REJECTS_NAME} came out otherwise than the manifest says")
        self._clean()

    def _join(self, plans: list[ShardPlan], dtype: str) -> list[Shard]:
        return join_all(plans, self.directory, dtype, self.workers, self.report, self.verify)

    def _tokenizer(self, plan: dict[str, Any]) -> TokenizerIdentity:
        tokenizer = from_dict(TokenizerIdentity, plan["tokenizer"])
        if sha256_file(self.directory / tokenizer.stored_as) != tokenizer.sha256:
            raise DataError(
                f"{self.directory / tokenizer.stored_as} is not the tokenizer of {self.directory}/plan.json; "
                f"restore it"
            )
        return tokenizer

    def _clean(self) -> None:
        """Remove what was under way, and what killed runs left."""
        for stale in self.directory.glob(f"*{TEMPORARY_SUFFIX}"):
            stale.unlink(missing_ok=True)
        shutil.rmtree(self.directory / UNITS_NAME, ignore_errors=True)


def _write_rejects(
    directory: Path, inputs: tuple[InputRecord, ...], units: list[Unit], digests: dict[int, str]
) -> str:
    """rejects.jsonl from those of the units, or none; returns its SHA-256, or nothing.

    Lines of a file that was read in parts are counted from its beginning.

    Args:
        digests: what the units' records state of their rejects files.

    Raises:
        DataError: a unit's file is damaged, or this one cannot be written.
    """
    path, digest = directory / REJECTS_NAME, hashlib.sha256()
    sources = [unit for unit in units if digests.get(unit.number)]
    if not sources:
        path.unlink(missing_ok=True)
        return ""
    for unit in sources:
        if file_problem(unit.rejects_path, None, digests[unit.number]):
            raise DataError(
                f"{unit.rejects_path} is missing or damaged; delete {unit.record_path.name} beside it and "
                f"run the same tokenize command again"
            )
    temporary = temporary_path(path)
    try:
        with open(temporary, "wb") as stream:
            for line in _reject_lines(inputs, sources):
                digest.update(line)
                stream.write(line)
            sync(stream)
        publish(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise DataError(f"cannot write {path}: {error.strerror or error}") from error
    return digest.hexdigest()


def _reject_lines(inputs: tuple[InputRecord, ...], units: list[Unit]) -> Iterator[bytes]:
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
