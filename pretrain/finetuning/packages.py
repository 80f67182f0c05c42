"""Optional packages of fine-tuning: imported quietly, refused with one sentence if missing."""

from __future__ import annotations

import os
from importlib import import_module
from importlib.metadata import version

from pretrain.errors import UserError
from pretrain.export.packages import require_transformers
from pretrain.ranks.devices import use_cuda

PACKAGES = {"accelerate": "accelerate", "sklearn": "scikit-learn", "sacrebleu": "sacrebleu"}
"""Distributions by the name they are imported by."""


def require_packages(verb: str, *names: str) -> None:
    """Import transformers and other packages of the verb, quietly.

    Args:
        names: keys of PACKAGES.

    Raises:
        UserError: one is not installed.
    """
    # Transformers imports DeepSpeed where it is installed, which would print the accelerator it detects.
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if use_cuda() else "cpu")
    require_transformers(verb)
    for name in names:
        try:
            import_module(name)
        except ImportError as error:
            raise UserError(
                f"{verb} needs the package {PACKAGES[name]} ({error}): pip install 'ora-pretrain[eval]'"
            ) from error


def package_versions(*names: str) -> dict[str, str]:
    """Return the versions of torch, transformers and these keys of PACKAGES, which are installed."""
    distributions = ["torch", "transformers", *(PACKAGES[name] for name in names)]
    return {distribution: version(distribution) for distribution in distributions}
