"""Growth of time and memory with the number of things, from 1,000 to 10,000: constant per item is 1.

    OMP_NUM_THREADS=1 python -m benchmarks.growth [WHAT …] [--few 1000]

What a user would type, or what it does first, runs on `--few`, 4 and 10 times as many items. Printed are CPU
milliseconds and KB of peak memory for each item of the last 6 parts, both as a ratio to those of the 3 parts
before, so that what a start costs is in neither; and the time of few once more, as a control. CPU time, since
other work on the machine changes it least.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from pretrain.runs.directory import RunDirectory
from tests.data_pipeline.shards.synthetic import sparse_shards
from tests.fabricated_runs import BATCH, LENGTH, write_run

OPEN_SHARDS = """import sys, pathlib
from data_pipeline.shards import blend, manifest
path = pathlib.Path(sys.argv[1])
blend.make_blend([blend.Member(manifest.read_manifest(path))]).training_samples(128, 1, path / "c").prepare(0)
"""
READ_RUN = """import sys, pathlib
from pretrain.runs.finished import read_finished_run
read_finished_run(pathlib.Path(sys.argv[1]))
"""


def prepare(what: str, place: Path, count: int) -> list[str]:
    """Make so many items in a directory that is not there, and return Python's arguments to time."""
    if what == "files_tokenised":
        (place / "text").mkdir(parents=True)
        for number in range(count):
            (place / f"text/{number:05}.txt").write_text(
                f"The fox of file {number} is brown.\n" * 9
            )
        train = [
            "train-tokenizer",
            "docs/method.md",
            "--out",
            f"{place}/tokenizer",
            "--vocab-size",
            "500",
        ]
        subprocess.run(
            [sys.executable, "-m", "data_pipeline", *train], check=True, stdout=subprocess.DEVNULL
        )
        out = [
            "--tokenizer",
            f"{place}/tokenizer.model",
            "--out",
            f"{place}/shards",
            "--name",
            "growth",
        ]
        return ["-m", "data_pipeline", "tokenize", f"{place}/text", *out]
    if what == "runs_compared":
        runs = [
            run
            for variant in ("vanilla", "orthogonal")
            for run in _seeds(place, variant, count // 2)
        ]
        return ["-m", "pretrain", "compare", *runs, "--out", f"{place}/comparison"]
    if what == "runs_swept":
        place.mkdir()
        grid = f"base: demo\ndirectory: {place}/runs\ngrid: {{attention.variant: [vanilla]}}\n"
        (place / "grid.yaml").write_text(f"{grid}seeds: {list(range(count))}\n")
        one_rank = "parallel.tensor_model_parallel_size=1"
        return ["-m", "pretrain", "sweep", f"{place}/grid.yaml", "--dry-run", one_rank]
    if what == "steps_recorded":
        steps = {
            "config.schedule.steps": count,
            "summary.step": count,
            "summary.samples": count * BATCH,
        }
        steps["summary.tokens"] = count * BATCH * LENGTH
        return ["-c", READ_RUN, str(write_run(place, "vanilla", changes=steps))]
    if what == "shards_opened":
        tokens = sparse_shards(place / "one", 1, 1, shard_bytes=20_000).shards[0].tokens
        sparse_shards(place / "all", tokens * count, 7, shard_bytes=20_000)
        return ["-c", OPEN_SHARDS, f"{place}/all"]
    run = RunDirectory(write_run(place, "vanilla"))  # checkpoints_listed
    for step in range(101, count + 100):
        shutil.copytree(run.checkpoint(100), run.checkpoint(step), copy_function=os.link)
    return ["-m", "pretrain", "checkpoint", "list", str(run.path)]


def _seeds(place: Path, variant: str, count: int) -> list[str]:
    """Write finished runs of 100 steps that differ in their seeds, and return their paths."""
    first = write_run(place, variant, variant)
    config = (first / "config.yaml").read_text()
    for seed in range(2, count + 1):
        run = shutil.copytree(first, place / f"{variant}-{seed}", copy_function=os.link)
        (run / "config.yaml").unlink()
        named = config.replace(f"name: {variant}\n", f"name: {run.name}\n", 1)
        (run / "config.yaml").write_text(named.replace("  seed: 1\n", f"  seed: {seed}\n"))
    return [str(path) for path in place.glob(f"{variant}*")]


def cost(what: str, count: int) -> tuple[float, float]:
    """Return CPU seconds, and the most MB that the process or one of its own held."""
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, *prepare(what, Path(place) / "made", count)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{what} of {count} failed")
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1e3


THINGS = "files_tokenised runs_compared runs_swept steps_recorded shards_opened checkpoints_listed"
WHAT = tuple(THINGS.split())

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__)
    parser.add_argument("what", nargs="*", choices=[*WHAT, []], metavar="WHAT")
    parser.add_argument("--few", type=int, default=1000)
    options = parser.parse_args()
    print("| items | ms each | ratio | KB each | ratio | control |\n|---|---:|---:|---:|---:|---:|")
    for what in options.what or WHAT:
        once, again, four, ten = (cost(what, times * options.few) for times in (1, 1, 4, 10))
        cells = []
        for first, middle, last in zip(once, four, ten, strict=True):
            before, after = (middle - first) / 3, (last - middle) / 6
            cells += [
                f"{after / options.few * 1e3:.2f}",
                f"{after / before:.2f}" if before > 0 else "–",
            ]
        print(
            f"| {what.replace('_', ' ')} | {' | '.join(cells)} | {again[0] / once[0]:.2f} |",
            flush=True,
        )
