"""All configuration keys with their records, and the changes that a resume lets take effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from pretrain.config.tree import Config
from pretrain.config.types import OnResume, Section, Setting, setting_of

SECTIONS: dict[str, type[Section]] = {
    name: cast("type[Section]", Config.model_fields[name].annotation)
    for name in Config.model_fields
}
KEYS: dict[str, Setting] = {
    f"{name}.{key}": setting_of(field)
    for name, section in SECTIONS.items()
    for key, field in section.model_fields.items()
}
"""{section.key: its record} in the order of the tree. A list of keys is a comprehension over this.
"""
DEFAULTS: dict[str, Any] = {
    f"{name}.{key}": field.get_default(call_default_factory=True)
    for name, section in SECTIONS.items()
    for key, field in section.model_fields.items()
    if not field.is_required()
}
"""{section.key: its default} of the keys that have one."""


@dataclass(frozen=True)
class Change:
    """A key whose new value takes effect."""

    key: str
    was: Any
    value: Any

    def __str__(self) -> str:
        return f"{self.key} is {_text(self.value)}, was {_text(self.was)}"


def effective_changes(
    before: Mapping[str, Any], now: Mapping[str, Mapping[str, Any]]
) -> Iterator[Change]:
    """Yield the keys whose new value takes effect from the next step on.

    Args:
        before: the configuration that the run had, as config.yaml holds it. Keys that are missing
            there, because an older version wrote the file, count as unchanged.
        now: `Config.values` of this run.
    """
    for section, values in now.items():
        had = before.get(section, {})
        for key, value in values.items():
            was = had.get(key, value) if isinstance(had, Mapping) else value
            if was != value and KEYS[f"{section}.{key}"].on_resume is OnResume.EFFECTIVE:
                yield Change(f"{section}.{key}", was, value)


def missing_settings(before: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return what every config.yaml has had from the first version on, and this one has not.

    Sections and keys that may be left out are not asked for, but for the last one: without it the
    file has been cut off.

    Args:
        before: the configuration that a run had, as config.yaml holds it.
    """
    missing = []
    sections = Config.model_fields
    for name, section in SECTIONS.items():
        if name not in before and (sections[name].is_required() or name == "deepspeed"):
            missing.append(name)
        for key, field in section.model_fields.items():
            if name in before and field.is_required() and key not in before[name]:
                missing.append(f"{name}.{key}")
    return missing


def _text(value: Any) -> str:
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
