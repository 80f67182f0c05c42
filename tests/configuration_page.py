"""The page docs/configuration.md, from the declarations of the keys.

python -m tests.configuration_page > docs/configuration.md
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from pretrain.config.keys import KEYS, SECTIONS
from pretrain.config.types import SEED_MAX, Section

_INTRODUCTION = """\
# Configuration keys

Every key of a configuration: a YAML file, such as those of
`pretrain/configs`, with overrides `section.key=value` on the command line.
`python -m pretrain show CONFIG --meanings` prints the same with the values of a run, and where each
was given. Of two keys that exclude each other, an override unsets the one that the file gives.

The last column says what another value does to a run that goes on from a checkpoint: it takes
effect from the next step on, is refused, or changes no number (see
[operations.md](operations.md#stop-go-on-extend-move)). An unset key is `null` in YAML.

This page is made by `python -m tests.configuration_page > docs/configuration.md`.
"""
_WORDS = {
    bool: "`true` or `false`",
    int: "whole number",
    float: "number",
    str: "text",
    Path: "path",
    dict: "mapping",
    Any: "any",
}
COLUMNS = ("key", "value", "default", "meaning", "at a resume")
_SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def configuration_page() -> str:
    """Return the whole page."""
    return "\n".join([_INTRODUCTION, *(line for name in SECTIONS for line in _section(name))])


def _section(name: str) -> Iterator[str]:
    section = SECTIONS[name]
    yield from (f"## {name}", "", (inspect.getdoc(section) or "").partition("\n")[0], "")
    yield from _table(COLUMNS)
    entries = []
    for key, field in section.model_fields.items():
        record = KEYS[f"{name}.{key}"]
        resume = record.on_resume.value
        if record.data_change:
            resume += " unless `data.allow_change` is true"
        if record.note:
            resume += f"; {record.note}"
        yield _row(f"`{name}.{key}`", *_described(field), resume)
        entries += [(f"{name}.{key}", kind) for kind in _sections_in(field.annotation)]
    yield ""
    for key, kind in entries:
        yield from (f"An entry of `{key}`:" if key != "telemetry.profile" else f"`{key}`:", "")
        yield from _table(("in it", *COLUMNS[1:4]))
        yield from (
            _row(f"`{part}`", *_described(field)) for part, field in kind.model_fields.items()
        )
        yield ""


def _table(columns: Sequence[str]) -> tuple[str, str]:
    return _row(*columns), _row(*("---" for _ in columns))


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _described(field: FieldInfo) -> tuple[str, str, str]:
    """Return value (type and range), default and meaning of a field."""
    kind, inner = _kind(field.annotation)
    limits = _limits([*field.metadata, *inner])
    value, default = field.default, "unset"
    if field.is_required():
        default = "required"
    elif value is not None:
        default = f"`{value if isinstance(value, (str, Path)) else json.dumps(value)}`"
    return f"{kind} {limits}".strip(), default, field.description or ""


def _kind(annotation: Any) -> tuple[str, list[Any]]:
    """Return the words for a type, and the limits of its values that the type itself carries."""
    origin = get_origin(annotation)
    args = get_args(annotation)
    if origin is Annotated:
        words, inner = _kind(args[0])
        return words, [*inner, *args[1:]]
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in args), []
    if origin is tuple and args[-1] is not Ellipsis:
        words, inner = _kind(args[0])
        return f"{len(args)} {words}s", [limit for field in inner for limit in field.metadata]
    if origin is tuple:
        return "list of mappings" if _sections_in(annotation) else "list of texts", []
    if NoneType in args:
        return _kind(next(arg for arg in args if arg is not NoneType))
    if inspect.isclass(origin or annotation) and issubclass(origin or annotation, Section):
        return "mapping", []
    return _WORDS[origin or annotation], []


def _limits(metadata: list[Any]) -> str:
    limits = [
        f"{sign} {'2^64 - 1' if bound == SEED_MAX else bound}"
        for item in metadata
        for name, sign in _SIGNS.items()
        if (bound := getattr(item, name, None)) is not None
    ]
    longest = [
        item.max_length for item in metadata if getattr(item, "max_length", None) is not None
    ]
    return ", ".join(limits + [f"(at most {count})" for count in longest])


def _sections_in(annotation: Any) -> list[type[Section]]:
    """Return the sections that a type is made of."""
    if inspect.isclass(annotation) and not get_args(annotation) and issubclass(annotation, Section):
        return [annotation]
    return [section for part in get_args(annotation) for section in _sections_in(part)]


if __name__ == "__main__":
    print(configuration_page(), end="")
