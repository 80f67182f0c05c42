"""Loading of a configuration: read, parse, refuse. Nothing else makes a `Config`.

    config = load_config("demo", ["attention.variant=vanilla", "optimizer.learning_rate=5e-4"])

Relative paths start from the working directory. `sections` judges types and ranges, `refusals`
combinations, `deepspeed` DeepSpeed's own keys; the sentences about wrong names and values are here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from data_pipeline.io.files import utf8
from megatron_patches.errors import MethodError
from pretrain.config.attention import FORMER_PHASES, phases_of_unfreeze
from pretrain.config.keys import KEYS, SECTIONS, by_section
from pretrain.config.refusals import check_tree
from pretrain.config.removed import (
    FORMER_KEYS,
    REMOVED_KEYS,
    removed_sentence,
    without_removed,
)
from pretrain.config.sources import (
    OVERRIDE,
    Draft,
    KeyPath,
    apply_overrides,
    did_you_mean,
    locate,
    read_yaml,
)
from pretrain.config.tree import Config
from pretrain.errors import UserError


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration, and the origin of each of its values.

    Attributes:
        origins: `FILE:LINE` or `override` by `section.key`; a default where it is missing.
    """

    config: Config
    origins: Mapping[str, str]


def load_config(name_or_path: str, overrides: Sequence[str] = ()) -> Config:
    """Read a shipped configuration by name, or a YAML file by path, and apply overrides in order.

    Raises:
        UserError: there is no such file, a key is unknown, a type is wrong, or values contradict
            each other.
    """
    return load_config_with_origins(name_or_path, overrides).config


def load_config_with_origins(name_or_path: str, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Load a configuration as `load_config` does, and keep the origin of each value.

    Raises:
        UserError: as `load_config`.
    """
    draft = read_yaml(*locate(name_or_path))
    apply_overrides(draft, overrides)
    config = config_from_draft(draft)
    return LoadedConfig(
        config, {".".join(path): origin for path, origin in draft.origins.items() if len(path) > 1}
    )


def parse_config(values: Mapping[str, Any]) -> Config:
    """Make a configuration from plain values (section -> key -> value).

    Raises:
        UserError: as `load_config`.
    """
    return config_from_draft(Draft("(given as values)", dict(values)))


def config_from_draft(draft: Draft) -> Config:
    """Make a configuration from values with their origins.

    Raises:
        UserError: as `load_config`.
    """
    _read_unfreeze(draft)
    _read_muon_keys(draft)
    _refuse_removed(draft)
    _refuse_unknown_keys(draft)
    _unset_excluded(draft)
    try:
        config = Config.model_validate(draft.values)
    except ValidationError as error:
        raise UserError(validation_sentence(error, draft)) from None
    except UnicodeEncodeError as error:
        # pydantic cannot hold a sentence with half of a surrogate pair.
        raise UserError(utf8(error.object).decode()) from None
    try:
        check_tree(config)
    except MethodError as error:
        raise UserError(str(error)) from None
    return config


def _read_unfreeze(draft: Draft) -> None:
    """Read attention.unfreeze, a key of earlier versions, as attention.phases.

    Raises:
        UserError: both are given.
    """
    name, _, former = FORMER_PHASES.partition(".")
    section = draft.values.get(name)
    if not isinstance(section, Mapping) or former not in section:
        return
    entries = section[former]
    draft.values[name] = {key: section[key] for key in section if key != former}
    if entries is None:
        return
    if section.get("phases") is not None:
        raise UserError(
            f"{FORMER_PHASES} is the former name of attention.phases, which is given too; leave "
            f"{FORMER_PHASES} out"
        )
    draft.values[name]["phases"] = phases_of_unfreeze(entries)
    for path in [path for path in draft.origins if path[:2] == (name, former)]:
        phases = (name, "phases", *path[2:])
        draft.origins[phases] = draft.origins.pop(path)


def _read_muon_keys(draft: Draft) -> None:
    """Read keys of `optimizer` in a run of an earlier version as those of optimizer.muon.

    Such a run's config.yaml spells out all of them, whatever its kind; nothing else does.

    Raises:
        UserError: some of these keys are given but not all, or an override gives one.
    """
    content = draft.values.get("optimizer")
    if not isinstance(content, Mapping):
        return
    former = [key for key in content if f"optimizer.{key}" in FORMER_KEYS]
    for key in former:
        if len(former) < len(FORMER_KEYS) or ("optimizer", key) in draft.placed:
            raise UserError(
                f"{_where(draft, ('optimizer', key))}optimizer.{key} is now "
                f"{FORMER_KEYS[f'optimizer.{key}']}; give that instead"
            )
        origin = draft.origins.pop(("optimizer", key), None)
        if origin is not None:
            draft.origins.setdefault(("optimizer", "muon", key), origin)
    if former:
        former_values = {key: content[key] for key in former}
        added = content.get("muon", {})
        rest = {key: value for key, value in content.items() if key not in former}
        rest["muon"] = former_values | dict(added) if isinstance(added, Mapping) else added
        draft.values["optimizer"] = rest


def _refuse_removed(draft: Draft) -> None:
    """Refuse removed settings, and leave out those that changed nothing.

    Raises:
        UserError: a key or value was removed.
    """
    for section, content in draft.values.items():
        if not isinstance(content, Mapping):
            continue
        for key, value in content.items():
            sentence = removed_sentence(f"{section}.{key}", value)
            if sentence is not None:
                raise UserError(f"{_where(draft, (section, key))}{sentence}")
        draft.values[section] = {
            key: without_removed(f"{section}.{key}", value)
            for key, value in content.items()
            if f"{section}.{key}" not in REMOVED_KEYS
        }


def _unset_excluded(draft: Draft) -> None:
    """Unset the file's key of two exclusive ones where an override gives the other."""
    for name, key in KEYS.items():
        section, _, key_name = name.partition(".")
        for excluded in key.excludes:
            path, other = (section, key_name), (section, excluded)
            values = draft.values.get(section, {})
            both = values.get(key_name) is not None and values.get(excluded) is not None
            if both and _is_of_the_file(draft, other) and not _is_of_the_file(draft, path):
                draft.values[section] = {**values, excluded: None}
                draft.origins[other] = draft.origins[path]


def _is_of_the_file(draft: Draft, path: KeyPath) -> bool:
    return path in draft.origins and path not in draft.placed


def _refuse_unknown_keys(draft: Draft) -> None:
    """Check the names alone, so that a typo is reported as such, with its place.

    Raises:
        UserError: a section or key does not exist; the text names the nearest that does.
    """
    keys = {name: list(section.model_fields) for name, section in SECTIONS.items()}
    for section, content in by_section(draft.values).items():
        path = tuple(section.split("."))
        if section not in keys:
            raise UserError(
                f"{_where(draft, path)}unknown section '{section}'{_nearest(section, keys)}"
            )
        if not isinstance(content, Mapping):
            shown = "nothing" if content is None else repr(content)
            raise UserError(
                f"{_where(draft, path)}section '{section}' must hold keys, but is {shown}"
            )
        for key in content:
            if key not in keys[section]:
                hint = _nearest_key(section, key, keys)
                location = _where(draft, (*path, key))
                raise UserError(f"{location}unknown key '{section}.{key}'{hint}")


def _where(draft: Draft, path: KeyPath) -> str:
    """Return the place of a value, or of what is around it: `config demo.yaml line 3: `."""
    inside = [origin for other, origin in draft.origins.items() if other[: len(path)] == path]
    if OVERRIDE in inside:
        return f"{OVERRIDE}: "
    for length in range(len(path), 0, -1):
        origin = draft.origins.get(path[:length])
        if origin == OVERRIDE:
            return f"{OVERRIDE}: "
        if origin is not None:
            name, _, line = origin.rpartition(":")
            return f"config {name} line {line}: "
    return ""


def _nearest(word: str, known_words: Iterable[str]) -> str:
    known_words = list(known_words)
    return did_you_mean(word, known_words) or f"; known: {', '.join(known_words)}"


def _nearest_key(section: str, key: str, keys: Mapping[str, Sequence[str]]) -> str:
    """Return the nearest key of the section, or the same word in another section, or all keys."""
    if did_you_mean(key, keys[section], cutoff=0.6):
        return _nearest(f"{section}.{key}", [f"{section}.{name}" for name in keys[section]])
    elsewhere = [
        f"{other}.{name}" for other, names in keys.items() for name in names if name == key
    ]
    if elsewhere:
        return f"; did you mean '{elsewhere[0]}'?"
    return f"; known keys of {section}: {', '.join(keys[section])}"


_PLAINLY = {
    "string_pattern_mismatch": "it should be one word without / or \\ or invisible characters, and "
    "not begin with a dot",
    "tuple_type": "it should be a list, such as [a, b]",
    "dict_type": "it should be a mapping, such as {key: value}",
    "extra_forbidden": "there is no such key",
    "model_type": "it should be a mapping, such as {key: value}",
    "string_type": "it should be text; put what looks like a number in quotes, such as '\"001\"'",
}
"""{pydantic's type of error: the same in the words of a configuration file}."""


def validation_sentence(error: ValidationError, draft: Draft) -> str:
    """Return pydantic's first complaint as one sentence with the key, its value and its place."""
    # An unknown key says more than the key that is missing in its place.
    errors = error.errors()
    first = next(
        (complaint for complaint in errors if complaint["type"] == "extra_forbidden"), errors[0]
    )
    path = tuple(str(part) for part in first["loc"])
    cause = first.get("ctx", {}).get("error")
    # Raised by our own validators: already a sentence that names its keys.
    if isinstance(cause, ValueError):
        return f"{_where(draft, path) if path else ''}{cause}"
    # All of data.blend.0.weight, but not of optimizer.betas.1.
    name = path[:3] if ".".join(path[:2]) in SECTIONS else path[:2]
    key = ".".join(path if len(path) > 3 else name)
    if first["type"] == "missing":
        missing = f"section '{key}'" if len(path) == 1 else f"'{key}'"
        location = _where(draft, path[:2]) if len(path) > 2 else f"config {draft.source}: "
        return f"{location}{missing} is missing and has no default"
    reason = first["msg"][0].lower() + first["msg"][1:]
    reason = _PLAINLY.get(first["type"], reason.replace("input should", "it should"))
    return f"{_where(draft, path)}'{key}' is {first['input']!r}: {reason}"
