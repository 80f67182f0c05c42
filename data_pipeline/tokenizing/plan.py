"""What a tokenise run is asked for, and how it is cut into units of work.

DIR/plan.json states the options, the tokenizer and the inputs. All that is written follows from it, so a
directory is only ever continued with the plan that it was begun with; how many workers, tasks or
interruptions there are is no part of it.
"""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from data_pipeline.errors import DataError
from data_pipeline.io.files import (
    read_checked_json,
    read_json,
)
from data_pipeline.shards.manifest import (
    FORMAT_VERSION,
    OLD_FORMAT_VERSION,
)
from data_pipeline.sources.discovery import InputFile, Piece, RecordKeys, cut_into_pieces, is_wanted
from data_pipeline.sources.remote import RemoteObject, is_url
from data_pipeline.tokenizer.identity import TokenizerIdentity

PLAN_NAME = "plan.json"
UNITS_NAME = "units"
# Where the inputs were when they were last tokenised: for `verify`, and no part of the result.
LOCATION_NAME = "location.json"


@dataclass(frozen=True)
class TokenizeOptions:
    """What decides the shards, besides the inputs and the tokenizer.

    max_tokens: at most this many, end-of-document ids included; 0 for all. Every input gives a share by its
        size on disk, a sample of its documents by hash.
    sources, exclude_sources: only these, if there are any; and never those.
    range_bytes: a larger plain .jsonl is read in parts of this size.
    shard_bytes: whole units make a shard up to this size, .bin and .idx together.
    allow_lossy: the tokenizer may lose text.
    eod_token: what ends documents; empty: what the tokenizer itself names.
    """

    name: str
    validation_fraction: float = 0.05
    files_per_shard: int = 1
    keys: RecordKeys = field(default_factory=RecordKeys)
    test_fraction: float = 0.0
    max_tokens: int = 0
    sources: tuple[str, ...] = ()
    exclude_sources: tuple[str, ...] = ()
    range_bytes: int = 256 << 20
    shard_bytes: int = 1_000_000_000
    allow_lossy: bool = False
    eod_token: str = ""

    def as_json(self) -> dict[str, Any]:
        """As JSON gives it back."""
        value = asdict(self)
        return value | {key: list(value[key]) for key in ("sources", "exclude_sources")}

    def takes(self, source: str) -> bool:
        """Whether documents of this source are wanted."""
        return is_wanted(source, self.sources, self.exclude_sources)

    def split_of(self, text: bytes) -> str:
        """The split of a document: by its own hash, so that no other document can make it change sides.

        Validation has the low end of the hashes and test the high end, so that neither fraction, when it
        changes, moves a document between those two.
        """
        value = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") / 2**64
        if value < self.validation_fraction:
            return "validation"
        return "test" if value >= 1 - self.test_fraction else "train"

    def check(self) -> None:
        """Raises:
        DataError: an option has an impossible value.
        """
        if not re.fullmatch(r"[A-Za-z0-9._]{1,100}", self.name):
            raise DataError(
                f"--name {self.name!r} may hold letters, digits, dots and underscores only, and 100 at most"
            )
        for option in ("validation_fraction", "test_fraction"):
            if not 0 <= (value := getattr(self, option)) <= 1 or math.isnan(value):
                raise DataError(f"--{option.replace('_', '-')} {value} must be from 0 to 1")
        if self.validation_fraction + self.test_fraction > 1:
            raise DataError("--validation-fraction and --test-fraction are more than 1 together")
        for option, least in (
            ("files_per_shard", 1),
            ("max_tokens", 0),
            ("range_bytes", 1),
            ("shard_bytes", 1),
        ):
            if getattr(self, option) < least:
                name = option.replace("_", "-")
                raise DataError(f"--{name} {getattr(self, option)} must be at least {least}")
        if both := sorted(set(self.sources) & set(self.exclude_sources)):
            raise DataError(f"source {both[0]!r} is given to both --source and --exclude-source")


@dataclass(frozen=True)
class Unit:
    """Pieces of input that are made together, and everything a worker needs to know for it.

    quotas: how many tokens each piece may bring the unit to, if there is a limit.
    """

    number: int
    pieces: tuple[Piece, ...]
    quotas: tuple[int, ...] | None
    directory: Path
    options: TokenizeOptions
    tokenizer: TokenizerIdentity
    strict: bool = False

    @property
    def record_path(self) -> Path:
        """Where the unit's record goes."""
        return self.directory / UNITS_NAME / f"{self.options.name}_{self.number:05d}.json"

    @property
    def data_path(self) -> Path:
        """Where the unit's ids wait for their shards."""
        return self.record_path.with_suffix(".ids")

    @property
    def lock_path(self) -> Path:
        """Whoever makes the unit holds this."""
        return self.record_path.with_suffix(".lock")

    @property
    def rejects_path(self) -> Path:
        """Where the unit's rejects go, if it has any."""
        return self.record_path.with_suffix(".rejects.jsonl")


def plan_units(
    files: list[InputFile],
    directory: Path,
    options: TokenizeOptions,
    tokenizer: TokenizerIdentity,
    strict: bool = False,
) -> list[Unit]:
    """The units: `files_per_shard` files each, and each part of a file that is read in parts."""
    groups: list[list[Piece]] = []
    room = 0
    for file in files:
        pieces = cut_into_pieces(file, options.range_bytes)
        if len(pieces) > 1:
            groups += [[piece] for piece in pieces]
            room = 0
        elif room:
            groups[-1] += pieces
            room -= 1
        else:
            groups.append(pieces)
            room = options.files_per_shard - 1
    units = []
    total, before = sum(file.size for file in files), 0
    for number, group in enumerate(groups):
        quotas: list[int] = []
        for piece in group:
            # Differences of one running sum, so that no token of the limit is lost to rounding.
            first, before = before, before + piece.size
            share = [options.max_tokens * bytes_ // max(1, total) for bytes_ in (first, before)]
            quotas.append(share[1] - share[0])
        limits = tuple(quotas) if options.max_tokens else None
        units.append(Unit(number, tuple(group), limits, directory, options, tokenizer, strict))
    return units


def read_plan(directory: Path, inputs: str | Path | None = None) -> tuple[dict[str, Any], list[Unit]]:
    """(the plan of a directory, its units): for whoever has the directory and perhaps not the inputs.

    Args:
        inputs: the directory or prefix of the inputs, if their paths matter.

    Raises:
        DataError: there is no plan, or it is not one of this version.
    """
    path = directory / PLAN_NAME
    if not path.exists():
        raise DataError(f"{directory} has no {PLAN_NAME}: `python -m data_pipeline tokenize` did not make it")
    plan = read_plan_file(path)
    if plan.get("format_version") != FORMAT_VERSION:
        raise DataError(f"{path} is of another version of this program; tokenise again into a new directory")
    stated = plan["options"]
    lists = {key: tuple(stated[key]) for key in ("sources", "exclude_sources")}
    options = TokenizeOptions(**(stated | lists | {"keys": RecordKeys(**stated["keys"])}))
    root = inputs or directory
    files = [_input_of(entry, root) for entry in plan["inputs"]]
    return plan, plan_units(files, directory, options, TokenizerIdentity(**plan["tokenizer"]))


def _input_of(entry: dict[str, Any], root: str | Path) -> InputFile:
    name, size = entry["name"], entry["size"]
    if is_url(root):
        url = f"{str(root).rstrip('/')}/{name}"
        return InputFile(RemoteObject(url, size, entry.get("version", "")), name, size)
    return InputFile(Path(root) / name, name, size)


def read_plan_file(path: Path) -> dict[str, Any]:
    """A plan. An old one has no checksum, and says so by its version."""
    if read_json(path).get("format_version") == OLD_FORMAT_VERSION:
        raise DataError(
            f"{path.parent} was made by an older version of this program, which can be trained on but not "
            f"continued; choose another --out"
        )
    return read_checked_json(path, "delete it and run the same tokenize command again")
