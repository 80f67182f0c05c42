"""A small file system of a test's own."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(directory: Path, options: str) -> Iterator[Path]:
    """Mount a file system in memory at a directory; skip the test where that is not allowed.

    Args:
        directory: an empty one.
        options: of tmpfs, such as size=16m.
    """
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)]
    if (done := subprocess.run(command, capture_output=True)).returncode:
        pytest.skip(f"no tmpfs may be mounted here: {done.stderr.decode().strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--recursive", directory], check=True)
