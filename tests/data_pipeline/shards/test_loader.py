"""Reading ahead: the same blocks for any number of threads, errors come out, threads end."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest

from data_pipeline.errors import DataError
from data_pipeline.shards.loader import Loader
from data_pipeline.shards.manifest import read_manifest
from data_pipeline.shards.samples import TrainingSamples
from tests.data_pipeline.helpers import Workshop, files_limited_to
from tests.data_pipeline.shards.synthetic import random_shards


def reading() -> int:
    """How many threads of loaders there are."""
    return sum(thread.name.startswith("loader") for thread in threading.enumerate())


def batches(count: int, size: int) -> list[np.ndarray]:
    return [np.arange(start, start + size) for start in range(0, count * size, size)]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_the_same_blocks_for_any_number_of_threads(workshop: Workshop, workers: int) -> None:
    manifest = read_manifest(workshop.shards)
    expected = TrainingSamples(manifest, 32, seed=4)
    numbers = batches(3 * expected.samples_per_epoch // 61, 61)  # several epochs
    loader = Loader(TrainingSamples(manifest, 32, seed=4), workers)
    for at, batch in enumerate(numbers):
        # Every fifth time something is announced that does not come.
        following = numbers[at + 1 : at + 3] if at % 5 else [batch + 1000]
        assert np.array_equal(loader.blocks(batch, following), expected.blocks(batch))
    assert np.array_equal(loader.blocks(numbers[0][:2]), expected.blocks(numbers[0][:2]))
    assert reading() == workers
    loader.close()
    assert reading() == 0


def test_an_error_in_a_thread_comes_out_of_the_call_that_wanted_the_blocks(
    tmp_path: Path, workshop: Workshop
) -> None:
    cache = tmp_path / "cache"
    samples = TrainingSamples(read_manifest(workshop.shards), 32, seed=4, cache_directory=cache)
    loader = Loader(samples, 2)
    loader.blocks(np.arange(4), [np.arange(4, 8)])
    shutil.rmtree(cache)
    cache.write_text("no directory any more")
    next_epoch = np.arange(4) + samples.samples_per_epoch
    loader.blocks(np.arange(4, 8), [next_epoch])
    with pytest.raises(
        DataError, match=r"cannot write the sample cache in .*cache: Not a directory"
    ):
        loader.blocks(next_epoch)
    loader.close()


def test_an_order_that_finds_no_room_says_why(tmp_path: Path, workshop: Workshop) -> None:
    manifest = read_manifest(workshop.shards)
    samples = TrainingSamples(manifest, 32, seed=4, cache_directory=tmp_path / "cache")
    said = r"cannot write the sample cache in .*: File too large; make"
    with files_limited_to(200), pytest.raises(DataError, match=said):
        samples.blocks(np.arange(4))


@pytest.mark.distributed
def test_resident_memory_does_not_grow_with_the_samples_read(tmp_path: Path) -> None:
    """Shards of 1 GB, of which a few thousand blocks touch nearly every stretch."""
    samples = TrainingSamples(
        random_shards(tmp_path / "shards", tokens=512_000_000, shards=4), 1024, seed=1
    )
    process = psutil.Process()
    samples.blocks(np.arange(1))
    start = process.memory_info().rss
    worst = 0
    for batch in batches(100, 64):
        samples.blocks(batch)
        worst = max(worst, process.memory_info().rss - start)
    assert worst < 500 << 20, worst
