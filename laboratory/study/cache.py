"""Results on disk: a result that was made of the same things is not made again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from data_pipeline.io.files import read_regular, write_json
from data_pipeline.io.forms import parse_json
from pretrain.errors import UserError

Result = TypeVar("Result")


def read_result(
    path: Path, identity: Mapping[str, Any], form: TypeAdapter[Result]
) -> Result | None:
    """Return a result; None if it is missing, damaged or of another identity.

    Args:
        path: File of the result: {"identity": what it was made of, …}.
        identity: Everything that the result has to be made of.
    """
    try:
        content = parse_json(read_regular(path))
        result = form.validate_python(content, strict=True)
        return result if content.get("identity") == identity else None
    except (OSError, ValueError):
        return None


def read_or_make(
    path: Path,
    identity: Mapping[str, Any],
    form: TypeAdapter[Result],
    make: Callable[[], Mapping[str, Any]],
) -> tuple[Result, bool]:
    """Return a result, and whether it was on disk.

    Args:
        path: File of the result.
        identity: Everything that the result has to be made of.
        make: Function that makes the result where it is not there.

    Raises:
        UserError: the file cannot be written.
    """
    if (kept := read_result(path, identity, form)) is not None:
        return kept, True
    content = make()
    try:
        write_json(path, {"identity": identity, **content})
    except OSError as error:
        raise UserError(f"--out: {path} cannot be written: {error.strerror or error}") from error
    # Read again, so that a new result equals a kept one in every type.
    written = read_result(path, identity, form)
    assert written is not None, f"{path}: what was written is not what was asked for"
    return written, False


def content_digest(content: Any) -> str:
    """Return the SHA-256 of anything that JSON can hold."""
    return hashlib.sha256(json.dumps(content, ensure_ascii=False).encode()).hexdigest()
