"""The optional packages of this floor: one sentence where they are missing, and none of their chatter."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version

from pretrain.errors import UserError

PACKAGES = ("transformers", "tokenizers", "safetensors")


def require_transformers(verb: str) -> None:
    """Import transformers, quietly.

    Raises:
        UserError: it is not installed.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        from transformers.utils import logging
    except ImportError as error:
        raise UserError(
            f"{verb} needs the package transformers ({error}): pip install 'ora-pretrain[export]'"
        ) from error
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def versions() -> dict[str, str | None]:
    """Of PACKAGES; None for what is not installed."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found
