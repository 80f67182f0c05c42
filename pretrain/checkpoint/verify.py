"""Whether the files of a checkpoint are what was saved: sizes, or every byte by SHA-256."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pretrain.checkpoint.format import StoredFile, damaged, read_marker
from pretrain.errors import UserError

CHUNK = 2**22
THREADS = 4
"""That hash different files at once in one process: SHA-256 of one file is slower than most file systems."""
SECONDS_BETWEEN_LINES = 10.0


def verify(
    checkpoint: Path,
    by_hash: bool,
    share: tuple[int, int] = (0, 1),
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Check every file that COMPLETE names.

    Args:
        by_hash: read and hash them; else only their sizes are looked at.
        share: (rank, number of ranks): each hashes its own part of the files, and looks at all sizes.
        say: takes a line of progress now and then.

    Raises:
        UserError: names the first file that is missing, of another size, unreadable or of another content.
    """
    files = read_marker(checkpoint)
    for name, expected in files.items():
        check_size(checkpoint / name, expected)
    if by_hash:
        rank, size = share
        largest_first = sorted(files, key=lambda name: (-files[name].bytes, name))
        _check_hashes(checkpoint, {name: files[name] for name in largest_first[rank::size]}, say)


def check_size(file: Path, expected: StoredFile) -> None:
    """Raises UserError: it is missing, unreadable, or of another size than it was saved with."""
    try:
        size = file.stat().st_size
    except FileNotFoundError:
        raise damaged(file, "is missing") from None
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror})") from None
    if size != expected.bytes:
        raise damaged(file, f"is {size} bytes, but was saved with {expected.bytes} bytes")


def _check_hashes(checkpoint: Path, files: Mapping[str, StoredFile], say: Callable[[str], None]) -> None:
    total = sum(file.bytes for file in files.values())
    done, told = 0, time.monotonic()
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        hashing = {name: pool.submit(sha256_of, checkpoint / name) for name in files}
        for name, future in hashing.items():
            if future.result() != files[name].sha256:
                pool.shutdown(cancel_futures=True)
                raise damaged(checkpoint / name, "does not have the SHA-256 that it was saved with")
            done += files[name].bytes
            if time.monotonic() - told > SECONDS_BETWEEN_LINES:
                told = time.monotonic()
                say(f"verifying {checkpoint.name}: {done / 1e9:.1f} of {total / 1e9:.1f} GB of this rank")


def sha256_of(file: Path, progress: Callable[[int], None] = lambda count: None) -> str:
    """The SHA-256 of a file, in hexadecimal digits; `progress` takes the bytes of every chunk.

    Raises:
        UserError: it cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with open(file, "rb", buffering=0) as content:
            while chunk := content.read(CHUNK):
                digest.update(chunk)
                progress(len(chunk))
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror})") from None
    return digest.hexdigest()
