"""The contestants of benchmarks.data.tokenizing, each in a process of its own.

    python -m benchmarks.data.contestants bare gigatoken|batch|lists WORKERS MODEL FILE...
    python -m benchmarks.data.contestants pipeline WORKERS MODEL OUT SMALL... -- FILE...
    python -m benchmarks.data.contestants datasets_map WORKERS MODEL CACHE FILE...
    python -m benchmarks.data.contestants megatron TOOL SMALL LARGE ARGUMENT...    (without --input)

`bare` is the tokenizer alone: text in memory, one thread a process, ids thrown away. `gigatoken` is
gigatoken, one document after the other to NumPy arrays: its fastest way in one thread. `batch` gives
SentencePiece a MB of text at a time and takes NumPy arrays, which is its fastest way. `lists` is the usual
loop: one document after the other, to lists of Python integers. `pipeline` is our tokenize with its own
options left as they are, from files to the finished manifest. `datasets_map` loads the files with `datasets`
and maps the text to ids. `megatron` runs a preprocessing tool of Megatron-LM, unchanged.

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
from typing import Any

_BATCH_CHARACTERS = 1 << 20


def bare(how: str, workers: str, model: str, *paths: str) -> None:
    """Print seconds, tokens and CPU seconds of the loop."""
    count = int(workers)
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(count + 1), context.Queue()
    processes = [
        context.Process(target=encode, args=(how, model, paths[number::count], barrier, results))
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
    how: str,
    model: str,
    paths: tuple[str, ...],
    barrier: Barrier,
    results: multiprocessing.Queue[tuple[int, float]],
) -> None:
    """Load, wait for the others, encode."""
    import sentencepiece
    import zstandard

    processor = sentencepiece.SentencePieceProcessor(model_file=model)
    batches: list[list[str]] = [[]]
    size = 0
    for path in paths:
        content = zstandard.ZstdDecompressor().decompressobj().decompress(Path(path).read_bytes())
        for line in content.splitlines():
            batches[-1].append(json.loads(line)["text"])
            size += len(batches[-1][-1])
            if size >= _BATCH_CHARACTERS:
                batches.append([])
                size = 0
    if how == "gigatoken":
        import gigatoken

        tokenizer = gigatoken.Tokenizer.from_sentencepiece(model)
    barrier.wait()
    tokens, start = 0, time.process_time()
    for batch in batches:
        if how == "gigatoken":
            tokens += sum(len(tokenizer.encode(text)) + 1 for text in batch)
        elif how == "batch":
            tokens += sum(len(ids) + 1 for ids in processor.encode(batch, return_type="numpy", num_threads=1))
        else:
            tokens += sum(len(processor.encode(text)) + 1 for text in batch)
    results.put((tokens, time.process_time() - start))


def pipeline(workers: str, model: str, out: str, *files: str) -> None:
    from data_pipeline.io.progress import ProgressLine
    from data_pipeline.sources.discovery import Inputs, find_inputs
    from data_pipeline.tokenizing.plan import TokenizeOptions
    from data_pipeline.tokenizing.run import Run

    def once(paths: tuple[str, ...], directory: Path) -> int:
        shutil.rmtree(directory, ignore_errors=True)
        inputs = find_inputs([Path(path) for path in paths])
        options = TokenizeOptions("x")
        with ProgressLine(sum(file.size for file in inputs)) as line:
            run = Run(Inputs(inputs), Path(model), directory, options, int(workers), line.update)
            run.make()
            manifest = run.finish()
        return sum(shard.tokens for shard in manifest.shards)

    between = files.index("--")
    small, large = files[:between], files[between + 1 :]
    report_difference(lambda: once(small, Path(out, "small")), lambda: once(large, Path(out, "large")))


class Encoder:
    """The encoding of a batch by SentencePiece, whose model is loaded in every process of map."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._processor: Any = None

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        if self._processor is None:
            import sentencepiece

            self._processor = sentencepiece.SentencePieceProcessor(model_file=self._model)
        return {"ids": self._processor.encode(batch["text"], num_threads=1)}


def datasets_map(workers: str, model: str, cache: str, *paths: str) -> None:
    import datasets
    import pyarrow.compute

    processes = int(workers)
    loaded = datasets.load_dataset(
        "json", data_files=list(paths), cache_dir=cache, split="train", num_proc=processes
    )
    mapped = loaded.map(
        Encoder(model), batched=True, batch_size=1000, num_proc=processes, remove_columns=loaded.column_names
    )
    lengths = pyarrow.compute.list_value_length(mapped.data.column("ids"))
    print("measured: tokens", pyarrow.compute.sum(lengths).as_py() + len(mapped))


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
    contestants = {each.__name__: each for each in (bare, pipeline, datasets_map, megatron)}
    contestants[sys.argv[1]](*sys.argv[2:])
