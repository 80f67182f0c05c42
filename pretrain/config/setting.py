"""The declaration of a configuration key: meaning and range, and how the rest of the program treats the key.

A key is declared once, at the field of its section, with `setting`. The resume, a checkpoint's identity, the
comparison of runs, TensorBoard's HPARAMS page, `show` and docs/configuration.md read the records, which are
all in `keys.KEYS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

from pydantic import Field
from pydantic.fields import FieldInfo


class OnResume(Enum):
    """The effect of another value on a run that goes on from a checkpoint."""

    LAYOUT = "takes effect, the same training up to rounding"
    REFUSED = "refused"
    EFFECTIVE = "takes effect"
    NO_EFFECT = "no effect on the numbers"


@dataclass(frozen=True)
class Setting:
    """The record of one configuration key.

    Attributes:
        on_resume: effect of another value on a run that goes on from a checkpoint.
        note: condition or extent of that effect, for the documentation.
        identity: a checkpoint records the value, and a resume compares it. False for keys that are free to
            change, and for those that are compared by what their files or the frozen bank hold.
        data_change: `data.allow_change=true` lets a resume take another value.
        method: part of what is trained; runs that differ in it are not seeds of one another.
        noted: `compare` reports that runs differ in it. False for keys that name or place a run, and for
            those by which runs are compared.
        hparam: a column of TensorBoard's HPARAMS page.
        label: tells runs of one variant apart in the names of their groups.
        excludes: the keys of the same section that cannot be given together with this one.
        trunk: a branch (`schedule.branch_from`) must have the value of its trunk.
    """

    on_resume: OnResume
    note: str = ""
    identity: bool = False
    data_change: bool = False
    method: bool = False
    noted: bool = True
    hparam: bool = False
    label: bool = False
    excludes: tuple[str, ...] = ()
    trunk: bool = False


def setting(default: Any, description: str, record: Setting, **constraints: Any) -> Any:
    """Declare a configuration key; its type is the field's annotation.

    `default`: `...` for a key that must be given. `constraints`: `ge`, `gt`, `le`, `lt`, `pattern`,
    `min_length`, `max_length` of pydantic's `Field`.
    """
    extra = cast(Any, {"setting": record})
    return Field(default, description=description, json_schema_extra=extra, **constraints)


def setting_of(field: FieldInfo) -> Setting:
    """Return the record of a key that was declared with `setting`.

    Raises TypeError: the field was declared without.
    """
    extra = field.json_schema_extra
    if not isinstance(extra, dict) or "setting" not in extra:
        raise TypeError(f"a key of the configuration is not declared with `setting`: {field.description}")
    return cast(Setting, extra["setting"])
