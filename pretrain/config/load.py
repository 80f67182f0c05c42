"""Getting a configuration: read, parse, then refuse what cannot be. Nothing else in the program makes one.

    config = load_config("demo", ["attention.variant=vanilla", "optimizer.learning_rate=5e-4"])

Paths in it are taken from the working directory. What is refused, and where: `sections` (types and ranges),
`refusals` (combinations), `deepspeed` (DeepSpeed's own keys).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from megatron_patches.errors import MethodError
from pretrain.config.messages import refuse_unknown_keys, validation_sentence
from pretrain.config.refusals import check_tree
from pretrain.config.sources import Draft, apply_overrides, locate, read_yaml
from pretrain.config.tree import Config
from pretrain.errors import UserError


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration, and where each `section.key` was given (`FILE:LINE` or `override`; else a default)."""

    config: Config
    origins: Mapping[str, str]


def load_config(name_or_path: str, overrides: Sequence[str] = ()) -> Config:
    """Read a shipped configuration by name, or a YAML file by path, and apply overrides in order.

    Raises:
        UserError: no such file, unknown keys, wrong types, values that do not go together.
    """
    return load_config_with_origins(name_or_path, overrides).config


def load_config_with_origins(name_or_path: str, overrides: Sequence[str] = ()) -> LoadedConfig:
    """As `load_config`, and with where each value came from.

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
    """A configuration from plain values (section -> key -> value).

    Raises:
        UserError: as `load_config`.
    """
    return config_from_draft(Draft("(given as values)", dict(values)))


def config_from_draft(draft: Draft) -> Config:
    """A configuration from values that remember where they came from.

    Raises:
        UserError: as `load_config`.
    """
    refuse_unknown_keys(draft, Config)
    try:
        config = Config.model_validate(draft.values)
    except ValidationError as error:
        raise UserError(validation_sentence(error, draft)) from None
    try:
        check_tree(config)
    except MethodError as error:
        raise UserError(str(error)) from None
    return config
