"""The page docs/configuration.md, from the declarations of the keys.

python -m tests.configuration_page > docs/configuration.md
"""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from pretrain.config.keys import KEYS, SECTIONS
from pretrain.config.types import SEED_MAX, Section, Setting

_INTRODUCTION = """\
# Configuration keys

```
python -m pretrain train demo model.num_layers=6 run.name=deeper    # an override: section.key=value
python -m pretrain show demo --meanings                             # values, origins, meanings
```

A configuration is a YAML file, such as those of `pretrain/configs`, with overrides. If an override
and a key of the file exclude each other, the override wins and the key is unset. The second column
ends with the default; of several words the first is the default. A key without a default is unset,
`null` in YAML.

*At a resume* says what another value does to a run that
[resumes from a checkpoint](operations.md#stop-resume-extend-move). It takes effect from the next
step on, is refused, or changes no number.

`python -m tests.configuration_page > docs/configuration.md` makes this page.
"""
_WORDS = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "text",
    Path: "path",
    dict: "mapping",
    Any: "any",
}
COLUMNS = ("key", "value", "meaning")
_SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def configuration_page() -> str:
    """Return the whole page."""
    return "\n".join([_INTRODUCTION, *(line for name in SECTIONS for line in _section(name))])


def _section(name: str) -> Iterator[str]:
    """Yield a section's lines: what most keys do at a resume stands above the table."""
    section = SECTIONS[name]
    keys = {key: field for key, field in section.model_fields.items() if f"{name}.{key}" in KEYS}
    effects = {key: _at_a_resume(KEYS[f"{name}.{key}"]) for key in keys}
    usual = Counter(effects.values()).most_common(1)[0][0]
    about = (inspect.getdoc(section) or "").partition("\n")[0]
    rest = ", unless the row says otherwise" if len(set(effects.values())) > 1 else ""
    yield from (f"## {name}", "", about, f"At a resume: {usual}{rest}.", "")
    yield from _table(COLUMNS)
    entries = []
    for key, field in keys.items():
        value, meaning = _described(field)
        if effects[key] != usual:
            effect = effects[key].removeprefix(f"{usual}; ")
            meaning += f" *Resume: {effect}.*"
        yield _row(f"`{name}.{key}`", value, meaning)
        entries += [(f"{name}.{key}", kind) for kind in _sections_in(field.annotation)]
    yield ""
    for key, kind in entries:
        yield from (f"An entry of `{key}`:" if key != "telemetry.profile" else f"`{key}`:", "")
        yield from _table(("in it", *COLUMNS[1:]))
        yield from (
            _row(f"`{part}`", *_described(field)) for part, field in kind.model_fields.items()
        )
        yield ""


def _at_a_resume(record: Setting) -> str:
    """Return the effect of another value at a resume, in words."""
    effect = record.on_resume.value
    if record.data_change:
        effect += " unless `data.allow_change` is true"
    if record.note:
        effect += f"; {record.note}"
    return effect


def _table(columns: Sequence[str]) -> tuple[str, str]:
    return _row(*columns), _row(*("---" for _ in columns))


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _described(field: FieldInfo) -> tuple[str, str]:
    """Return value (type, range and default) and meaning of a field."""
    kind, inner = _kind(field.annotation)
    value = f"{kind} {_limits([*field.metadata, *inner])}".strip()
    default = field.default
    if field.is_required():
        value += "; required"
    elif get_origin(field.annotation) is Literal:
        others = [f"`{choice}`" for choice in get_args(field.annotation) if choice != default]
        value = ", ".join([f"`{default}`", *others])
    elif default is not None:
        value += f"; `{default if isinstance(default, (str, Path)) else json.dumps(default)}`"
    return value, field.description or ""


def _kind(annotation: Any) -> tuple[str, list[Any]]:
    """Return the words for a type, and the limits of its values that the type itself carries."""
    origin = get_origin(annotation)
    args = get_args(annotation)
    if origin is Annotated:
        words, inner = _kind(args[0])
        return words, [*inner, *args[1:]]
    if origin is Literal:
        return f"`{'`, `'.join(args)}`", []
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
        f"{sign}{'2^64-1' if bound == SEED_MAX else bound}"
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
