"""Finished trainings, kept as files: one that was made before of the same things is not made again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.errors import UserError
from pretrain.reporting.content import strict_json
from pretrain.runs.directory import write_json


@dataclass(frozen=True)
class TrialFiles:
    """The folder `trials` of an evaluation's --out."""

    out: Path

    def find(self, name: str, identity: Mapping[str, Any]) -> dict[str, Any] | None:
        """The result of the training of this name, if it was of exactly these things."""
        try:
            found = json.loads(self._path(name).read_text(encoding="utf-8"))
            result: dict[str, Any] | None = found["result"] if found["identity"] == identity else None
        except (OSError, ValueError, KeyError, TypeError):  # not there, or not whole: it is made again
            return None
        return result

    def keep(self, name: str, identity: Mapping[str, Any], result: Mapping[str, Any]) -> None:
        """Write a result.

        Raises:
            UserError: it cannot be written.
        """
        path = self._path(name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, strict_json({"identity": identity, "result": result}))
        except OSError as error:
            raise UserError(f"--out: {path} cannot be written: {error.strerror or error}") from error

    def find_or_make(
        self, name: str, identity: Mapping[str, Any], make: Callable[[], Mapping[str, Any]]
    ) -> tuple[dict[str, Any], bool]:
        """The kept result, or a new one; and whether it was kept. Both have been through JSON."""
        if (kept := self.find(name, identity)) is not None:
            return kept, True
        self.keep(name, identity, make())
        made = self.find(name, identity)
        assert made is not None, f"{name}: what was written is not what identifies it"
        return made, False

    def _path(self, name: str) -> Path:
        return self.out / "trials" / f"{name.replace('/', '_')}.json"


def content_digest(content: Any) -> str:
    """SHA-256 of anything that JSON can hold."""
    return hashlib.sha256(json.dumps(content, ensure_ascii=False).encode()).hexdigest()
