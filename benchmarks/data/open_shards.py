"""The cost of opening a directory of 100 billion tokens, and the memory that tokenising holds.

    python -m benchmarks.data.open_shards [--tokens 1e11] [--units 100 1000] [--directory DIR] [--json FILE]

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
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from data_pipeline.shards.blend import Member, make_blend
from data_pipeline.shards.manifest import check_shards, read_manifest
from tests.data_pipeline.shards.synthetic import sparse_shards

SOURCES = 7
LENGTH = 512


def timed(what: dict[str, float], name: str, action: Callable[[], Any]) -> Any:
    """Return what an action returns, and print its seconds as `what`."""
    started = time.perf_counter()
    result = action()
    what[name] = time.perf_counter() - started
    print(f"{name}: {what[name]:.2f}", file=sys.stderr, flush=True)
    return result


def measure_opening(directory: Path, tokens: int) -> dict[str, float]:
    """Seconds and sizes of opening what `sparse_shards` made."""
    found: dict[str, float] = {}
    process = psutil.Process()
    timed(found, "making the directory (not part of it)", lambda: sparse_shards(directory, tokens, SOURCES))
    files = [path for path in directory.iterdir() if path.suffix in (".bin", ".idx")]
    found["files"] = len(files)
    before = process.num_fds()
    manifest = timed(found, "reading the manifest, s", lambda: read_manifest(directory))
    timed(found, "hashing every .idx (check at the start of training), s", lambda: check_shards(manifest))
    blend, cache = make_blend([Member(manifest)]), directory.parent / "cache"
    samples = timed(found, "opening, s", lambda: blend.training_samples(LENGTH, 1, cache))
    timed(found, "order of an epoch: made and kept, s", lambda: samples.prepare(0))
    again = timed(found, "opening again, s", lambda: blend.training_samples(LENGTH, 1, cache))
    timed(found, "order of an epoch: from the cache, checksums compared, s", lambda: again.prepare(0))
    numbers = np.arange(4096).reshape(-1, 64)
    timed(found, "reading 4,096 samples, s", lambda: [again.blocks(batch) for batch in numbers])
    found["descriptors"] = process.num_fds() - before
    found["peak resident, GB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return found


def measure_tokenizing(work: Path, units: int) -> dict[str, float]:
    """Peak memory and descriptors of a process that tokenises so many units of the same size."""
    work.mkdir()
    text = work / "in.jsonl"
    line = json.dumps({"text": "The quick brown fox jumps over the lazy dog, and so on. " * 20}) + "\n"
    text.write_text(line * (20 * units))
    command = [sys.executable, "-m", "data_pipeline"]
    model = work.parent / "model"
    if not model.with_suffix(".model").exists():
        corpus = work.parent / "corpus"
        subprocess.run([*command, "demo-corpus", str(corpus)], check=True, stdout=subprocess.DEVNULL)
        training = ["train-tokenizer", str(corpus), "--out", str(model), "--vocab-size", "1000"]
        subprocess.run([*command, *training], check=True, stdout=subprocess.DEVNULL)
    command += ["tokenize", str(text), "--tokenizer", f"{model}.model", "--out", str(work / "out")]
    command += ["--name", "x", "--range-bytes", str(20 * len(line))]
    started = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    peaks = {"peak resident, MB": 0.0, "most descriptors": 0.0}
    watcher = threading.Thread(target=_watch, args=(started.pid, peaks))
    watcher.start()
    code = started.wait()
    watcher.join()
    assert code == 0
    return {"units": len(read_manifest(work / "out").inputs)} | peaks


def _watch(pid: int, peaks: dict[str, float]) -> None:
    process = psutil.Process(pid)
    while True:
        try:
            size, descriptors = process.memory_info().rss / 1e6, process.num_fds()
        except psutil.Error:
            return
        peaks["peak resident, MB"] = max(peaks["peak resident, MB"], size)
        peaks["most descriptors"] = max(peaks["most descriptors"], descriptors)
        time.sleep(0.02)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=float, default=1e11)
    parser.add_argument("--units", type=int, nargs="*", default=[100, 1000])
    parser.add_argument("--directory", type=Path, help="where the temporary directory goes")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(dir=arguments.directory) as temporary:
        work = Path(temporary)
        report: dict[str, Any] = {
            "tokenize": [measure_tokenizing(work / f"units{count}", count) for count in arguments.units]
        }
        if arguments.tokens:
            report["open"] = measure_opening(work / "shards", int(arguments.tokens))
    for row in [*report["tokenize"], report.get("open", {})]:
        for name, value in row.items():
            print(f"{name:60}{value:>14,.2f}")
        print()
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
