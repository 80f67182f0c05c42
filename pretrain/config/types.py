"""How a configuration key is declared, and the types of values as people write them.

A key is declared once, at the field of its section, with `setting`. The resume, a checkpoint's
identity, the comparison of runs, TensorBoard's HPARAMS page, `show` and docs/configuration.md read
the records, which are all in `keys.KEYS`. Values are strict (no text for a number), except that a
whole number may be written as 2e9, a list stands for a tuple and a layer's number for its text.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from data_pipeline.io.forms import LARGEST
from data_pipeline.io.home import expand_home


def _integer(value: Any) -> Any:
    """Return 2e9 as an integer; 2.5 stays a float and is then refused."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _whole(value: Any) -> Any:
    """Return an integer that numpy and JSON can hold too."""
    number = _integer(value)
    if isinstance(number, int) and abs(number) >= LARGEST:
        raise PydanticCustomError("too_large", "it should be less than 2^53")
    return number


def _layers(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _text_keys(value: Any) -> Any:
    """Return a mapping with text keys: in YAML a layer's number alone is not text."""
    return {str(key): item for key, item in value.items()} if isinstance(value, dict) else value


def _path(value: Any) -> Any:
    if isinstance(value, str) and "\0" in value:
        raise PydanticCustomError("path", "it holds NUL, which no path can")
    return expand_home(value) if isinstance(value, str) and value else value


def _betas(value: Any) -> Any:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise ValueError(
            f"optimizer.betas is {value!r}: it should be two numbers, such as [0.9, 0.98]"
        )
    return tuple(value)


def as_tuple(value: Any) -> Any:
    """Return a list as a tuple, anything else as it is."""
    return tuple(value) if isinstance(value, list) else value


SEED_MAX = 2**64 - 1
"""The largest seed that every generator accepts."""

Int = Annotated[int, BeforeValidator(_whole)]
LargeInt = Annotated[int, BeforeValidator(_integer)]
"""Integer of any size, for seeds and FLOPs."""
Number = float  # pydantic takes whole numbers for it too
Layers = Annotated[str, BeforeValidator(_layers)]
LayerShares = Annotated[dict[str, float], BeforeValidator(_text_keys)]
RateFactors = Annotated[dict[str, Annotated[float, Field(gt=0)]], BeforeValidator(_text_keys)]
DecayFactors = Annotated[dict[str, Annotated[float, Field(ge=0)]], BeforeValidator(_text_keys)]
Names = Annotated[tuple[str, ...], BeforeValidator(as_tuple)]
PathLike = Annotated[Path, BeforeValidator(_path)]
NameOrPath = Annotated[str, AfterValidator(os.path.expanduser)]
Betas = Annotated[
    tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]],
    BeforeValidator(_betas),
]


class Section(BaseModel):
    """A section of the configuration: frozen, strict, no unknown keys, no NaN or infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class OnResume(Enum):
    """Effect of another value on a run that continues from a checkpoint."""

    LAYOUT = "takes effect, equal up to rounding"
    REFUSED = "refused"
    EFFECTIVE = "takes effect"
    NO_EFFECT = "changes no number"


@dataclass(frozen=True)
class Setting:
    """The record of one configuration key.

    Attributes:
        on_resume: Effect of another value on a run that continues from a checkpoint.
        note: Condition or extent of that effect, for the documentation.
        identity: Whether a checkpoint records the value and a resume compares it. False for keys
            that may change freely, and for those that are compared by the content of their files or
            of the frozen bank.
        data_change: Whether `data.allow_change=true` lets a resume take another value.
        method: Whether the key is part of what is trained; runs that differ in it are not seeds of
            one another.
        noted: Whether `compare` reports that runs differ in it. False for keys that name or place
            a run, and for those by which runs are compared.
        shape: Whether the key belongs to the model's shape, which must be equal for losses to be
            comparable.
        hparam: Whether the key is a column of TensorBoard's HPARAMS page.
        label: Whether the key tells runs of one variant apart in the names of their groups.
        excludes: Keys of the same section that cannot be given together with this one.
        trunk: Whether a branch (`schedule.branch_from`) must have the value of its trunk.
        only_records: Whether the key decides only what is logged or stored.
    """

    on_resume: OnResume
    note: str = ""
    identity: bool = False
    data_change: bool = False
    method: bool = False
    noted: bool = True
    shape: bool = False
    hparam: bool = False
    label: bool = False
    excludes: tuple[str, ...] = ()
    trunk: bool = False
    only_records: bool = False

    @property
    def sealed(self) -> bool:
        """Return whether the key decides what weights a run ends with, or how they are judged."""
        takes_effect = self.on_resume is OnResume.EFFECTIVE and not self.only_records
        return self.identity or self.method or takes_effect


def setting(default: Any, description: str, record: Setting, **constraints: Any) -> Any:
    """Declare a configuration key; its type is the field's annotation.

    Args:
        default: `...` for a key that must be given.
        description: Text that `show --meanings` prints.
        record: Treatment of the key.
        constraints: `ge`, `gt`, `le`, `lt`, `pattern`, `min_length`, `max_length` of pydantic's
            `Field`.
    """
    extra = cast(Any, {"setting": record})
    return Field(default, description=description, json_schema_extra=extra, **constraints)


def setting_of(field: FieldInfo) -> Setting:
    """Return the record of a key that was declared with `setting`.

    Raises:
        TypeError: the field was declared without `setting`.
    """
    extra = field.json_schema_extra
    if not isinstance(extra, dict) or "setting" not in extra:
        raise TypeError(
            f"a key of the configuration is not declared with `setting`: {field.description}"
        )
    return cast(Setting, extra["setting"])
