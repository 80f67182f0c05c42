"""The cost of opening a directory of 100 billion tokens, and the memory that tokenising holds.

    python -m benchmarks.data.open_shards [--tokens 1e11] [--units 100 1000] [--directory DIR]

Simulated: shards of a gigabyte whose .bin files are holes (they take no room on the disk), with real .idx
files and a real manifest, documents of 862 tokens on average, seven sources as in SlimPajama. Measured in
this process: the files, seconds to open and check them as training does at its start, the order of an epoch
made and loaded again, 4,096 samples read, and the most memory and descriptors that took.

Before that, `tokenize` of few and of many units, in a process of its own: its peak memory and descriptors.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import psutil

from data_pipeline.shards.blend import Member, make_blend
from data_pipeline.shards.manifest import check_shards, read_manifest
from tests.data_pipeline.shards.synthetic import sparse_shards

T = TypeVar("T")
SOURCES = 7
LENGTH = 512


def timed(name: str, action: Callable[[], T]) -> T:
    """Return what an action returns, and print its seconds."""
    started = time.perf_counter()
    result = action()
    show(f"{name}, s", time.perf_counter() - started)
    return result


def show(name: str, value: float) -> None:
    """Print a number."""
    print(f"{name:60}{value:>14,.2f}", flush=True)


def measure_opening(directory: Path, tokens: int) -> None:
    """Open, check, order and read what `sparse_shards` makes."""
    process = psutil.Process()
    timed("making the directory (not part of it)", lambda: sparse_shards(directory, tokens, SOURCES))
    show("files", sum(path.suffix in (".bin", ".idx") for path in directory.iterdir()))
    before = process.num_fds()
    manifest = timed("reading the manifest", lambda: read_manifest(directory))
    timed("hashing every .idx (check at the start of training)", lambda: check_shards(manifest))
    blend, cache = make_blend([Member(manifest)]), directory.parent / "cache"
    samples = timed("opening", lambda: blend.training_samples(LENGTH, 1, cache))
    timed("order of an epoch: made and kept", lambda: samples.prepare(0))
    again = timed("opening again", lambda: blend.training_samples(LENGTH, 1, cache))
    timed("order of an epoch: from the cache, checksums compared", lambda: again.prepare(0))
    numbers = np.arange(4096).reshape(-1, 64)
    timed("reading 4,096 samples", lambda: [again.blocks(batch) for batch in numbers])
    show("descriptors", process.num_fds() - before)
    show("peak resident, GB", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6)


def measure_tokenizing(work: Path, model: Path, units: int) -> None:
    """Print the peak memory and descriptors of a process that tokenises so many units of the same size."""
    text, out = work / f"{units}.jsonl", work / f"units{units}"
    line = json.dumps({"text": "The quick brown fox jumps over the lazy dog, and so on. " * 20}) + "\n"
    text.write_text(line * (20 * units))
    command = [sys.executable, "-m", "data_pipeline", "tokenize", str(text), "--tokenizer", str(model)]
    command += ["--out", str(out), "--name", "x", "--range-bytes", str(20 * len(line))]
    size = descriptors = 0.0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as started:
        process = psutil.Process(started.pid)
        while started.poll() is None:
            try:
                size = max(size, process.memory_info().rss / 1e6)
                descriptors = max(descriptors, process.num_fds())
            except psutil.Error:
                break
            time.sleep(0.02)
    show("units", len(read_manifest(out).inputs))
    show("peak resident, MB", size)
    show("most descriptors", descriptors)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=float, default=1e11)
    parser.add_argument("--units", type=int, nargs="*", default=[100, 1000])
    parser.add_argument("--directory", type=Path, help="where the temporary directory goes")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(dir=arguments.directory) as temporary:
        work, pipeline = Path(temporary), [sys.executable, "-m", "data_pipeline"]
        if arguments.units:
            corpus, training = work / "corpus", ["--out", str(work / "x"), "--vocab-size", "1000"]
            subprocess.run([*pipeline, "demo-corpus", str(corpus)], check=True)
            subprocess.run([*pipeline, "train-tokenizer", str(corpus), *training], check=True)
        for count in arguments.units:
            measure_tokenizing(work, work / "x.model", count)
        if arguments.tokens:
            measure_opening(work / "shards", int(arguments.tokens))


if __name__ == "__main__":
    main()
