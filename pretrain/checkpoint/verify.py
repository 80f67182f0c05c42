"""Verification of a checkpoint's files: their sizes, or every byte by SHA-256."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from data_pipeline.io.files import hash_file
from pretrain.checkpoint.format import (
    ABOUT,
    StoredFile,
    damaged,
    read_about,
    read_marker,
    unreadable,
)
from pretrain.runs.directory import step_of

THREADS = 4
"""Number of files hashed at once in one process: SHA-256 of one file is slower than most file systems."""
SECONDS_BETWEEN_LINES = 10.0


def verify(
    checkpoint: Path,
    by_hash: bool,
    share: tuple[int, int] = (0, 1),
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Check every file that COMPLETE names.

    `by_hash`: read and hash the files; else only their sizes are checked. `share`: (rank, number of ranks):
    each rank hashes its own part of the files, and checks all sizes.

    Raises UserError: names the first file that is missing, of another size, unreadable or of another content.
    """
    files = read_marker(checkpoint)
    for name, expected in files.items():
        check_size(checkpoint / name, expected)
    step = read_about(checkpoint).position.step
    if step != step_of(checkpoint):
        raise damaged(checkpoint / ABOUT, f"is of step {step}")
    if not by_hash:
        return
    rank, size = share
    largest_first = sorted(files, key=lambda name: (-files[name].bytes, name))
    own = {name: files[name] for name in largest_first[rank::size]}
    total, done, last_line = sum(file.bytes for file in own.values()), 0, time.monotonic()
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        hashing = {
            name: pool.submit(check_hash, checkpoint / name, file) for name, file in own.items()
        }
        for name, future in hashing.items():
            if future.exception() is not None:
                pool.shutdown(cancel_futures=True)
            future.result()
            done += own[name].bytes
            if time.monotonic() - last_line > SECONDS_BETWEEN_LINES:
                last_line = time.monotonic()
                say(
                    f"verifying {checkpoint.name}: {done / 1e9:.1f} of {total / 1e9:.1f} GB of this rank"
                )


def check_size(file: Path, expected: StoredFile) -> None:
    """Check a file's size. Raises UserError: the file is missing, unreadable, or of another size."""
    try:
        size = file.stat().st_size
    except FileNotFoundError:
        raise damaged(file, "is missing") from None
    except OSError as error:
        raise unreadable(file, error) from None
    if size != expected.bytes:
        raise damaged(file, f"is {size} bytes, but was saved with {expected.bytes} bytes")


def check_hash(
    file: Path, expected: StoredFile, progress: Callable[[int], None] | None = None
) -> None:
    """Check a file's SHA-256; `progress` is called with the bytes of every chunk.

    Raises UserError: the file cannot be read, or has another content.
    """
    try:
        digest = hash_file(file, progress=progress)
    except OSError as error:
        raise unreadable(file, error) from None
    if digest != expected.sha256:
        raise damaged(file, "does not have the SHA-256 that it was saved with")
