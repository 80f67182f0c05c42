"""Reading configuration text: YAML with line numbers, dotted overrides, errors with the nearest key.

Knows nothing of what the keys mean: the tree of sections is handed in as a pydantic model.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar

import yaml
from pydantic import BaseModel, ValidationError

from pretrain.errors import UserError

KeyPath = tuple[str, ...]
OVERRIDE = "override"
FLOAT = re.compile(r"^[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$")


class _Loader(yaml.SafeLoader):
    """Resolves scalars as YAML 1.2 does; PyYAML's own way is 1.1, where 5e-4 is text and `off` a boolean."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # PyYAML's own way to configure a loader class


_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(~|null|Null|NULL|)$"), None)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(true|True|TRUE|false|False|FALSE)$"), None
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?(0|[1-9][\d_]*)$"), None)
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, None)


class _Dumper(yaml.SafeDumper):
    """Quotes what YAML 1.1 or 1.2 would take for something other than text."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, None)


@dataclass
class Draft:
    """Values read from `source`, not yet validated, and where each came from: `FILE:LINE` or `override`."""

    source: str
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, str] = field(default_factory=dict)


def read_yaml(path: Path, shown_as: str) -> Draft:
    """Read a YAML mapping of sections.

    Raises:
        UserError: the file cannot be read, is not YAML, is not a mapping, or has a key twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"config {shown_as} cannot be read: {error}") from None
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise UserError(f"config {shown_as} is not valid YAML: {_yaml_problem(error)}") from None
    if not isinstance(node, yaml.MappingNode):
        raise UserError(
            f"config {shown_as} must be a mapping of sections, such as `model:` with indented keys below it"
        )
    draft = Draft(shown_as)
    _record_lines(node, (), shown_as, draft.origins)
    draft.values = _construct(text, shown_as)
    return draft


def _construct(text: str, shown_as: str) -> dict[str, Any]:
    try:
        values: dict[str, Any] = yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"config {shown_as} is not valid YAML: {_yaml_problem(error)}") from None
    return values


def _yaml_problem(error: Exception) -> str:
    """PyYAML's problem in one line, with the line number."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or " ".join(str(error).split())
    return f"line {mark.line + 1}: {problem}" if mark is not None else problem


def _record_lines(
    node: yaml.MappingNode, parent: KeyPath, shown_as: str, origins: dict[KeyPath, str]
) -> None:
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise UserError(f"config {shown_as} line {line}: keys must be plain words")
        path = (*parent, str(key_node.value))
        if path in origins:
            raise UserError(
                f"config {shown_as} line {line}: key '{'.'.join(path)}' is given twice; remove one"
            )
        origins[path] = f"{shown_as}:{line}"
        if isinstance(value_node, yaml.MappingNode):
            _record_lines(value_node, path, shown_as, origins)


def dump_yaml(values: Mapping[str, Any]) -> str:
    """YAML that `read_yaml` reads back as the same values, keys in the given order."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


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
        name, equals, text = item.partition("=")
        name = name.strip()
        if not equals or "." not in name or not all(name.split(".")):
            raise UserError(f"override '{item}' is not of the form section.key=value, such as run.seed=7")
        try:
            parsed.append((name, yaml.load(text, Loader=_Loader)))
        except (yaml.YAMLError, ValueError) as error:
            raise UserError(
                f"override '{item}': the value is not valid YAML: {_yaml_problem(error)}"
            ) from None
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
        return (
            isinstance(value, str) and value.isprintable() and bool(yaml.load(value, Loader=_Loader) == value)
        )
    except yaml.YAMLError:
        return False


def refuse_unknown_keys(draft: Draft, tree: type[BaseModel]) -> None:
    """Check names only, so that a typo is reported as such and with its place.

    Raises:
        UserError: a section or key that `tree` does not have, with the nearest that it has.
    """
    sections = {name: info.annotation for name, info in tree.model_fields.items()}
    keys = {name: list(section.model_fields) for name, section in sections.items()}  # type: ignore[union-attr]
    for section, content in draft.values.items():
        if section not in keys:
            raise UserError(
                f"{_where(draft, (section,))}unknown section '{section}'{_nearest(section, keys)}"
            )
        if not isinstance(content, Mapping):
            shown = "nothing" if content is None else repr(content)
            raise UserError(f"{_where(draft, (section,))}section '{section}' must hold keys, but is {shown}")
        for key in content:
            if key not in keys[section]:
                place, hint = _where(draft, (section, str(key))), _nearest_key(section, str(key), keys)
                raise UserError(f"{place}unknown key '{section}.{key}'{hint}")


def _where(draft: Draft, path: KeyPath) -> str:
    """`config demo.yaml line 3: ` or `override: `, for the value at `path` or the nearest thing around it."""
    if any(known[: len(path)] == path and origin == OVERRIDE for known, origin in draft.origins.items()):
        return f"{OVERRIDE}: "
    for length in range(len(path), 0, -1):
        origin = draft.origins.get(path[:length])
        if origin == OVERRIDE:
            return f"{OVERRIDE}: "
        if origin is not None:
            name, _, line = origin.rpartition(":")
            return f"config {name} line {line}: "
    return ""


def _nearest(word: str, known: Iterable[str]) -> str:
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else f"; known: {', '.join(known)}"


def _nearest_key(section: str, key: str, keys: Mapping[str, Sequence[str]]) -> str:
    """The nearest in the same section; else the same word in another section; else the section's keys."""
    if difflib.get_close_matches(key, keys[section], n=1, cutoff=0.6):
        return _nearest(f"{section}.{key}", [f"{section}.{name}" for name in keys[section]])
    elsewhere = [f"{other}.{name}" for other, names in keys.items() for name in names if name == key]
    if elsewhere:
        return f"; did you mean '{elsewhere[0]}'?"
    return f"; known keys of {section}: {', '.join(keys[section])}"


def validation_sentence(error: ValidationError, draft: Draft) -> str:
    """pydantic's first complaint as one sentence that names the key, its value and its place."""
    first = error.errors()[0]
    path = tuple(str(part) for part in first["loc"])
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ValueError):  # raised by our own validators: already a sentence that names its keys
        return f"{_where(draft, path) if path else ''}{cause}"
    key = ".".join(
        path if len(path) > 3 else path[:2]
    )  # of data.blend.0.weight, all; of optimizer.betas.1, not
    if first["type"] == "missing":
        missing = f"section '{key}'" if len(path) == 1 else f"'{key}'"
        return f"config {draft.source}: {missing} is missing and has no default"
    reason = first["msg"][0].lower() + first["msg"][1:]
    return (
        f"{_where(draft, path)}'{key}' is {first['input']!r}: {reason.replace('input should', 'it should')}"
    )


def locate(name_or_path: str) -> tuple[Path, str]:
    """The file of a config and how to call it in messages: a name from `pretrain/configs`, else a path.

    Raises:
        UserError: there is neither.
    """
    shipped = files("pretrain").joinpath("configs")
    names = sorted(entry.name[: -len(".yaml")] for entry in shipped.iterdir() if entry.name.endswith(".yaml"))
    if name_or_path in names:
        return Path(str(shipped.joinpath(f"{name_or_path}.yaml"))), f"{name_or_path}.yaml"
    path = Path(name_or_path)
    if path.is_file():
        return path, name_or_path
    raise UserError(
        f"config '{name_or_path}' is neither a file nor one of the shipped configs: {', '.join(names)}"
    )
