"""Reading configuration text: a YAML file with line numbers, dotted overrides.

Knows nothing of what the keys mean; what is said of wrong ones is in `sentences`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from pretrain.config.yaml_values import (
    MAX_CHARACTERS,
    MAX_DEPTH,
    YamlProblem,
    compose_yaml,
    construct_yaml,
    parse_yaml,
)
from pretrain.errors import UserError

KeyPath = tuple[str, ...]
OVERRIDE = "override"
MAX_BYTES = 2**18
"""Of a configuration file; the largest that come with the program are a hundredth of it."""


@dataclass
class Draft:
    """Values read from `source`, not yet validated, and where each came from: `FILE:LINE` or `override`."""

    source: str
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, str] = field(default_factory=dict)


def read_yaml(path: Path, shown_as: str) -> Draft:
    """Read a YAML mapping of sections.

    Raises:
        UserError: the file cannot be read or is too large, is not YAML, is not a mapping, has a key twice, or
            a key that is not text.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        text = content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"config {shown_as} cannot be read: {error}") from None
    if len(content) > MAX_BYTES:
        raise UserError(f"config {shown_as} is larger than {MAX_BYTES:,} bytes; it cannot be a configuration")
    try:
        node = compose_yaml(text)
        if not isinstance(node, yaml.MappingNode):
            raise UserError(
                f"config {shown_as} must be a mapping of sections, "
                "such as `model:` with indented keys below it"
            )
        draft = Draft(shown_as)
        _record_lines(node, (), shown_as, draft.origins)
        draft.values = construct_yaml(node)
    except YamlProblem as problem:
        raise UserError(f"config {shown_as} {problem}") from None
    return draft


def not_text(key: object) -> str:
    """What is said of the name of a section or key that YAML reads as a number, a truth value or nothing."""
    return f"the key '{shorten(str(key))}' is not text; sections and keys are words, such as model"


def _record_lines(
    node: yaml.MappingNode, parent: KeyPath, shown_as: str, origins: dict[KeyPath, str]
) -> None:
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise UserError(f"config {shown_as} line {line}: keys must be plain words")
        path = (*parent, str(key_node.value))
        if len(path) <= 2 and not key_node.tag.endswith(":str"):
            raise UserError(f"config {shown_as} line {line}: {not_text(key_node.value)}")
        if path in origins:
            raise UserError(
                f"config {shown_as} line {line}: key '{'.'.join(path)}' is given twice; remove one"
            )
        origins[path] = f"{shown_as}:{line}"
        if isinstance(value_node, yaml.MappingNode):
            _record_lines(value_node, path, shown_as, origins)


def apply_overrides(draft: Draft, overrides: Sequence[str]) -> None:
    """Set `section.key=value` items, in order, the value parsed as YAML.

    Raises:
        UserError: an item is not of that form.
    """
    for name, value in parse_overrides(overrides):
        place_value(draft, tuple(name.split(".")), value, OVERRIDE)


def parse_overrides(overrides: Sequence[str]) -> list[tuple[str, Any]]:
    """`section.key=value` items as (key, value), the value parsed as YAML.

    Raises:
        UserError: an item is not of that form.
    """
    parsed = []
    for item in overrides:
        shown = shorten(printable(item))
        if not _is_utf8(item):
            raise UserError(f"override '{shown}' is not UTF-8 text; write it in plain characters")
        name, equals, text = item.partition("=")
        name = name.strip()
        if not equals or "." not in name or not all(name.split(".")):
            raise UserError(f"override '{shown}' is not of the form section.key=value, such as run.seed=7")
        if len(name) > MAX_CHARACTERS:
            raise UserError(f"override '{shown}' has a key of more than {MAX_CHARACTERS:,} characters")
        if name.count(".") >= MAX_DEPTH:
            raise UserError(f"override '{shown}' nests deeper than {MAX_DEPTH} levels; shorten its key")
        try:
            parsed.append((name, parse_yaml(text)))
        except YamlProblem as problem:
            raise UserError(f"override '{shown}': the value {problem}") from None
    return parsed


def place_value(draft: Draft, path: KeyPath, value: Any, origin: str) -> None:
    """Set one value, sections made as needed, whatever was there before."""
    place = draft.values
    for part in path[:-1]:
        inner = place.get(part)
        place[part] = inner = dict(inner) if isinstance(inner, Mapping) else {}
        place = inner
    place[path[-1]] = value
    draft.origins[path] = origin


def override_text(key: str, value: Any) -> str:
    """`key=value` that `apply_overrides` reads back as the same value; a word stays bare."""
    return f"{key}={value if _is_plain_word(value) else json.dumps(value, ensure_ascii=False)}"


def _is_plain_word(value: Any) -> bool:
    try:
        return isinstance(value, str) and value.isprintable() and bool(parse_yaml(value) == value)
    except YamlProblem:
        return False


def printable(text: str) -> str:
    r"""The text on one line and as UTF-8: `\n` for a line break, `\udcff` for a byte that was not UTF-8."""
    one_line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return one_line.encode("utf-8", "backslashreplace").decode("utf-8")


def _is_utf8(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def shorten(text: str, longest: int = 400) -> str:
    """The text, its middle left out if it is long: a sentence must stay one that can be read."""
    return text if len(text) <= longest else f"{text[: longest - 100]} ... {text[-90:]}"


def is_file(path: Path) -> bool:
    """Whether there is such a file; False too for a name that no file can have or that we may not look at."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def locate(name_or_path: str) -> tuple[Path, str]:
    """The file of a config and how to call it in messages: a name from `pretrain/configs`, else a path.

    Raises:
        UserError: there is neither.
    """
    shipped = files("pretrain").joinpath("configs")
    names = sorted(entry.name[: -len(".yaml")] for entry in shipped.iterdir() if entry.name.endswith(".yaml"))
    if name_or_path in names:
        return Path(str(shipped.joinpath(f"{name_or_path}.yaml"))), f"{name_or_path}.yaml"
    shown = printable(name_or_path)
    if is_file(Path(name_or_path)):
        return Path(name_or_path), shown
    raise UserError(
        f"config '{shorten(shown)}' is neither a file nor one of the shipped configs: {', '.join(names)}"
    )
