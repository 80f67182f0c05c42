"""Cache of results on disk: a result that was made of the same things is not made again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from data_pipeline.io.files import read_regular, write_json
from data_pipeline.io.forms import parse_json
from pretrain.errors import UserError


@dataclass(frozen=True)
class ResultCache:
    """Results on disk, a JSON file each: {"identity": what it was made of, …}.

    Args:
        directory: Directory of the files, made if missing.
        form: Form of a result.
    """

    directory: Path
    form: TypeAdapter[Any]

    def read(self, name: str, identity: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return a result; None if it is missing, damaged or of another identity.

        Args:
            name: Name of the file, without its suffix.
            identity: Everything that the result has to be made of.
        """
        try:
            content: dict[str, Any] = parse_json(read_regular(self._path(name)))
            self.form.validate_python(content, strict=True)
            return content if content.get("identity") == identity else None
        except (OSError, ValueError):
            return None

    def write(self, name: str, identity: Mapping[str, Any], content: Mapping[str, Any]) -> None:
        """Write a result; numbers that are not finite become null.

        Args:
            name: Name of the file, without its suffix.
            identity: Everything that the result was made of.

        Raises:
            UserError: the file cannot be written.
        """
        path = self._path(name)
        try:
            write_json(path, {"identity": identity, **content})
        except OSError as error:
            raise UserError(
                f"--out: {path} cannot be written: {error.strerror or error}"
            ) from error

    def read_or_make(
        self, name: str, identity: Mapping[str, Any], make: Callable[[], Mapping[str, Any]]
    ) -> tuple[dict[str, Any], bool]:
        """Return a result as JSON gives it back, and whether it was on disk.

        Args:
            name: Name of the file, without its suffix.
            identity: Everything that the result has to be made of.
            make: Function that makes the result where it is not there.
        """
        if (kept := self.read(name, identity)) is not None:
            return kept, True
        self.write(name, identity, make())
        # Read again, so that a new result equals a kept one in every type.
        written = self.read(name, identity)
        assert written is not None, (
            f"{name}: the identity that was written is not the one that was asked for"
        )
        return written, False

    def _path(self, name: str) -> Path:
        return self.directory / f"{name}.json"


def content_digest(content: Any) -> str:
    """Return the SHA-256 of anything that JSON can hold."""
    return hashlib.sha256(json.dumps(content, ensure_ascii=False).encode()).hexdigest()
