"""The optional packages of export: a one-sentence refusal without them, and their messages silenced."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version

from pretrain.errors import UserError

PACKAGES = ("transformers", "tokenizers", "safetensors")


def require_transformers(verb: str) -> None:
    """Import transformers with its progress bars and warnings switched off.

    Raises:
        UserError: transformers is not installed.
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
    """Return {package: version} of PACKAGES; None for a package that is not installed."""
    installed: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            installed[name] = None
    return installed
