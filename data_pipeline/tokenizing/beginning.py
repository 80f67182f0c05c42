"""The beginning of a run: its plan is written, or the directory was begun with this very plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data_pipeline.errors import DataError
from data_pipeline.io.files import TEMPORARY_SUFFIX, sha256_file, to_checked_json, write_atomically
from data_pipeline.shards.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    Manifest,
    read_manifest,
)
from data_pipeline.sources.discovery import InputFile
from data_pipeline.sources.origin import find_origin
from data_pipeline.sources.remote import is_url
from data_pipeline.sources.survey import PassedOver
from data_pipeline.tokenizer.identity import STORED_NAMES, TokenizerIdentity
from data_pipeline.tokenizing.plan import (
    LOCATION_NAME,
    PLAN_NAME,
    UNITS_NAME,
    TokenizeOptions,
    read_plan_file,
)


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
    root = str(files[0].path)[: -len(files[0].name)]
    plan = {
        "format_version": FORMAT_VERSION,
        "options": options.as_json(),
        "tokenizer": asdict(tokenizer),
        "origin": {"source": root, "repository": "", "revision": ""}
        if is_url(root)
        else find_origin(Path(root)),
        "inputs": [_stated(file.name, file.size, file.version) for file in files],
        "passed_over": [asdict(entry) for entry in passed_over],
    }
    path = directory / PLAN_NAME
    if path.exists():
        if differences := _differences(read_plan_file(path), plan):
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
    copy = directory / tokenizer.stored_as
    if not copy.exists() or sha256_file(copy) != tokenizer.sha256:
        write_atomically(copy, tokenizer_path.read_bytes())
    location = to_checked_json({"inputs": root if is_url(root) else str(Path(root))})
    if not (directory / LOCATION_NAME).exists() or (directory / LOCATION_NAME).read_bytes() != location:
        write_atomically(directory / LOCATION_NAME, location)


def _plan_of(manifest: Manifest) -> dict[str, Any]:
    """The plan of a finished directory that has lost it."""
    inputs = {entry.name: _stated(entry.name, entry.size, entry.version) for entry in manifest.inputs}
    return {
        "format_version": manifest.format_version,
        "options": manifest.options,
        "tokenizer": asdict(manifest.tokenizer),
        "origin": manifest.origin,
        "inputs": list(inputs.values()),
        "passed_over": list(manifest.passed_over),
    }


def _stated(name: str, size: int, version: str) -> dict[str, Any]:
    """An input as a plan has it; only what is no file has a version."""
    return {"name": name, "size": size} | ({"version": version} if version else {})


def _is_ours(entry: Path) -> bool:
    # Another task of the same run may be a moment ahead, writing the very same plan.
    return entry.name.endswith(TEMPORARY_SUFFIX) or entry.name in (
        PLAN_NAME,
        *STORED_NAMES,
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
    before = {entry["name"]: entry for entry in old.get("inputs", [])}
    now = {entry["name"]: entry for entry in new["inputs"]}
    changed = sorted(name for name in before | now if before.get(name) != now.get(name))
    if changed:
        found.append(f"other inputs ({len(changed)} differ, the first is {changed[0]})")
    return " and ".join(found)


def _identity(plan: dict[str, Any], key: str) -> Any:
    """The tokenizer is what its bytes are, whatever its file is called."""
    value = plan.get(key)
    return value.get("sha256") if isinstance(value, dict) else value
