"""Plan of a tokenise run: its options, inputs and units of work, and the file that states them.

DIR/plan.json states the options, the tokenizer and the inputs. Everything written follows from the
plan, so a directory is only continued with the plan that it was begun with. The numbers of workers,
tasks and interruptions are not part of the plan.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, StrictBool, StrictFloat, TypeAdapter
from typing_extensions import NotRequired, TypedDict

from data_pipeline.errors import DataError
from data_pipeline.io.files import (
    TEMPORARY_SUFFIX,
    as_json,
    read_checked_json,
    read_json,
    to_checked_json,
    write_atomically,
)
from data_pipeline.io.forms import LARGEST, Count, in_form
from data_pipeline.shards.manifest import FORMAT_VERSION, MANIFEST_NAME
from data_pipeline.sources.data_sets import is_data_set
from data_pipeline.sources.discovery import InputFile, Inputs, RecordKeys, find_inputs, is_wanted
from data_pipeline.sources.hub import find_origin
from data_pipeline.tokenizer.identity import STORED_NAMES, TokenizerIdentity

PLAN_NAME = "plan.json"
UNITS_NAME = "units"
# Location of the inputs when they were last tokenised: for `verify`, not part of the result.
LOCATION_NAME = "location.json"
_OURS = (PLAN_NAME, LOCATION_NAME, UNITS_NAME, *STORED_NAMES)
_REMEDY = "restore it, or delete {} and run the same tokenize command again"
# Removed options that format 3 still states, with the only values that are still accepted.
_RETIRED = {"max_tokens": 0, "range_bytes": 256 << 20}


@dataclass(frozen=True)
class TokenizeOptions:
    """Options that determine the shards, besides the inputs and the tokenizer.

    Args:
        name: First part of the names of the shards.
        validation_fraction: Share of the documents to hold out.
        files_per_shard: Input files in a unit of work.
        keys: Keys of text and source in a record.
        test_fraction: Share of the documents to hold out for a final test.
        max_tokens: Always 0; earlier versions could sample.
        sources: Sources to use; empty means all.
        exclude_sources: Sources not to use.
        range_bytes: Always 256 MiB; earlier versions could read a large file in parts.
        shard_bytes: Largest size of a shard's two files together.
        allow_lossy: Whether the tokenizer may lose text.
        eod_token: Token that ends documents; empty takes the one that the tokenizer names.

    Raises:
        DataError: If an option is impossible.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: str
    validation_fraction: StrictFloat = 0.05
    files_per_shard: Count = 1
    keys: RecordKeys = field(default_factory=RecordKeys)
    test_fraction: StrictFloat = 0.0
    max_tokens: Count = 0
    sources: tuple[str, ...] = ()
    exclude_sources: tuple[str, ...] = ()
    range_bytes: Count = 256 << 20
    shard_bytes: Count = 1_000_000_000
    allow_lossy: StrictBool = False
    eod_token: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9._]{1,100}", self.name):
            raise DataError(
                f"--name {self.name!r} may hold letters, digits, dots and underscores only, and "
                f"100 at most"
            )
        if not self.keys.default_source:
            raise DataError("--default-source is empty; give the name that such documents get")
        try:
            self.keys.default_source.encode()
        except UnicodeEncodeError:
            source = self.keys.default_source
            raise DataError(f"--default-source {source!r} is not valid UTF-8") from None
        for option in ("validation_fraction", "test_fraction"):
            if not 0 <= (value := getattr(self, option)) <= 1 or math.isnan(value):
                raise DataError(f"--{option.replace('_', '-')} {value} must be from 0 to 1")
        if self.validation_fraction + self.test_fraction > 1:
            raise DataError("--validation-fraction and --test-fraction are more than 1 together")
        for option in ("files_per_shard", "shard_bytes"):
            if not 1 <= getattr(self, option) < LARGEST:
                name = option.replace("_", "-")
                raise DataError(
                    f"--{name} {getattr(self, option)} must be at least 1 and below {LARGEST}"
                )
        for option, value in _RETIRED.items():
            if getattr(self, option) != value:
                raise DataError(
                    f"{option} {getattr(self, option)} is of an earlier version of this program; "
                    f"tokenise again into a new directory"
                )
        if contradictory := sorted(set(self.sources) & set(self.exclude_sources)):
            raise DataError(
                f"source {contradictory[0]!r} is given to both --source and --exclude-source"
            )

    def takes(self, source: str) -> bool:
        """Return whether documents of this source are wanted."""
        return is_wanted(source, self.sources, self.exclude_sources)

    def split_of(self, text: bytes) -> str:
        """Return the split of a document (UTF-8), which depends on its own hash only.

        Validation takes the low end of the hashes and test the high end, so that a change of either
        fraction moves no document between those two.
        """
        value = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") / 2**64
        if value < self.validation_fraction:
            return "validation"
        return "test" if value >= 1 - self.test_fraction else "train"


class _Input(TypedDict):
    name: str
    size: Count
    version: NotRequired[str]


class _Plan(TypedDict):
    """Content of plan.json; `options_of` judges the options."""

    options: dict[str, Any]
    tokenizer: TokenizerIdentity
    origin: dict[str, str] | None
    inputs: Annotated[list[_Input], Field(min_length=1)]
    passed_over: list[dict[str, str]]


_OPTIONS = TypeAdapter(TokenizeOptions)
_PLAN = TypeAdapter(_Plan)


@dataclass(frozen=True)
class Task:
    """Share of the work that one job does: task `index` (from 0) of `count`.

    Raises:
        DataError: If there is no such task.
    """

    index: int
    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise DataError(f"--num-tasks {self.count} must be at least 1")
        if not 0 <= self.index < self.count:
            raise DataError(
                f"--task {self.index} must be from 0 to {self.count - 1} where --num-tasks is "
                f"{self.count}"
            )


@dataclass(frozen=True)
class Unit:
    """Unit of work: input files, with everything that a worker needs to tokenise them."""

    number: int
    files: tuple[InputFile, ...]
    directory: Path
    options: TokenizeOptions
    tokenizer: TokenizerIdentity
    strict: bool = False

    @property
    def record_path(self) -> Path:
        """Return the path of the unit's record, beside which its other files lie."""
        return self.directory / UNITS_NAME / f"{self.options.name}_{self.number:05d}.json"

    @property
    def data_path(self) -> Path:
        """Return the path of the unit's ids, which wait there for the shards."""
        return self.record_path.with_suffix(".ids")

    @property
    def rejects_path(self) -> Path:
        """Return the path of the unit's rejects, if it has any."""
        return self.record_path.with_suffix(".rejects.jsonl")


def plan_units(
    files: list[InputFile],
    directory: Path,
    options: TokenizeOptions,
    tokenizer: TokenizerIdentity,
    strict: bool = False,
) -> list[Unit]:
    """Group the inputs into units of `files_per_shard` files each.

    Args:
        files: Inputs, sorted by name.
        strict: Whether a rejected line stops the run.
    """
    size = options.files_per_shard
    return [
        Unit(
            number=start // size,
            files=tuple(files[start : start + size]),
            directory=directory,
            options=options,
            tokenizer=tokenizer,
            strict=strict,
        )
        for start in range(0, len(files), size)
    ]


def begin(
    directory: Path,
    inputs: Inputs,
    options: TokenizeOptions,
    model: Path,
    tokenizer: TokenizerIdentity,
) -> None:
    """Write the plan and a copy of the tokenizer.

    Args:
        model: File of the tokenizer.
        tokenizer: Identity of the tokenizer.

    Raises:
        DataError: If the directory was begun with another plan, or holds something else.
    """
    data_set = inputs.data_set
    plan = {
        "format_version": FORMAT_VERSION,
        "options": as_json(options),
        "tokenizer": asdict(tokenizer),
        "origin": find_origin(Path(inputs.root)) if data_set is None else data_set.origin,
        # Only a data set has a version.
        "inputs": [
            {"name": file.name, "size": file.size}
            | ({"version": file.version} if file.version else {})
            for file in inputs.files
        ],
        "passed_over": [asdict(entry) for entry in inputs.passed_over],
    }
    path = directory / PLAN_NAME
    if path.exists():
        if differences := _differences(_read_plan_file(path), plan):
            raise DataError(
                f"{directory} was begun with {differences}; choose another --out or delete the "
                f"directory"
            )
    elif directory.exists() and not directory.is_dir():
        raise DataError(f"--out {directory} is a file; give a directory")
    elif (directory / MANIFEST_NAME).exists():
        raise DataError(f"{path} is missing; {_REMEDY.format(directory)}")
    # Another task of the same run may be writing the very same plan at this moment.
    elif directory.exists() and not all(
        entry.name in _OURS or entry.name.endswith(TEMPORARY_SUFFIX)
        for entry in directory.iterdir()
    ):
        raise DataError(
            f"--out {directory} is not empty and was not made by tokenize; choose another"
        )
    else:
        write_atomically(path, to_checked_json(plan))
    if (directory / MANIFEST_NAME).exists() and not os.access(directory, os.W_OK):
        return  # finished, and read-only
    write_atomically(directory / tokenizer.stored_as, model.read_bytes())
    write_atomically(directory / LOCATION_NAME, to_checked_json({"inputs": inputs.root}))


def at_planned_revision(inputs: list[str], directory: Path) -> list[str]:
    """Give a data set of the hub the commit that the directory was begun with.

    So tasks of one run read one commit, although the branch has moved meanwhile.
    """
    path = directory / PLAN_NAME
    origin = _read_plan_file(path)["origin"] if path.is_file() else None
    if origin is None or not origin["repository"]:
        return inputs
    pinned = f"{origin['source']}@{origin['revision']}"
    return [
        pinned if entry == origin["source"] and is_data_set(entry) else entry for entry in inputs
    ]


def _differences(old: _Plan, new: dict[str, Any]) -> str:
    """Describe the differences between a plan and the new one; empty if they are equal."""
    differences = [
        f"{key} {old['options'].get(key)!r}, not {value!r}"
        for key, value in new["options"].items()
        if old["options"].get(key) != value
    ]
    # Only the bytes of the tokenizer count, not the name of its file.
    was = old["tokenizer"]
    if was.sha256 != new["tokenizer"]["sha256"]:
        differences.append("another tokenizer")
    elif was.eod_id != (eod_id := new["tokenizer"]["eod_id"]):
        differences.append(f"documents that end with id {was.eod_id}, not {eod_id}")
    old_inputs = {entry["name"]: entry for entry in old["inputs"]}
    new_inputs = {entry["name"]: entry for entry in new["inputs"]}
    changed = sorted(
        name for name in old_inputs | new_inputs if old_inputs.get(name) != new_inputs.get(name)
    )
    if changed and old["origin"] != new["origin"]:
        differences.append(f"inputs of {_named(old['origin'])}, not of {_named(new['origin'])}")
    elif changed:
        differences.append(f"other inputs ({len(changed)} differ, the first is {changed[0]})")
    return " and ".join(differences)


def _named(origin: dict[str, str] | None) -> str:
    return f"{origin['source']} at {origin['revision']}" if origin else "files without an origin"


def read_plan(directory: Path, inputs: str | Path | None = None) -> tuple[_Plan, list[Unit]]:
    """Read the plan of a directory, and make its units.

    Args:
        inputs: Directory of the inputs, or their data set, if they are to be read.

    Returns:
        Content of plan.json, and the units.

    Raises:
        DataError: If there is no plan, or it is damaged or of another version.
    """
    path = directory / PLAN_NAME
    if not path.exists():
        raise DataError(
            f"{directory} has no {PLAN_NAME}: `python -m data_pipeline tokenize` did not make it"
        )
    plan = _read_plan_file(path)
    options = options_of(plan["options"], path)
    root = inputs or directory
    if inputs and is_data_set(inputs):
        files = find_inputs([inputs], options.keys).files
    else:
        files = [
            InputFile(Path(root, entry["name"]), entry["name"], entry["size"])
            for entry in plan["inputs"]
        ]
    return plan, plan_units(files, directory, options, plan["tokenizer"])


def options_of(stated: dict[str, Any], path: Path) -> TokenizeOptions:
    """Return the options that a plan or a manifest states.

    Args:
        stated: Entry `options` of the file.
        path: Path of the file.

    Raises:
        DataError: If the options are of another version, or impossible.
    """
    return in_form(stated, _OPTIONS, path, _REMEDY.format(path.parent))


def _read_plan_file(path: Path) -> _Plan:
    """Read a plan file and check its version and checksum."""
    remedy = _REMEDY.format(path.parent)
    if read_json(path, remedy).get("format_version") != FORMAT_VERSION:  # old ones have no checksum
        raise DataError(
            f"{path} is of another version of this program; tokenise again into a new directory"
        )
    return in_form(read_checked_json(path, remedy), _PLAN, path, remedy)
