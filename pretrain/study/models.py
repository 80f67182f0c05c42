"""Model directories in Hugging Face's form: their identity, and the refusal to run their code unasked."""

from __future__ import annotations

import hashlib
from pathlib import Path

from pretrain.errors import UserError

WEIGHTS = ("*.safetensors", "*.bin")
_CONTENT = (*WEIGHTS, "*.json", "*.model", "*.txt", "*.py")
"""Files that decide the outputs of a model: weights, configuration, tokenizer, code."""
FACTS = "export.json"
"""File of an export that says where the model comes from; its outputs do not depend on that."""


def model_digest(directory: Path) -> str:
    """Return the SHA-256 of all files that decide the outputs of a model.

    Raises UserError where a file cannot be read.
    """
    digest = hashlib.sha256()
    for path in sorted({path for kind in _CONTENT for path in directory.glob(kind)}):
        if path.name != FACTS:
            digest.update(path.name.encode() + b"\0")
            try:
                with path.open("rb") as file:
                    while block := file.read(1 << 20):
                        digest.update(block)
            except OSError as error:
                raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()


def require_trust(directory: Path, trusted: bool) -> None:
    """Refuse a model directory with code of its own, by a UserError, unless the user trusts that code."""
    if not trusted and (code := sorted(directory.glob("*.py"))):
        raise UserError(f"{directory} has code of its own, {code[0].name}: read it, then give --trust-code")
