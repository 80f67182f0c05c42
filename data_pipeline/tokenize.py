"""Documents -> Megatron shards, in parallel and resumable.

The work is cut into units (see `plan`); each is made by one worker (see `unit`) and counts when its record is
there. A rerun skips recorded units. One machine does all units and then puts the records together into the
manifest; task i of n does the units whose number is i modulo n, in the same directory or in one of its own
that is copied there later, and `merge_manifests` puts the records together when all tasks are done.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.errors import DataError
from data_pipeline.files import TEMPORARY_SUFFIX, read_json, sha256_file, write_atomically
from data_pipeline.manifest import (
    FORMAT_VERSION,
    REJECTS_NAME,
    TOKENIZER_NAME,
    InputRecord,
    Manifest,
    Shard,
    file_problem,
    from_dict,
    write_manifest,
)
from data_pipeline.plan import UNITS_NAME, TokenizeOptions, begin, plan_units, read_plan
from data_pipeline.pool import Progress, run_tasks
from data_pipeline.shards import dtype_for
from data_pipeline.sources import InputFile
from data_pipeline.tokenizer import TokenizerIdentity, check_report, identify
from data_pipeline.unit import UnitWorker

_Records = list[dict[str, Any]]


@dataclass(frozen=True)
class Task:
    """Task `index` (from 0) of `count`."""

    index: int
    count: int

    def check(self) -> None:
        """Raises:
        DataError: not one of `count` tasks.
        """
        if self.count < 1:
            raise DataError(f"--num-tasks {self.count} must be at least 1")
        if not 0 <= self.index < self.count:
            raise DataError(
                f"--task {self.index} must be from 0 to {self.count - 1} where --num-tasks is {self.count}"
            )


def tokenize(
    files: list[InputFile],
    tokenizer_path: Path,
    directory: Path,
    options: TokenizeOptions,
    workers: int,
    report: Callable[[Progress], None],
    strict: bool = False,
) -> tuple[Manifest, int]:
    """Make a shard directory, or finish one that the same call began.

    Returns:
        (the manifest, how many units were made now; the others were finished before).

    Raises:
        DataError: bad options, input or tokenizer; the directory was begun with others; a worker failed.
    """
    records, made = make_task(files, tokenizer_path, directory, options, workers, report, Task(0, 1), strict)
    return _put_together(directory, records), made


def make_task(
    files: list[InputFile],
    tokenizer_path: Path,
    directory: Path,
    options: TokenizeOptions,
    workers: int,
    report: Callable[[Progress], None],
    task: Task,
    strict: bool = False,
) -> tuple[_Records, int]:
    """Make the units of one task; there is no manifest yet.

    Returns:
        (the records of the task's units, how many were made now).

    Raises:
        DataError: as `tokenize`.
    """
    task.check()
    options.check()
    if workers < 1:
        raise DataError(f"--workers {workers} must be at least 1")
    tokenizer = identify(tokenizer_path)
    check_report(tokenizer_path, tokenizer)
    begin(files, directory, options, tokenizer, tokenizer_path)
    units = plan_units(files, directory, options, tokenizer, strict)[task.index :: task.count]
    outcomes = run_tasks(UnitWorker(), units, workers, report)
    return [record for record, _ in outcomes], sum(made for _, made in outcomes)


def merge_manifests(directory: Path) -> Manifest:
    """The manifest of a directory in which all tasks are done.

    Raises:
        DataError: a unit is missing, or the records belong to different runs.
    """
    plan, units = read_plan(directory)
    paths = [unit.record_path for unit in units]
    if missing := [path for path in paths if not path.is_file()]:
        raise DataError(
            f"{directory}: {len(missing)} of {len(units)} units are missing, the first is {missing[0].name}; "
            f"run the tasks that have not finished, or copy their files here"
        )
    records = [read_json(path) for path in paths]
    for path, record in zip(paths, records, strict=True):
        if record.get("options") != plan["options"] or record.get("tokenizer") != plan["tokenizer"]["sha256"]:
            raise DataError(f"{path} belongs to another run than {directory}/plan.json")
    for shard in (shard for record in records for shard in record["shards"]):
        for ending in ("bin", "idx"):
            problem = file_problem(directory / f"{shard['name']}.{ending}", shard[f"{ending}_bytes"], None)
            if problem:
                raise DataError(f"{problem}; run the tokenize command again, or copy the file here")
    return _put_together(directory, records)


def _put_together(directory: Path, records: _Records) -> Manifest:
    """Write rejects.jsonl and the manifest, and remove what killed runs left."""
    plan, _ = read_plan(directory)
    tokenizer = from_dict(TokenizerIdentity, plan["tokenizer"])
    if sha256_file(directory / TOKENIZER_NAME) != tokenizer.sha256:
        raise DataError(
            f"{directory / TOKENIZER_NAME} is not the tokenizer of {directory}/plan.json; restore it"
        )
    shards = [from_dict(Shard, shard) for record in records for shard in record["shards"]]
    rejects = _sum(records, "rejects")
    if not shards:
        counts = rejects | {f"of source {name}": n for name, n in _sum(records, "excluded_documents").items()}
        why = ", ".join(f"{count:,} {reason}" for reason, count in counts.items()) or "no lines"
        raise DataError(
            f"the {len(plan['inputs'])} inputs hold no usable text ({why}); check --text-key and --source"
        )
    manifest = Manifest(
        directory=directory,
        format_version=FORMAT_VERSION,
        name=plan["options"]["name"],
        tokenizer=tokenizer,
        dtype=dtype_for(tokenizer.vocab_size),
        options=plan["options"],
        inputs=tuple(from_dict(InputRecord, entry) for record in records for entry in record["inputs"]),
        shards=tuple(sorted(shards, key=lambda shard: (shard.unit, shard.split, shard.source))),
        rejects=rejects,
        unusual=_sum(records, "unusual"),
        excluded_documents=_sum(records, "excluded_documents"),
        origin=plan["origin"],
    )
    _write_rejects(manifest, records)
    for place in (directory, directory / UNITS_NAME):
        for stale in place.glob(f"*{TEMPORARY_SUFFIX}"):
            stale.unlink(missing_ok=True)
    write_manifest(manifest)
    return manifest


def _sum(records: _Records, key: str) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for record in records:
        counts.update(record[key])
    return dict(sorted(counts.items()))


def _write_rejects(manifest: Manifest, records: _Records) -> None:
    """rejects.jsonl, or none; lines of a file that was read in parts are counted from its beginning."""
    path = manifest.directory / REJECTS_NAME
    content = b"".join(_reject_lines(manifest, records))
    if not content:
        path.unlink(missing_ok=True)
    elif not path.exists() or path.read_bytes() != content:
        write_atomically(path, content)


def _reject_lines(manifest: Manifest, records: _Records) -> Iterator[bytes]:
    before: dict[tuple[str, int], int] = {}
    lines = 0
    for entry in manifest.inputs:
        lines = 0 if entry.start == 0 else lines
        before[entry.name, entry.start] = lines
        lines += entry.lines
    for record in records:
        if record["rejects"] or record["unusual"]:
            path = manifest.directory / UNITS_NAME / f"{manifest.name}_{record['unit']:05d}.rejects.jsonl"
            for line in path.read_bytes().splitlines():
                entry = json.loads(line)
                entry["line"] += before[entry["file"], entry.pop("start")]
                yield json.dumps(entry, ensure_ascii=False).encode() + b"\n"
