"""Text of configurations: YAML with line numbers, dotted overrides, origins of values.

YAML is read as version 1.2 resolves plain values; PyYAML itself follows 1.1, where 5e-4 is text and
`off` a boolean. This module knows nothing of the keys' meanings; `load` does.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import yaml

from data_pipeline.io.files import open_regular
from data_pipeline.io.home import expand_home
from pretrain.errors import UserError
from pretrain.runs.facts import LARGEST_YAML, YAML_ERRORS

KeyPath = tuple[str, ...]
OVERRIDE = "override"
_MOST_VALUES = 100_000

_NOT_IN_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff\ud800-\udfff]")
FLOAT = re.compile(
    r"^[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$"
)


class YamlProblem(ValueError):
    """Text that is not the YAML that is wanted; the message completes `the value ...`."""


def _is_plain(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.style is None


class _Loader(yaml.SafeLoader):
    """Loader that resolves scalars as YAML 1.2 does."""

    # PyYAML configures a loader class by this attribute.
    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """Refuse a key that is given twice, and `{key:value}`, which is a key without a value.

        Raises:
            ConstructorError: a key is given twice, or holds the value.
        """
        seen_keys: set[str] = set()
        for key, value in node.value:
            problem = None
            if str(key.value) in seen_keys:
                problem = f"key '{key.value}' is given twice; remove one"
            elif _is_plain(key) and ":" in key.value and _is_plain(value) and not value.value:
                problem = f"'{key.value}' is a key without a value; write a space after its colon"
            if problem is not None:
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen_keys.add(str(key.value))
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(~|null|Null|NULL|)$"), None)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(true|True|TRUE|false|False|FALSE)$"), None
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?(0|[1-9][\d_]*)$"), None)
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, None)


class _Dumper(yaml.SafeDumper):
    """Dumper that quotes text which YAML 1.1 or 1.2 would take for something else."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = '"' if _NOT_IN_YAML.search(text) else None  # else NEL would be read back as a blank
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, None)


@dataclass
class Draft:
    """Values that are not validated yet, and the origin of each.

    Attributes:
        source: Name of the file.
        origins: `FILE:LINE` or `override` of each value.
        placed: Paths of the values that are not from the file.
    """

    source: str
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, str] = field(default_factory=dict)
    placed: set[KeyPath] = field(default_factory=set)


def parse_yaml(text: str) -> Any:
    """Return the value of the one document in `text`; None for an empty text.

    Raises:
        YamlProblem: not YAML.
    """
    node = _compose(text)
    return None if node is None else _construct(node)


def dump_yaml(values: Mapping[str, Any]) -> str:
    """Write YAML that `parse_yaml` reads back as the same values, keys in the given order."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def read_yaml(path: Path, shown_as: str, kind: str = "config") -> Draft:
    """Read a YAML mapping.

    Args:
        shown_as: Name of the file in messages.
        kind: What the file is, for messages.

    Raises:
        UserError: the file cannot be read, is not YAML or not a mapping, holds a key twice, or a
            key that is not text.
    """
    try:
        with open_regular(path) as file:
            content = file.read(LARGEST_YAML + 1)
        if len(content) > LARGEST_YAML:
            raise UserError(
                f"{kind} {shown_as} is longer than {LARGEST_YAML:,} bytes; a file of settings has "
                "a few thousand: give that file"
            )
        text = content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{kind} {shown_as} cannot be read: {reason}") from None
    try:
        node = _compose(text)
        if not isinstance(node, yaml.MappingNode):
            raise YamlProblem(
                "must be a mapping of sections, such as `model:` with indented keys below it"
                if kind == "config"
                else "must be a mapping, one `key: value` on a line"
            )
        draft = Draft(shown_as)
        _record_lines(node, (), shown_as, draft.origins)
        draft.values = _construct(node)
    except YamlProblem as problem:
        raise UserError(f"{kind} {shown_as} {problem}") from None
    return draft


def _compose(text: str) -> yaml.Node | None:
    """Return the node of the one document in `text`, with line numbers; None for an empty text."""
    try:
        node = yaml.compose(text, Loader=_Loader)
        values = _values(node, {})
    except YAML_ERRORS as error:
        raise YamlProblem(f"is not valid YAML: {_problem(error)}") from None
    if values > _MOST_VALUES:
        raise YamlProblem("repeats itself by aliases without end; write out what they stand for")
    return node


def _values(node: yaml.Node | None, counts: dict[int, float]) -> float:
    """Return the number of values in a node, with its aliases written out.

    Aliases can turn a few lines into billions of values, or into an endless one.
    """
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) not in counts:
        # A node that contains itself has no end.
        counts[id(node)] = math.inf
        parts = (
            chain.from_iterable(node.value) if isinstance(node, yaml.MappingNode) else node.value
        )
        counts[id(node)] = 1 + sum(_values(part, counts) for part in parts)
    return counts[id(node)]


def _construct(node: yaml.Node) -> Any:
    try:
        return _Loader("").construct_document(node)
    except YAML_ERRORS as error:
        raise YamlProblem(f"is not valid YAML: {_problem(error)}") from None


def _problem(error: Exception) -> str:
    """Return PyYAML's problem in one line, with the line number."""
    if isinstance(error, AttributeError):
        return "what is written after !!timestamp is not a date"
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or " ".join(str(error).split())
    return f"line {mark.line + 1}: {problem}" if mark is not None else problem


def _record_lines(
    node: yaml.MappingNode, parent: KeyPath, shown_as: str, origins: dict[KeyPath, str]
) -> None:
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise YamlProblem(f"line {line}: keys must be plain words")
        path = (*parent, str(key_node.value))
        if len(path) <= 2 and not key_node.tag.endswith(":str"):
            raise YamlProblem(
                f"line {line}: the key '{key_node.value}' is not text; sections and keys are "
                "words, such as model"
            )
        if path in origins:
            raise YamlProblem(f"line {line}: key '{'.'.join(path)}' is given twice; remove one")
        origins[path] = f"{shown_as}:{line}"
        if isinstance(value_node, yaml.MappingNode):
            _record_lines(value_node, path, shown_as, origins)


def apply_overrides(draft: Draft, overrides: Sequence[str]) -> None:
    """Set `section.key=value` items in order, each value parsed as YAML.

    Raises:
        UserError: an item has another form.
    """
    for name, value in parse_overrides(overrides):
        place_value(draft, tuple(name.split(".")), value, OVERRIDE)


def parse_overrides(overrides: Sequence[str]) -> list[tuple[str, Any]]:
    """Return `section.key=value` items as (key, value), each value parsed as YAML.

    Raises:
        UserError: an item has another form.
    """
    parsed = []
    for item in overrides:
        name, equals, text = item.partition("=")
        name = name.strip()
        if not equals or "." not in name or not all(name.split(".")):
            raise UserError(
                f"override '{item}' is not of the form section.key=value, such as run.seed=7"
            )
        try:
            parsed.append((name, parse_yaml(text)))
        except YamlProblem as problem:
            raise UserError(f"override '{item}': the value {problem}") from None
    return parsed


def place_value(draft: Draft, path: KeyPath, value: Any, origin: str) -> None:
    """Set a value and create its sections as needed, whatever was there before.

    Args:
        path: Section and key.
        value: Plain value.
        origin: As in `Draft.origins`.
    """
    section = draft.values
    for part in path[:-1]:
        inner = section.get(part)
        section[part] = inner = dict(inner) if isinstance(inner, Mapping) else {}
        section = inner
    section[path[-1]] = value
    for replaced in [other for other in draft.origins if other[: len(path)] == path]:
        del draft.origins[replaced]
    draft.origins[path] = origin
    inside = value if isinstance(value, Mapping) else {}
    draft.origins |= {(*path, str(key)): origin for key in inside}
    draft.placed.add(path)


def override_text(key: str, value: Any) -> str:
    """Return `key=value` that `apply_overrides` reads back as the same value; a word stays bare."""
    quoted = _NOT_IN_YAML.sub(
        lambda match: f"\\u{ord(match[0]):04x}", json.dumps(value, ensure_ascii=False)
    )
    return f"{key}={value if _is_plain_word(value) else quoted}"


def _is_plain_word(value: Any) -> bool:
    try:
        return isinstance(value, str) and value.isprintable() and bool(parse_yaml(value) == value)
    except YamlProblem:
        return False


def is_file(path: Path) -> bool:
    """Return whether the file exists; False too for a name that no file can have."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def shipped_files(package: str, pattern: str) -> dict[str, Path]:
    """Return {name without ending: path} of a package's files that match, sorted by path."""
    return {path.stem: path for path in sorted(Path(str(files(package))).glob(pattern))}


def did_you_mean(word: str, known_words: Iterable[str], cutoff: float = 0.5) -> str:
    """Return `; did you mean '…'?` for the nearest known word, or "" where none is near.

    Args:
        cutoff: Least similarity, 0 to 1.
    """
    close = difflib.get_close_matches(word, list(known_words), n=1, cutoff=cutoff)
    return f"; did you mean '{close[0]}'?" if close else ""


def locate(
    name_or_path: str,
    kind: str = "config",
    package: str = "pretrain.configs",
    pattern: str = "*.yaml",
) -> tuple[Path, str]:
    """Return a YAML file and its name in messages.

    Args:
        name_or_path: Name of one of the shipped files, or else a path.
        kind: What the file is, for the message.
        package: Package that ships files of the kind.
        pattern: Pattern of these files' paths below the package.

    Raises:
        UserError: There is neither.
    """
    shipped = shipped_files(package, pattern)
    if name_or_path in shipped:
        return shipped[name_or_path], f"{name_or_path}.yaml"
    if is_file(path := expand_home(name_or_path)):
        return path, name_or_path
    raise UserError(
        f"{kind} '{name_or_path}' is neither a file nor one of the shipped {kind}s: "
        f"{', '.join(shipped)}"
    )
