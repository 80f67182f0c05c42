"""Strict JSON, and validation of what was read from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from data_pipeline.errors import DataError

LARGEST = 1 << 53
"""Bound of counts: numpy and JSON represent every integer up to here exactly."""
Count = Annotated[int, Field(strict=True, ge=0, lt=LARGEST)]
"""A number of steps, samples, tokens or bytes, as it is read from a file."""


def _inside(name: str) -> str:
    if "\0" in name or name.startswith("/") or ".." in name.split("/"):
        raise ValueError("it leads out of the directory")
    return name


Inside = Annotated[str, AfterValidator(_inside)]
"""Path of a file below the directory whose record names it."""

T = TypeVar("T")


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: If the text is not JSON, nests too deeply, or has a key twice, NaN or infinity.
    """
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it nests too deeply") from None


def in_form(value: Any, form: TypeAdapter[T], path: Path, remedy: str) -> T:
    """Validate the content of a JSON file.

    Args:
        form: Type of the content, its numbers and flags strict; other keys are ignored.
        remedy: Clause that says what to do about damage.

    Raises:
        DataError: If the content has another form; the message ends in `remedy`.
    """
    try:
        return form.validate_python(value)
    except ValidationError as error:
        raise DataError(f"{problem(path, error)}; {remedy}") from None


def problem(path: Path, error: ValidationError) -> str:
    """Describe the first difference from a file's form, as a clause."""
    first = error.errors()[0]
    key = repr(".".join(map(str, first["loc"])))
    if first["type"] == "missing":
        return f"{path} has no key {key}: this version did not write it"
    reason = str(first.get("ctx", {}).get("error") or first["msg"].lower())
    return f"{path}: {key}: {reason}" if first["loc"] else f"{path}: {reason}"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in content if keys.count(key) > 1)
        raise ValueError(f"it has the key {twice!r} twice")
    return content


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"it has {word}, which JSON does not know")
