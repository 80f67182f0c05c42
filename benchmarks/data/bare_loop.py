"""The tokenizer alone: text in memory, one thread a process, ids thrown away.

`gigatoken` is gigatoken, one document after the other to NumPy arrays: its fastest way in one thread. `batch`
gives SentencePiece a MB of text at a time and takes NumPy arrays, which is its fastest way. `lists` is the
usual loop: one document after the other, to lists of Python integers.

Prints seconds, tokens and CPU seconds of the loop.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import sys
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path

import sentencepiece
import zstandard

_BATCH_CHARACTERS = 1 << 20


def encode(
    how: str,
    model: str,
    paths: list[str],
    barrier: Barrier,
    results: multiprocessing.Queue[tuple[int, float]],
) -> None:
    """Load, wait for the others, encode."""
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
        gigatoken = importlib.import_module("gigatoken").Tokenizer.from_sentencepiece(model)
    barrier.wait()
    tokens, start = 0, time.process_time()
    for batch in batches:
        if how == "gigatoken":
            tokens += sum(len(gigatoken.encode(text)) + 1 for text in batch)
        elif how == "batch":
            tokens += sum(len(ids) + 1 for ids in processor.encode(batch, return_type="numpy", num_threads=1))
        else:
            tokens += sum(len(processor.encode(text)) + 1 for text in batch)
    results.put((tokens, time.process_time() - start))


def main() -> None:
    """bare_loop.py gigatoken|batch|lists WORKERS MODEL FILE..."""
    how, workers, model, paths = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4:]
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(workers + 1), context.Queue()
    processes = [
        context.Process(target=encode, args=(how, model, paths[number::workers], barrier, results))
        for number in range(workers)
    ]
    for process in processes:
        process.start()
    barrier.wait()
    start = time.monotonic()
    tokens, seconds = map(sum, zip(*(results.get() for _ in processes), strict=True))
    print("measured: seconds", time.monotonic() - start, "cpu", seconds, "tokens", tokens)
    for process in processes:
        process.join()


if __name__ == "__main__":
    main()
