"""Files of seals beside runs, as far as a run has to know them.

    DIRECTORY/seals/0123456789ab.json    {"sealed": any content,
                                          "sha256": of the canonical JSON of "sealed"}

A run records at each start which seals lie beside it, so that one that is taken away is missed.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any

from data_pipeline.io.forms import parse_json

SEALS = "seals"
_LARGEST = 1 << 24
"""Bytes of a seal file that are read."""


def seal_files(directory: Path) -> list[Path]:
    """Return the paths of seals beside the runs of a directory, sorted.

    Raises:
        OSError: the folder of seals is there but cannot be listed.
    """
    folder = directory / SEALS
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        if folder.is_symlink():
            raise
        return []
    return [folder / name for name in names if name.endswith(".json")]


def read_seal_file(path: Path) -> bytes:
    """Return the bytes of a seal file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a regular file, or too large.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # a FIFO would block
        raise ValueError("not a regular file")
    if status.st_size > _LARGEST:
        raise ValueError(f"{status.st_size:,} bytes")
    return path.read_bytes()


def content_digest(content: Any) -> str:
    """Return the SHA-256 of a seal's content."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def intact_seals(directory: Path) -> list[str]:
    """Return the SHA-256 of the content of each intact seal beside the runs of a directory.

    Files that cannot be read, or do not have their own hash, are no seals.
    """
    try:
        paths = seal_files(directory)
    except OSError:
        return []
    return [digest for digest in map(_intact_digest, paths) if digest]


def _intact_digest(path: Path) -> str | None:
    try:
        file = parse_json(read_seal_file(path))
        digest = content_digest(file["sealed"])
        return digest if is_intact(path, digest, file["sha256"]) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_intact(path: Path, digest: str, recorded: Any) -> bool:
    """Return whether a seal's content still has the hash of its file and of the file's name.

    Args:
        digest: `content_digest` of the content.
        recorded: Hash in the file.
    """
    return digest == recorded and bool(path.stem) and digest.startswith(path.stem)
