"""Verification of a checkpoint's files: their sizes, or every byte by SHA-256."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from safetensors import SafetensorError, safe_open

from data_pipeline.io.files import MOST_BYTES, hash_file
from pretrain.checkpoint.damage import DamagedCheckpoint, damaged, unreadable
from pretrain.checkpoint.format import (
    ABOUT,
    StoredFile,
    read_about,
    read_marker,
)
from pretrain.ranks.cores import usable_cores
from pretrain.runs.directory import step_of

THREADS = 4
"""Number of files hashed at once; SHA-256 of one file is slower than most file systems."""
SECONDS_BETWEEN_LINES = 10.0

Files = Mapping[str, StoredFile]


def verify(
    checkpoint: Path,
    by_hash: bool,
    share: tuple[int, int] = (0, 1),
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Check every file that COMPLETE names.

    Args:
        checkpoint: The checkpoint's directory.
        by_hash: Read and hash the files; otherwise only their sizes are checked.
        share: (rank, number of ranks): each rank hashes its own part of the files and checks all
            sizes.
        say: Called with a line of progress every few seconds.

    Raises:
        UserError: a file is missing, unreadable or has another size or content; names the first.
    """
    files = read_marker(checkpoint)
    for problem in size_problems(checkpoint, files):
        raise problem
    step = read_about(checkpoint).position.step
    if step != step_of(checkpoint):
        raise damaged(checkpoint / ABOUT, f"is of step {step}")
    if by_hash:
        rank, ranks = share
        # Dealt out by size, so that the ranks' shares of the bytes are about equal.
        largest_first = sorted(files, key=lambda name: (-files[name].bytes, name))
        share_of_rank = {name: files[name] for name in largest_first[rank::ranks]}
        for problem in hash_problems(checkpoint, share_of_rank, say):
            raise problem


def size_problems(checkpoint: Path, files: Files) -> Iterator[DamagedCheckpoint]:
    """Yield an error for each file that is missing, unreadable, or of another size.

    Args:
        checkpoint: The checkpoint's directory.
        files: {name: size and SHA-256 as saved}.
    """
    for name, expected in files.items():
        file = checkpoint / name
        try:
            size = file.stat().st_size
        except FileNotFoundError:
            yield damaged(file, "is missing")
        except OSError as error:
            yield unreadable(file, error)
        else:
            if size != expected.bytes:
                yield damaged(file, f"is {size} bytes, but was saved with {expected.bytes} bytes")


def hash_problems(
    checkpoint: Path, files: Files, say: Callable[[str], None], threads: int = THREADS
) -> Iterator[DamagedCheckpoint]:
    """Yield an error for each file that cannot be read or has other content; hash in threads.

    Args:
        checkpoint: The checkpoint's directory.
        files: {name: size and SHA-256 as saved}.
        say: Called with a line of progress every few seconds.
        threads: Maximum number of files hashed at once.
    """
    total = sum(file.bytes for file in files.values())
    done = 0
    last_line = time.monotonic()
    with ThreadPoolExecutor(min(threads, usable_cores())) as pool:
        problems = pool.map(partial(_hash_problem, checkpoint), files, files.values())
        for file, problem in zip(files.values(), problems, strict=True):
            if problem is not None:
                yield problem
            done += file.bytes
            if time.monotonic() - last_line > SECONDS_BETWEEN_LINES:
                last_line = time.monotonic()
                say(f"verifying {checkpoint.name}: {done / 1e9:.1f} of {total / 1e9:.1f} GB")


def _hash_problem(checkpoint: Path, name: str, expected: StoredFile) -> DamagedCheckpoint | None:
    file = checkpoint / name
    try:
        if file.suffix == ".safetensors":  # its header says at once that a file is far too long
            with safe_open(str(file), framework="numpy"):
                pass
        elif expected.bytes > MOST_BYTES:
            return damaged(file, f"has {expected.bytes:,} bytes, far more than such a file")
        if hash_file(file) == expected.sha256:
            return None
    except OSError as error:
        return unreadable(file, error)
    except SafetensorError as error:
        return damaged(file, f"is not what its header names ({error})")
    return damaged(file, "does not have the SHA-256 that it was saved with")
