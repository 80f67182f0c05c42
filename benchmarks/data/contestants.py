"""The contestants of benchmarks.data.tokenizing, each in a process of its own.

    python -m benchmarks.data.contestants bare WORKERS MODEL FILE...
    python -m benchmarks.data.contestants pipeline WORKERS MODEL OUT SMALL... -- FILE...
    python -m benchmarks.data.contestants megatron TOOL SMALL LARGE ARGUMENT...    (without --input)

`bare` is gigatoken alone: text in memory, one document after the other to NumPy arrays (its fastest way in
one thread), ids thrown away. `pipeline` is our tokenize with its own options left as they are, from files to
the finished manifest. `megatron` runs a preprocessing tool of Megatron-LM, unchanged.

Each imports what it needs itself: a package of another contestant is no part of its memory, and Megatron-LM's
tools may have an interpreter of their own, without ours.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import runpy
import shutil
import sys
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path


def bare(workers: str, model: str, *paths: str) -> None:
    """Print seconds, tokens and CPU seconds of the loop."""
    count = int(workers)
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(count + 1), context.Queue()
    processes = [
        context.Process(target=encode, args=(model, paths[number::count], barrier, results))
        for number in range(count)
    ]
    for process in processes:
        process.start()
    barrier.wait()
    start = time.monotonic()
    tokens, seconds = map(sum, zip(*(results.get() for _ in processes), strict=True))
    print("measured: seconds", time.monotonic() - start, "cpu", seconds, "tokens", tokens)
    for process in processes:
        process.join()


def encode(
    model: str, paths: tuple[str, ...], barrier: Barrier, results: multiprocessing.Queue[tuple[int, float]]
) -> None:
    """Load, wait for the others, encode."""
    import gigatoken
    import zstandard

    texts: list[str] = []
    for path in paths:
        content = zstandard.ZstdDecompressor().decompressobj().decompress(Path(path).read_bytes())
        texts += [json.loads(line)["text"] for line in content.splitlines()]
    tokenizer = gigatoken.Tokenizer.from_sentencepiece(model)
    barrier.wait()
    start = time.process_time()
    tokens = sum(len(tokenizer.encode(text)) + 1 for text in texts)
    results.put((tokens, time.process_time() - start))


def pipeline(workers: str, model: str, out: str, *files: str) -> None:
    from data_pipeline.io.progress import ProgressLine
    from data_pipeline.sources.discovery import find_all_inputs
    from data_pipeline.tokenizing.plan import TokenizeOptions
    from data_pipeline.tokenizing.run import Run

    def once(paths: tuple[str, ...], directory: Path) -> int:
        shutil.rmtree(directory, ignore_errors=True)
        inputs = find_all_inputs(paths)
        with ProgressLine(sum(file.size for file in inputs.files)) as line:
            run = Run(inputs, Path(model), directory, TokenizeOptions("x"), int(workers), line.update)
            run.make()
            manifest = run.finish()
        return sum(shard.tokens for shard in manifest.shards)

    between = files.index("--")
    small, large = files[:between], files[between + 1 :]
    report_difference(lambda: once(small, Path(out, "small")), lambda: once(large, Path(out, "large")))


def megatron(tool: str, small: str, large: str, *arguments: str) -> None:
    def once(path: str) -> int:
        sys.argv = [tool, "--input", path, *arguments]
        runpy.run_path(tool, run_name="__main__")
        return 0

    report_difference(lambda: once(small), lambda: once(large))


def report_difference(small: Callable[[], int], large: Callable[[], int]) -> None:
    """Run both and print how much longer the second took, by the clock and in CPU seconds, and its tokens.

    So imports (eight seconds and more of CPU, and no two times the same) and the loading of the tokenizer do
    not count. CPU seconds are those of this process and of its children that have ended. The first call of
    `small` is not measured: it imports what both use.
    """
    small()
    before = _now()
    small()
    between = _now()
    tokens = large()
    after = _now()
    wall, cpu = (c - b - (b - a) for a, b, c in zip(before, between, after, strict=True))
    print("\nmeasured: seconds", wall, "cpu", cpu, "tokens", tokens, flush=True)


def _now() -> tuple[float, float]:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return time.monotonic(), sum(one.ru_utime + one.ru_stime for one in used)


if __name__ == "__main__":
    contestants = {each.__name__: each for each in (bare, pipeline, megatron)}
    contestants[sys.argv[1]](*sys.argv[2:])
