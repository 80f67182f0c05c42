"""Whether model.initial_weights goes with the configuration."""

from __future__ import annotations

from pretrain.config.tree import Config
from pretrain.errors import UserError


def check_initial_weights(config: Config) -> None:
    """Refuse a file whose model is not the one that is described.

    Raises:
        UserError: names the first key that differs.
        MethodError: the file cannot be read.
    """
    given = config.given_weights
    if given is None:
        return
    described = config.resolved()["model"]
    for key, value in given.model.items():
        if key == "max_positions":
            if config.data.sequence_length > value:
                raise UserError(
                    f"data.sequence_length={config.data.sequence_length} but the model in {given.path} has "
                    f"{value} learned positions; set data.sequence_length={value} or less"
                )
        elif described[key] != value:
            raise UserError(
                f"model.{key}={described[key]} but the model in {given.path} has {value}; "
                f"set model.{key}={value}"
            )
