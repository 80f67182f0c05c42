"""What a tokenise run is asked for, and how it is cut into units of work.

DIR/plan.json states the options, the tokenizer and the inputs. All that is written follows from it, so a
directory is only ever continued with the plan that it was begun with; how many workers, tasks or
interruptions there are is no part of it.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from data_pipeline.errors import DataError
from data_pipeline.files import (
    TEMPORARY_SUFFIX,
    read_checked_json,
    read_json,
    sha256_file,
    to_checked_json,
    write_atomically,
)
from data_pipeline.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    OLD_FORMAT_VERSION,
    TOKENIZER_NAME,
    Manifest,
    read_manifest,
)
from data_pipeline.origin import find_origin
from data_pipeline.sources import InputFile, Piece, RecordKeys, cut_into_pieces, is_wanted
from data_pipeline.survey import PassedOver
from data_pipeline.tokenizer import TokenizerIdentity

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


def begin(
    files: list[InputFile],
    directory: Path,
    options: TokenizeOptions,
    tokenizer: TokenizerIdentity,
    tokenizer_path: Path,
    passed_over: Sequence[PassedOver] = (),
) -> None:
    """Write the plan and the tokenizer's copy, or check that the directory was begun with this very plan.

    Raises:
        DataError: the directory was begun with another plan, or holds other things.
    """
    root = Path(str(files[0].path)[: -len(files[0].name)])
    plan = {
        "format_version": FORMAT_VERSION,
        "options": options.as_json(),
        "tokenizer": asdict(tokenizer),
        "origin": find_origin(root),
        "inputs": [{"name": file.name, "size": file.size} for file in files],
        "passed_over": [asdict(entry) for entry in passed_over],
    }
    path = directory / PLAN_NAME
    if path.exists():
        if differences := _differences(_read(path), plan):
            raise DataError(
                f"{directory} was begun with {differences}; choose another --out or delete the directory"
            )
    elif directory.exists() and not directory.is_dir():
        raise DataError(f"--out {directory} is a file; give a directory")
    elif (directory / MANIFEST_NAME).exists():
        if differences := _differences(_plan_of(read_manifest(directory)), plan):
            raise DataError(
                f"{directory} was made with {differences}; choose another --out or delete the directory"
            )
        write_atomically(path, to_checked_json(_plan_of(read_manifest(directory))))
    elif directory.exists() and not all(_is_ours(entry) for entry in directory.iterdir()):
        raise DataError(f"--out {directory} is not empty and was not made by tokenize; choose another")
    else:
        write_atomically(path, to_checked_json(plan))
    copy = directory / TOKENIZER_NAME
    if not copy.exists() or sha256_file(copy) != tokenizer.sha256:
        write_atomically(copy, tokenizer_path.read_bytes())
    location = to_checked_json({"inputs": str(root)})
    if not (directory / LOCATION_NAME).exists() or (directory / LOCATION_NAME).read_bytes() != location:
        write_atomically(directory / LOCATION_NAME, location)


def _read(path: Path) -> dict[str, Any]:
    """A plan. An old one has no checksum, and says so by its version."""
    if read_json(path).get("format_version") == OLD_FORMAT_VERSION:
        raise DataError(
            f"{path.parent} was made by an older version of this program, which can be trained on but not "
            f"continued; choose another --out"
        )
    return read_checked_json(path, "delete it and run the same tokenize command again")


def _plan_of(manifest: Manifest) -> dict[str, Any]:
    """The plan of a finished directory that has lost it."""
    sizes = {entry.name: entry.size for entry in manifest.inputs}
    return {
        "format_version": manifest.format_version,
        "options": manifest.options,
        "tokenizer": asdict(manifest.tokenizer),
        "origin": manifest.origin,
        "inputs": [{"name": name, "size": size} for name, size in sizes.items()],
        "passed_over": list(manifest.passed_over),
    }


def _is_ours(entry: Path) -> bool:
    # Another task of the same run may be a moment ahead, writing the very same plan.
    return entry.name.endswith(TEMPORARY_SUFFIX) or entry.name in (
        PLAN_NAME,
        TOKENIZER_NAME,
        LOCATION_NAME,
        UNITS_NAME,
    )


def _differences(old: dict[str, Any], new: dict[str, Any]) -> str:
    """What a plan has that the new one has not, in words; empty if they are equal."""
    found = [
        f"{key} {old.get('options', {}).get(key)!r}, not {value!r}"
        for key, value in new["options"].items()
        if old.get("options", {}).get(key) != value
    ]
    found += [
        f"another {key}"
        for key in ("format_version", "tokenizer")
        if _identity(old, key) != _identity(new, key)
    ]
    sizes_old = {entry["name"]: entry["size"] for entry in old.get("inputs", [])}
    sizes_new = {entry["name"]: entry["size"] for entry in new["inputs"]}
    changed = sorted(name for name in sizes_old | sizes_new if sizes_old.get(name) != sizes_new.get(name))
    if changed:
        found.append(f"other inputs ({len(changed)} differ, the first is {changed[0]})")
    return " and ".join(found)


def _identity(plan: dict[str, Any], key: str) -> Any:
    """The tokenizer is what its bytes are, whatever its file is called."""
    value = plan.get(key)
    return value.get("sha256") if isinstance(value, dict) else value


def read_plan(directory: Path, inputs: Path | None = None) -> tuple[dict[str, Any], list[Unit]]:
    """(the plan of a directory, its units): for whoever has the directory and perhaps not the inputs.

    Args:
        inputs: the directory of the inputs, if their paths matter.

    Raises:
        DataError: there is no plan, or it is not one of this version.
    """
    path = directory / PLAN_NAME
    if not path.exists():
        raise DataError(f"{directory} has no {PLAN_NAME}: `python -m data_pipeline tokenize` did not make it")
    plan = _read(path)
    if plan.get("format_version") != FORMAT_VERSION:
        raise DataError(f"{path} is of another version of this program; tokenise again into a new directory")
    stated = plan["options"]
    lists = {key: tuple(stated[key]) for key in ("sources", "exclude_sources")}
    options = TokenizeOptions(**(stated | lists | {"keys": RecordKeys(**stated["keys"])}))
    root = inputs or directory
    files = [InputFile(root / entry["name"], entry["name"], entry["size"]) for entry in plan["inputs"]]
    return plan, plan_units(files, directory, options, TokenizerIdentity(**plan["tokenizer"]))
