"""The cost of the order of samples, and the speed of reading them beside that of training.

    python -m benchmarks.data.samples [--tokens 1e9] [--sequence-length 512] [--directory DIR]
    python -m benchmarks.data.samples --holes --tokens 1e11

Random shards (documents of 862 tokens on average, as in SlimPajama; 2 GB for the default of a
billion tokens) are written to a temporary directory. Measured in this process, on one core:
opening, making the order of an epoch, loading it from the cache, and reading in training order,
from the whole directory and from a blend of its sources. The shards are in the page cache, as those
of a running job are if memory allows.

The yardstick is the most that one training process could consume: an A100 at 100 % of its bf16 peak
on the smallest shipped model. The last rows read beside a consumer that computes without holding
Python's lock, as a training step does: what a step takes longer than its computation, without and
with loader threads.

`--holes`: shards of a gigabyte whose .bin files are holes and take no room, with real .idx files
and a real manifest. Measured: what a run does with them before its first step, and the most memory
that takes.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import psutil

from data_pipeline.shards.blend import BlendedSamples, Member, make_blend
from data_pipeline.shards.loader import Loader
from data_pipeline.shards.manifest import check_shards, read_manifest
from megatron_patches.recipe.counting import model_flops_per_token
from pretrain.config.load import load_config
from pretrain.data.batches import SAMPLES_AT_ONCE
from pretrain.ranks.devices import peak_flops
from tests.data_pipeline.shards.synthetic import random_shards, sparse_shards

T = TypeVar("T")
BATCH = SAMPLES_AT_ONCE  # what the training loop reads in one go
STEPS = 60


def timed(action: Callable[[], T]) -> tuple[float, T]:
    """(seconds, what it returned)."""
    started = time.perf_counter()
    result = action()
    return time.perf_counter() - started, result


def measure_opening(directory: Path, tokens: int, length: int) -> None:
    """Print what a run does with shards of holes before its first step.

    Seconds of opening, checking, ordering and reading, descriptors held, and the most memory.

    Args:
        directory: where shards and cache go.
        tokens: of all shards.
        length: of a sample, in tokens.
    """
    sparse_shards(directory / "shards", tokens, sources=7)
    before = psutil.Process().num_fds()

    def show(what: str, action: Callable[[], T]) -> T:
        seconds, result = timed(action)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        print(f"{what:50}{seconds:10.2f} s{peak:10.2f} GB at most so far", flush=True)
        return result

    manifest = show("reading the manifest", lambda: read_manifest(directory / "shards"))
    show("hashing every .idx", lambda: check_shards(manifest))
    blend = make_blend([Member(manifest)])
    for what in ("order of an epoch: made and kept", "order of an epoch: from the cache"):
        samples = blend.training_samples(length, 1, directory / "cache")
        show(what, lambda samples=samples: samples.prepare(0))
    show(
        "reading 4,096 samples",
        lambda: [samples.blocks(b) for b in np.arange(4096).reshape(-1, 64)],
    )
    print(f"descriptors held: {psutil.Process().num_fds() - before}")


def measure_reading(samples: BlendedSamples, count: int) -> tuple[float, float, int]:
    """Read samples in training order.

    Args:
        samples: of which the first are read.
        count: how many, a multiple of BATCH.

    Returns:
        Tokens a CPU second (user and system), tokens a second by the clock, and by how many bytes
            the resident size grew.
    """
    process = psutil.Process()
    batches = np.arange(count).reshape(-1, BATCH)
    samples.blocks(batches[0])
    before = process.memory_info().rss
    grown = 0
    started = time.perf_counter()
    started_cpu = time.process_time()
    for batch in batches:
        samples.blocks(batch)
        grown = max(grown, process.memory_info().rss - before)
    tokens = count * samples.sequence_length
    return (
        tokens / (time.process_time() - started_cpu),
        tokens / (time.perf_counter() - started),
        grown,
    )


def measure_loader(samples: BlendedSamples, workers: int) -> float:
    """Time how long a training step that computes between its batches waits for them.

    Args:
        samples: of which the first are read.
        workers: threads that read ahead; 0 reads when needed.

    Returns:
        Seconds that a step takes beyond its computation, median over the steps.
    """
    matrix = np.ones((512, 512), dtype=np.float32)
    loader = Loader(samples, workers)
    batches = [np.arange(start, start + BATCH) for start in range(0, (STEPS + 3) * BATCH, BATCH)]
    waits = []
    for step in range(STEPS):
        waits.append(
            timed(lambda step=step: loader.blocks(batches[step], batches[step + 1 : step + 2]))[0]
        )
        for _ in range(4):
            matrix @ matrix
    loader.close()
    return statistics.median(waits)


def main() -> None:
    """Print all rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=float, default=1e9)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--samples", type=int, default=40_000, help="samples to read")
    parser.add_argument(
        "--holes", action="store_true", help="opening and order only, of shards without ids"
    )
    parser.add_argument("--directory", type=Path, help="where the temporary directory goes")
    arguments = parser.parse_args()
    length = arguments.sequence_length
    with tempfile.TemporaryDirectory(dir=arguments.directory) as temporary:
        if arguments.holes:
            return measure_opening(Path(temporary), int(arguments.tokens), length)
        manifest = random_shards(Path(temporary) / "shards", int(arguments.tokens), shards=7)
        cache = Path(temporary) / "cache"
        documents = sum(shard.documents for shard in manifest.shards)
        print(f"{manifest.tokens('train'):,} tokens, {documents:,} documents, length {length}")
        sources = {source: 1.0 + number for number, source in enumerate(manifest.sources("train"))}
        blends = {
            "whole": make_blend([Member(manifest)]),
            "blend": make_blend([Member(manifest, 1, sources)]),
        }
        for name, blend in blends.items():
            for what in ("made and kept", "from the cache"):
                seconds, _ = timed(
                    lambda blend=blend: blend.training_samples(length, 1, cache).prepare(0)
                )
                print(f"  order of {name:8}{what:20}{seconds:10.3f} s, opening included")
        consumed = float(peak_flops("NVIDIA A100-SXM4-80GB", "bf16") or 0.0)
        consumed /= model_flops_per_token(load_config("small").shape)
        print(
            f"reading, against the {consumed:,.0f} tokens/s of an A100 "
            "at 100 % of its peak on `small`"
        )
        for name, blend in blends.items():
            samples = blend.training_samples(length, 1, cache)
            per_cpu, rate, grown = measure_reading(samples, arguments.samples // BATCH * BATCH)
            print(
                f"  {name:8}{per_cpu / 1e6:8.1f} M tokens per CPU second"
                f"{per_cpu / consumed:6.0f} times ({rate / 1e6:.1f} M by the clock); "
                f"resident size grew {grown / 2**20:.0f} MiB"
            )
        print(f"waiting for a batch of {BATCH}, by loader threads (0: read when needed)")
        for workers in (0, 1, 2, 4):
            print(f"  {workers} threads{measure_loader(samples, workers) * 1e6:12.0f} µs")


if __name__ == "__main__":
    main()
