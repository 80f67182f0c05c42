"""What the sections of the configuration are made of: their base class, and values as people write them.

Values are strict (no text for a number), except that a whole number may be written as 2e9, a number as a
whole one, a list stands for a tuple and a layer's number for its text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError


def _whole(value: Any) -> Any:
    """2e9 is how people write two billion tokens; 2.5 stays a float and is then refused."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _number(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**1000:  # a float can be it
        return float(value)
    return value


def _layers(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _text_keys(value: Any) -> Any:
    """In YAML a layer's number alone is not text."""
    return {str(key): item for key, item in value.items()} if isinstance(value, dict) else value


def _file_name(value: Any) -> Any:
    """Refuse what no file system takes, before a run directory is made of it."""
    if isinstance(value, str):
        if any(ord(character) < 32 or ord(character) == 127 for character in value):
            raise PydanticCustomError("control_character", "Input should have no control characters")
        if max(len(part.encode("utf-8", "replace")) for part in value.split("/")) > NAME_MAX:
            raise PydanticCustomError("name_too_long", f"Input should have names of at most {NAME_MAX} bytes")
    return value


def _path(value: Any) -> Any:
    return Path(_file_name(value)) if isinstance(value, str) and value else value


def _betas(value: Any) -> Any:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise ValueError(f"optimizer.betas is {value!r}: it should be two numbers, such as [0.9, 0.98]")
    return tuple(value)


def as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


NAME_MAX = 255
"""Bytes of a file's name, as file systems have it."""

SEED_MAX = 2**64 - 1
"""The largest seed that every generator takes."""

Int = Annotated[int, BeforeValidator(_whole)]
Number = Annotated[float, BeforeValidator(_number)]
Layers = Annotated[str, BeforeValidator(_layers)]
LayerShares = Annotated[dict[str, Number], BeforeValidator(_text_keys)]
Names = Annotated[tuple[str, ...], BeforeValidator(as_tuple)]
FileName = Annotated[str, BeforeValidator(_file_name)]
PathLike = Annotated[Path, BeforeValidator(_path)]
Betas = Annotated[
    tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]], BeforeValidator(_betas)
]


class Section(BaseModel):
    """What all sections share: frozen, strict, no unknown keys, no NaN or infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
