"""All configuration keys with their records, and the changes that take effect at a resume."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from pretrain.config.attention import FORMER_PHASES, phases_of_unfreeze
from pretrain.config.removed import (
    PHASES,
    present_key,
    removed_sentence,
    without_removed,
)
from pretrain.config.tree import Config
from pretrain.config.types import OnResume, Section, Setting, setting_of


def _sections(parent: type[Section], prefix: str = "") -> Iterator[tuple[str, type[Section]]]:
    """Yield the sections of a section by name, each before its own inner sections."""
    for key, field in parent.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield f"{prefix}{key}", field.annotation
            yield from _sections(field.annotation, f"{prefix}{key}.")


SECTIONS: dict[str, type[Section]] = dict(_sections(Config))
"""{name: section} in the order of the tree; an inner section is named like `optimizer.muon`."""
FIELDS: dict[str, FieldInfo] = {
    f"{name}.{key}": field
    for name, section in SECTIONS.items()
    for key, field in section.model_fields.items()
    if f"{name}.{key}" not in SECTIONS
}
"""{section.key: its declaration}"""
KEYS: dict[str, Setting] = {name: setting_of(field) for name, field in FIELDS.items()}
"""{section.key: its record} in the order of the tree. A list of keys is a comprehension over this.
"""
DEFAULTS: dict[str, Any] = {
    name: field.get_default(call_default_factory=True)
    for name, field in FIELDS.items()
    if not field.is_required()
}
"""{section.key: default} of the keys that have a default."""


def by_section(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return {name as in SECTIONS: its keys} of a configuration's plain values.

    Keys of an earlier version get their present names.
    """
    flat: dict[str, Any] = {}
    for name, keys in content.items():
        if not isinstance(keys, Mapping):
            flat[name] = keys
            continue
        flat.setdefault(name, {})
        for key, value in keys.items():
            path = present_key(f"{name}.{key}")
            if path in SECTIONS:
                flat[path] = flat.get(path, {}) | value if isinstance(value, Mapping) else value
            else:
                section, _, last = path.rpartition(".")
                flat.setdefault(section, {})[last] = value
    return flat


@dataclass(frozen=True)
class Change:
    """A key whose new value takes effect."""

    key: str
    was: Any
    value: Any

    def __str__(self) -> str:
        return f"{self.key} is {_text(self.value)}, was {_text(self.was)}"


def effective_changes(
    saved: Mapping[str, Any], now: Mapping[str, Mapping[str, Any]]
) -> Iterator[Change]:
    """Yield the keys whose new value takes effect from the next step on.

    Args:
        saved: The run's configuration as config.yaml holds it. Keys that are missing, because an
            older version wrote the file, count as unchanged.
        now: `Config.values` of this run.
    """
    earlier = by_section(saved)
    for section, values in by_section(now).items():
        had = earlier.get(section, {})
        for key, value in values.items():
            was = had.get(key, value) if isinstance(had, Mapping) else value
            if was != value and KEYS[f"{section}.{key}"].on_resume is OnResume.EFFECTIVE:
                yield Change(f"{section}.{key}", was, value)


def missing_settings(saved: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return what every config.yaml has had from the first version on, and this one lacks.

    Sections and keys that may be left out are not asked for, except for the last section: without
    it the file has been cut off.
    """
    missing = []
    sections = Config.model_fields
    for name in sections:
        if name not in saved and (sections[name].is_required() or name == "deepspeed"):
            missing.append(name)
        for key, field in SECTIONS[name].model_fields.items():
            if name in saved and field.is_required() and key not in saved[name]:
                missing.append(f"{name}.{key}")
    return missing


def type_problem(key: str, value: Any) -> str | None:
    """Return why a saved setting cannot have its value; None if it can, or was removed since.

    Args:
        key: the setting's name, or one that it had in an earlier version.
    """
    if key == FORMER_PHASES:
        return type_problem(PHASES, phases_of_unfreeze(value))
    field = FIELDS.get(present_key(key))
    if field is None or value is None or removed_sentence(key, value) is not None:
        return None
    try:
        form: TypeAdapter[Any] = TypeAdapter(field.rebuild_annotation())
        form.validate_python(without_removed(key, value), strict=True)
    except ValidationError as error:
        return error.errors()[0]["msg"].lower()
    return None


def _text(value: Any) -> str:
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
