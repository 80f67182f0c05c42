"""The base class of the sections, and types of values as people write them.

Values are strict (no text for a number), except that a whole number may be written as 2e9, a list stands for
a tuple and a layer's number for its text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _whole(value: Any) -> Any:
    """Return 2e9 as an integer; 2.5 stays a float and is then refused."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _layers(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _text_keys(value: Any) -> Any:
    """Return a mapping with text keys: in YAML a layer's number alone is not text."""
    return {str(key): item for key, item in value.items()} if isinstance(value, dict) else value


def _path(value: Any) -> Any:
    return Path(value) if isinstance(value, str) and value else value


def _betas(value: Any) -> Any:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise ValueError(f"optimizer.betas is {value!r}: it should be two numbers, such as [0.9, 0.98]")
    return tuple(value)


def as_tuple(value: Any) -> Any:
    """Return a list as a tuple, anything else as it is."""
    return tuple(value) if isinstance(value, list) else value


SEED_MAX = 2**64 - 1
"""The largest seed that every generator takes."""

Int = Annotated[int, BeforeValidator(_whole)]
Number = float  # pydantic takes whole numbers for it too
Layers = Annotated[str, BeforeValidator(_layers)]
LayerShares = Annotated[dict[str, float], BeforeValidator(_text_keys)]
RateFactors = Annotated[dict[str, Annotated[float, Field(gt=0)]], BeforeValidator(_text_keys)]
Names = Annotated[tuple[str, ...], BeforeValidator(as_tuple)]
PathLike = Annotated[Path, BeforeValidator(_path)]
Betas = Annotated[
    tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]], BeforeValidator(_betas)
]


class Section(BaseModel):
    """A section of the configuration: frozen, strict, no unknown keys, no NaN or infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
