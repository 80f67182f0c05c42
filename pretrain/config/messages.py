"""What is said of a wrong key or value: which, where it was given, and the nearest that there is."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence

from pydantic import BaseModel, ValidationError

from pretrain.config.sources import OVERRIDE, Draft, KeyPath, not_text, shorten
from pretrain.errors import UserError


def refuse_unknown_keys(draft: Draft, tree: type[BaseModel]) -> None:
    """Check names only, so that a typo is reported as such and with its place.

    Raises:
        UserError: a section or key that `tree` does not have, with the nearest that it has.
    """
    sections = {name: info.annotation for name, info in tree.model_fields.items()}
    keys = {name: list(section.model_fields) for name, section in sections.items()}  # type: ignore[union-attr]
    for section, content in draft.values.items():
        if not isinstance(section, str):
            raise UserError(f"{_where(draft, (str(section),))}{not_text(section)}")
        if section not in keys:
            raise UserError(
                f"{_where(draft, (section,))}unknown section '{section}'{_nearest(section, keys)}"
            )
        if not isinstance(content, Mapping):
            shown = "nothing" if content is None else shorten(repr(content))
            raise UserError(f"{_where(draft, (section,))}section '{section}' must hold keys, but is {shown}")
        for key in content:
            if not isinstance(key, str):
                raise UserError(f"{_where(draft, (section, str(key)))}{not_text(key)}")
            if key not in keys[section]:
                place, hint = _where(draft, (section, key)), _nearest_key(section, key, keys)
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
    # All of data.blend.0.weight, but not of optimizer.betas.1.
    key = ".".join(path if len(path) > 3 else path[:2])
    if first["type"] == "missing":
        missing = f"section '{key}'" if len(path) == 1 else f"'{key}'"
        return f"config {draft.source}: {missing} is missing and has no default"
    reason = first["msg"][0].lower() + first["msg"][1:]
    reason = reason.replace("input should", "it should")
    return f"{_where(draft, path)}'{key}' is {shorten(repr(first['input']))}: {reason}"
