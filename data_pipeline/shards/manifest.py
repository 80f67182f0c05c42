"""Manifest of a shard directory: its contents, and the cheap check that they are unchanged.

The manifest is written last: a directory without one is not finished. docs/data-format.md lists the
files of a shard directory.
"""

from __future__ import annotations

import hashlib
import shlex
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

from data_pipeline.errors import DataError
from data_pipeline.io.files import (
    read_checked_json,
    read_json,
    sha256_file,
    to_checked_json,
    utf8,
    write_atomically,
)
from data_pipeline.io.forms import Count, Inside, in_form
from data_pipeline.tokenizer.identity import TokenizerIdentity

FORMAT_VERSION = 3
MANIFEST_NAME = "manifest.json"
REJECTS_NAME = "rejects.jsonl"
SPLITS = ("train", "validation", "test")
Split = Annotated[str, Field(pattern=f"^({'|'.join(SPLITS)})$")]

# Below this size, training also hashes the token files at its start: a fraction of a second.
SMALL_BYTES = 256 << 20


class Encoding(TypedDict, total=False):
    """Documents by {encoding program: documents}, compared ones, and those that lost text."""

    engines: dict[str, Count]
    compared_documents: Count
    lossy_documents: Count


@dataclass(frozen=True)
class InputRecord:
    """Input as it was when it was tokenised.

    Attributes:
        name: Path below the inputs' common directory.
        size: Bytes of the file.
        start: Always 0; earlier versions could read bytes [start, end) of a file.
        end: The same as `size`; the counterpart of `start`.
        sha256: SHA-256 of the bytes read.
        lines: Lines read.
        documents: Documents of all splits and sources.
        rejected: Lines that rejects.jsonl names as left out.
        unusual: Lines that rejects.jsonl names as kept.
        damaged: Sentence on what could not be read.
        version: Version of a data set's shard: fingerprint, or configuration, split and commit.
    """

    name: str
    size: Count
    start: Count
    end: Count
    sha256: str
    lines: Count
    documents: Count
    rejected: Count = 0
    unusual: Count = 0
    damaged: str = ""
    version: str = ""


@dataclass(frozen=True)
class Shard:
    """Pair of .bin and .idx files.

    Attributes:
        name: File name without ending.
        number: Number of the shard within its split and source, from 0.
        split: One of SPLITS.
        source: Name of the source.
        documents: Number of documents.
        tokens: Number of ids, end-of-document ids included.
        text_bytes: Bytes of text, as UTF-8.
        bin_bytes: Size of the .bin file.
        bin_sha256: SHA-256 of the .bin file.
        idx_bytes: Size of the .idx file.
        idx_sha256: SHA-256 of the .idx file.
        units: Units of work whose documents the shard holds, in order.
        unit_documents: Number of documents of each unit.
    """

    name: Inside
    number: Count
    split: Split
    source: str
    documents: Count
    tokens: Count
    text_bytes: Count
    bin_bytes: Count
    bin_sha256: str
    idx_bytes: Count
    idx_sha256: str
    units: tuple[Count, ...] = ()
    unit_documents: tuple[Count, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """Content of manifest.json: a finished shard directory.

    Shards are ordered by split, source and number.
    The keys are explained in docs/data-format.md.
    """

    directory: Path
    format_version: int
    name: str
    tokenizer: TokenizerIdentity
    dtype: Annotated[str, Field(pattern="^(uint16|int32)$")]
    options: dict[str, Any]
    inputs: tuple[InputRecord, ...]
    shards: tuple[Shard, ...]
    rejects: dict[str, Count]
    unusual: dict[str, Count] = field(default_factory=dict)
    excluded_documents: dict[str, Count] = field(default_factory=dict)
    origin: dict[str, Any] | None = None
    passed_over: tuple[dict[str, str], ...] = ()
    rejects_sha256: str = ""
    encoding: Encoding = field(default_factory=Encoding)

    @cached_property
    def fingerprint(self) -> str:
        """Return the SHA-256 over the tokenizer and every shard's identity and content."""
        content = [self.tokenizer.sha256, self.dtype]
        content += [
            f"{s.split} {s.source} {s.number} {s.bin_sha256} {s.idx_sha256}" for s in self.shards
        ]
        return hashlib.sha256(utf8("\n".join(content))).hexdigest()

    def sources(self, split: str) -> list[str]:
        """Return the names of the sources that have documents in this split, sorted."""
        return sorted({shard.source for shard in self.shards_of(split)})

    @property
    def in_parts(self) -> bool:
        """Return whether inputs were read in parts, as earlier versions could."""
        return any(entry.end - entry.start != entry.size for entry in self.inputs)

    @property
    def damaged(self) -> list[str]:
        """Return the inputs that could not be read to their end, each with what was lost."""
        return [f"{entry.name}: {entry.damaged}" for entry in self.inputs if entry.damaged]

    @cached_property
    def _by_source(self) -> dict[tuple[str, str], list[Shard]]:
        shards: dict[tuple[str, str], list[Shard]] = {}
        for shard in self.shards:
            shards.setdefault((shard.split, shard.source), []).append(shard)
        return shards

    def shards_of(self, split: str, source: str | None = None) -> list[Shard]:
        """Return the shards of a split.

        Args:
            split: One of SPLITS.
            source: Source of the shards; None returns all.

        Raises:
            DataError: If there is no such split.
        """
        if split not in SPLITS:
            raise DataError(f"split {split!r} is unknown; known are {', '.join(SPLITS)}")
        if source is not None:
            return self._by_source.get((split, source), [])
        return [shard for shard in self.shards if shard.split == split]

    def tokens(self, split: str, source: str | None = None) -> int:
        """Return the tokens of a split, end-of-document ids included.

        Args:
            split: One of SPLITS.
            source: Source of the tokens; None counts all.
        """
        return sum(shard.tokens for shard in self.shards_of(split, source))

    @property
    def tokenizer_path(self) -> Path:
        """Return the path of the directory's copy of its tokenizer."""
        return self.directory / self.tokenizer.stored_as

    def prefix(self, shard: Shard) -> Path:
        """Return the path of a shard without its ending, as megatron-core's readers want it."""
        return self.directory / shard.name


_MANIFEST = TypeAdapter(Manifest)


def totals(shards: tuple[Shard, ...]) -> dict[str, dict[str, dict[str, int]]]:
    """Add up shards: {split: {source: {documents, tokens, text_bytes}}}."""
    result: dict[str, dict[str, dict[str, int]]] = {}
    for shard in shards:
        counts = result.setdefault(shard.split, {}).setdefault(
            shard.source, {"documents": 0, "tokens": 0, "text_bytes": 0}
        )
        for key in counts:
            counts[key] += getattr(shard, key)
    return {split: dict(sorted(result[split].items())) for split in sorted(result)}


def write_manifest(manifest: Manifest) -> None:
    """Write manifest.json, unless the file has this content already."""
    value = asdict(manifest)
    del value["directory"]
    value["end_of_document"] = (
        f"every document ends with id {manifest.tokenizer.eod_id}; "
        f"no beginning-of-text or padding id is written"
    )
    value["totals"] = totals(manifest.shards)
    value["fingerprint"] = manifest.fingerprint
    write_atomically(manifest.directory / MANIFEST_NAME, to_checked_json(value))


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of a finished shard directory.

    Raises:
        DataError: If the directory or its manifest is missing, unreadable or of another format
            version.
    """
    path = directory / MANIFEST_NAME
    if not directory.is_dir():
        seen_from = "" if directory.is_absolute() else f" (seen from {Path.cwd()})"
        raise DataError(
            f"data directory {directory} does not exist{seen_from}; make it with "
            "`python -m data_pipeline tokenize`"
        )
    if not path.exists():
        raise DataError(
            f"{directory} has no {MANIFEST_NAME}: not a shard directory, or tokenising it has not "
            f"finished; run `python -m data_pipeline tokenize` (again) with this --out"
        )
    value = read_json(path)
    version = value.get("format_version")
    if version != FORMAT_VERSION:
        raise DataError(
            f"{path} has format version {version}, this program reads {FORMAT_VERSION}; "
            f"tokenise again into a new directory"
        )
    manifest = in_form(value | {"directory": directory}, _MANIFEST, path, "tokenise again")
    derived = {"fingerprint": manifest.fingerprint, "totals": totals(manifest.shards)}
    units_agree = all(
        len(shard.units) == len(shard.unit_documents)
        and sum(shard.unit_documents) == shard.documents
        for shard in manifest.shards
    )
    if not units_agree or derived != {key: value.get(key) for key in derived}:
        raise DataError(
            f"{path} contradicts itself: its totals, units or fingerprint do not follow from its "
            f"shards"
        )
    # The checksum comes last: the checks above say more exactly what is wrong.
    read_checked_json(path, "delete it and run the same tokenize command again")
    return manifest


def check_shards(manifest: Manifest) -> None:
    """Check cheaply that a directory matches its manifest, as training does at its start.

    The check compares every file's presence and size, the tokenizer's hash and every .idx hash;
    also the .bin hashes if the token files have less than 256 MiB together.

    Raises:
        DataError: If a file differs; the message names the first.
    """
    for file in expected_files(manifest):
        if problem := file_problem(*file):
            raise DataError(f"{problem}; {verify_advice(manifest.directory)}")


def verify_advice(directory: Path) -> str:
    """Return a clause that says what to do about damage found in passing."""
    command = f"python -m data_pipeline verify {shlex.quote(str(directory))}"
    return f"`{command}` lists all damage and says what to do"


FileState = tuple[Path, int | None, str | None]
"""Path of a file, its size or None, its SHA-256 or None."""


def expected_files(manifest: Manifest, hash_everything: bool = False) -> list[FileState]:
    """Return the state of every file that readers use.

    Args:
        hash_everything: Whether to state all .bin hashes, however large the files are.
    """
    hash_bin = hash_everything or sum(shard.bin_bytes for shard in manifest.shards) < SMALL_BYTES
    files: list[FileState] = [(manifest.tokenizer_path, None, manifest.tokenizer.sha256)]
    for shard in manifest.shards:
        prefix = manifest.prefix(shard)
        files += [
            (Path(f"{prefix}.idx"), shard.idx_bytes, shard.idx_sha256),
            (Path(f"{prefix}.bin"), shard.bin_bytes, shard.bin_sha256 if hash_bin else None),
        ]
    return files


def file_problem(path: Path, size: int | None, digest: str | None) -> str | None:
    """Compare a file with its size and hash.

    Args:
        size: Expected bytes; None compares only the hash.
        digest: Expected SHA-256; None compares only the size.

    Returns:
        Clause that begins with the path and describes the difference; None without one.
    """
    if not path.is_file():
        return f"{path} is missing"
    actual = path.stat().st_size
    if size is not None and actual != size:
        return f"{path} has {actual:,} bytes where the manifest says {size:,}"
    if digest is not None and sha256_file(path) != digest:
        return f"{path} does not have the SHA-256 that the manifest says"
    return None


def rejects_intact(path: Path, digest: str) -> bool:
    """Return whether a file of rejects has this SHA-256; with an empty one, whether none exists."""
    if not digest:
        return not path.exists()
    return path.is_file() and sha256_file(path) == digest
