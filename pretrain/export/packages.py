"""The optional package transformers: a one-sentence refusal without it, and its messages silenced."""

from __future__ import annotations

import os

from pretrain.errors import UserError


def require_transformers(verb: str) -> None:
    """Import transformers with its progress bars and warnings switched off.

    Raises UserError: transformers is not installed.
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
