"""Documents -> Megatron shards, in parallel and resumable.

The unit of work is a group of `files_per_shard` input files. One worker does everything for a unit -
decompress, parse, split, encode, write - so ids never travel between processes, and what it writes is a
function of the inputs and the options only: the same bytes for any number of workers and after any number of
interruptions. For every (split, source) of the unit there is one shard; the unit's record, written last,
makes it count. A rerun skips recorded units.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import sentencepiece

from data_pipeline.errors import DataError
from data_pipeline.files import TEMPORARY_SUFFIX, read_json, sha256_file, to_json, write_atomically
from data_pipeline.manifest import (
    FORMAT_VERSION,
    TOKENIZER_NAME,
    InputRecord,
    Manifest,
    Shard,
    from_dict,
    write_manifest,
)
from data_pipeline.pool import Progress, run_tasks
from data_pipeline.shards import ShardWriter, dtype_for, shard_name
from data_pipeline.sources import Document, InputFile, RecordKeys, read_documents
from data_pipeline.tokenizer import TokenizerIdentity, identify, load_tokenizer

PLAN_NAME = "plan.json"
UNITS_NAME = "units"

# Large enough that a batch's overhead vanishes, small enough that the progress moves.
_BATCH_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class TokenizeOptions:
    """What decides the shards, besides the inputs and the tokenizer."""

    name: str
    validation_fraction: float = 0.05
    files_per_shard: int = 1
    keys: RecordKeys = field(default_factory=RecordKeys)


@dataclass(frozen=True)
class Unit:
    """A group of input files, and everything a worker needs to know to make its shards."""

    number: int
    files: tuple[InputFile, ...]
    directory: Path
    options: TokenizeOptions
    tokenizer: TokenizerIdentity

    @property
    def record_path(self) -> Path:
        """Where the unit's record goes."""
        return self.directory / UNITS_NAME / f"{self.options.name}_{self.number:05d}.json"


def split_of(text: bytes, validation_fraction: float) -> str:
    """The split of a document: by its own hash, so that no other document can make it change sides."""
    fraction = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") / 2**64
    return "validation" if fraction < validation_fraction else "train"


def tokenize(
    files: list[InputFile],
    tokenizer_path: Path,
    directory: Path,
    options: TokenizeOptions,
    workers: int,
    report: Callable[[Progress], None],
) -> tuple[Manifest, int]:
    """Make a shard directory, or finish one that the same call began.

    Returns:
        (the manifest, how many units were made now; the others were finished before).

    Raises:
        DataError: bad options, input or tokenizer; the directory was begun with others; a worker failed.
    """
    _check_options(options, workers)
    tokenizer = identify(tokenizer_path)
    _begin(files, directory, options, tokenizer, tokenizer_path)
    groups = [
        files[at : at + options.files_per_shard] for at in range(0, len(files), options.files_per_shard)
    ]
    units = [Unit(number, tuple(group), directory, options, tokenizer) for number, group in enumerate(groups)]
    outcomes = run_tasks(make_unit, units, workers, report)
    records = [record for record, _ in outcomes]
    shards = [from_dict(Shard, shard) for record in records for shard in record["shards"]]
    if not shards:
        raise DataError(f"the {len(files)} inputs hold no text; nothing was written to {directory}")
    manifest = Manifest(
        directory=directory,
        format_version=FORMAT_VERSION,
        name=options.name,
        tokenizer=tokenizer,
        dtype=dtype_for(tokenizer.vocab_size),
        options=asdict(options),
        inputs=tuple(from_dict(InputRecord, entry) for record in records for entry in record["inputs"]),
        shards=tuple(sorted(shards, key=lambda shard: (shard.unit, shard.split, shard.source))),
        empty_documents=sum(record["empty_documents"] for record in records),
    )
    write_manifest(manifest)
    return manifest, sum(made for _, made in outcomes)


def _check_options(options: TokenizeOptions, workers: int) -> None:
    if not re.fullmatch(r"[A-Za-z0-9._]+", options.name):
        raise DataError(f"--name {options.name!r} may hold letters, digits, dots and underscores only")
    if not 0 <= options.validation_fraction < 1:
        raise DataError(f"--validation-fraction {options.validation_fraction} must be at least 0 and below 1")
    if options.files_per_shard < 1:
        raise DataError(f"--files-per-shard {options.files_per_shard} must be at least 1")
    if workers < 1:
        raise DataError(f"--workers {workers} must be at least 1")


def _begin(
    files: list[InputFile],
    directory: Path,
    options: TokenizeOptions,
    tokenizer: TokenizerIdentity,
    tokenizer_path: Path,
) -> None:
    """Write the plan and the tokenizer's copy, or check that the directory was begun with this very plan."""
    plan: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "options": asdict(options),
        "tokenizer": tokenizer.sha256,
        "inputs": [{"name": file.name, "size": file.size} for file in files],
    }
    path = directory / PLAN_NAME
    if path.exists():
        differences = _differences(read_json(path), plan)
        if differences:
            raise DataError(
                f"{directory} was begun with {differences}; choose another --out or delete the directory"
            )
    elif directory.exists() and not directory.is_dir():
        raise DataError(f"--out {directory} is a file; give a directory")
    elif directory.exists() and any(
        not entry.name.endswith(TEMPORARY_SUFFIX) for entry in directory.iterdir()
    ):
        raise DataError(f"--out {directory} is not empty and was not made by tokenize; choose another")
    else:
        write_atomically(path, to_json(plan))
    copy = directory / TOKENIZER_NAME
    if not copy.exists() or sha256_file(copy) != tokenizer.sha256:
        write_atomically(copy, tokenizer_path.read_bytes())


def _differences(old: dict[str, Any], new: dict[str, Any]) -> str:
    """What a plan has that the new one has not, in words; empty if they are equal."""
    found = [
        f"{key} {old.get('options', {}).get(key)!r}, not {value!r}"
        for key, value in new["options"].items()
        if old.get("options", {}).get(key) != value
    ]
    found += [f"another {key}" for key in ("format_version", "tokenizer") if old.get(key) != new[key]]
    sizes_old = {entry["name"]: entry["size"] for entry in old.get("inputs", [])}
    sizes_new = {entry["name"]: entry["size"] for entry in new["inputs"]}
    changed = sorted(name for name in sizes_old | sizes_new if sizes_old.get(name) != sizes_new.get(name))
    if changed:
        found.append(f"other inputs ({len(changed)} differ, the first is {changed[0]})")
    return " and ".join(found)


def make_unit(unit: Unit, report: Callable[[Progress], None]) -> tuple[dict[str, Any], bool]:
    """Make one unit's shards and record, unless they are there.

    Returns:
        (the record, whether it was made now).

    Raises:
        DataError: bad input (names file and line), an input that changed, or a failed write.
    """
    report(Progress(unit.files[0].name))
    known = {
        "unit": unit.number,
        "options": asdict(unit.options),
        "tokenizer": unit.tokenizer.sha256,
        "inputs": [{"name": f.name, "size": f.size, "sha256": sha256_file(f.path)} for f in unit.files],
    }
    if unit.record_path.exists():
        record = read_json(unit.record_path)
        _check_record(unit, record, known)
        if _shards_present(unit, record):
            return record, False
    for stale in unit.directory.glob(f"{unit.options.name}-*_{unit.number:05d}.*{TEMPORARY_SUFFIX}"):
        stale.unlink(missing_ok=True)  # left by a run that was killed
    maker = _UnitMaker(unit, report)
    try:
        for file in unit.files:
            maker.read(file)
        record = known | {"shards": maker.finish(), "empty_documents": maker.empty_documents}
    except OSError as error:
        raise DataError(
            f"cannot write the shards of {unit.files[0].name} to {unit.directory}: {error.strerror or error}"
            f"; finished shards are kept, run the same command again to continue"
        ) from error
    finally:
        maker.discard()
    write_atomically(unit.record_path, to_json(record))
    return record, True


def _check_record(unit: Unit, record: dict[str, Any], known: dict[str, Any]) -> None:
    for file, old, new in zip(unit.files, record.get("inputs", []), known["inputs"], strict=False):
        if old != new:
            raise DataError(
                f"input {file.path} changed after its shards were made; restore it or choose another --out"
            )
    if any(record.get(key) != value for key, value in known.items()):
        raise DataError(f"{unit.record_path} belongs to another run; choose another --out")


def _shards_present(unit: Unit, record: dict[str, Any]) -> bool:
    for shard in record["shards"]:
        for ending in ("bin", "idx"):
            path = unit.directory / f"{shard['name']}.{ending}"
            if not path.is_file() or path.stat().st_size != shard[f"{ending}_bytes"]:
                return False
    return True


class _UnitMaker:
    """Documents of one unit on their way into its shards."""

    def __init__(self, unit: Unit, report: Callable[[Progress], None]) -> None:
        self.empty_documents = 0
        self._unit = unit
        self._report = report
        self._processor: sentencepiece.SentencePieceProcessor = load_tokenizer(
            unit.directory / TOKENIZER_NAME
        )
        self._writers: dict[tuple[str, str], ShardWriter] = {}

    def read(self, file: InputFile) -> None:
        """Encode one input file."""
        self._report(Progress(file.name))
        batch: list[Document] = []
        characters = 0
        for document in read_documents(file, self._unit.options.keys):
            if not document.text:
                self.empty_documents += 1
                continue
            batch.append(document)
            characters += len(document.text)
            if characters >= _BATCH_CHARACTERS:
                self._encode(batch, file)
                batch, characters = [], 0
        if batch:
            self._encode(batch, file)

    def _encode(self, batch: list[Document], file: InputFile) -> None:
        """Encode a batch in this thread alone: the workers are the parallelism."""
        ids = self._processor.encode([d.text for d in batch], return_type="numpy", num_threads=1)
        groups: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
        sizes = []
        for number, document in enumerate(batch):
            text = document.text.encode()
            sizes.append(len(text))
            groups[split_of(text, self._unit.options.validation_fraction), document.source].append(number)
        for (split, source), numbers in groups.items():
            self._writer(split, source).add(
                [ids[number] for number in numbers],
                self._unit.tokenizer.eod_id,
                sum(sizes[number] for number in numbers),
            )
        tokens = sum(len(document) for document in ids) + len(batch)
        self._report(Progress(file.name, documents=len(batch), tokens=tokens, text_bytes=sum(sizes)))

    def _writer(self, split: str, source: str) -> ShardWriter:
        if (split, source) not in self._writers:
            prefix = self._prefix(split, source)
            for (_, other), writer in self._writers.items():
                if writer.prefix == prefix:
                    raise DataError(
                        f"sources {other!r} and {source!r} would share the file name {prefix.name}"
                    )
            self._writers[split, source] = ShardWriter(prefix, dtype_for(self._unit.tokenizer.vocab_size))
        return self._writers[split, source]

    def _prefix(self, split: str, source: str) -> Path:
        return self._unit.directory / shard_name(self._unit.options.name, split, source, self._unit.number)

    def finish(self) -> list[dict[str, Any]]:
        """Publish the unit's shards. Returns them as `manifest.Shard` in JSON."""
        return [
            {"name": writer.prefix.name, "unit": self._unit.number, "split": split, "source": source}
            | writer.finish()
            for (split, source), writer in sorted(self._writers.items())
        ]

    def discard(self) -> None:
        """Remove what was not published."""
        for writer in self._writers.values():
            writer.discard()
