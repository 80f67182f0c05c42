"""Speed of tokenising beside Megatron-LM's tools.

    python -m benchmarks.data.tokenizing [--megabytes 80] [--repetitions 3]
        [--megatron-lm CHECKOUT [--megatron-python PYTHON]]

One corpus of real text in SlimPajama's format, one BPE model of 32,000 pieces, and on them, in
turns, so that other work on the machine disturbs all alike:

* ours, from plain files to shards and a manifest; and, zst, from the same files compressed;
* Megatron-LM's tools/preprocess_data.py, from the same text in plain files (they read no zstd), and
  preprocess_data_fast.py, which is gigatoken with as many threads; if a checkout is given. Its
  newest one needs Python 3.12 and more packages (transformers, gigatoken): --megatron-python
  names an interpreter that has them.

All run with the setting of glibc for huge pages that slurm/tokenize.sh sets. Imports and the start
of processes are taken off (benchmarks/data/warm.py). CPU seconds count on a machine with other work
on it, wall seconds on an idle one. Every ratio is the median, with quartiles, over the repetitions,
of the ratio to what ran beside it in the same repetition.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import zstandard

from benchmarks.data.corpus_text import write_corpus
from data_pipeline.shards.manifest import read_manifest
from pretrain.export.tokenizer import write_tokenizer

_WARM = Path(__file__).with_name("warm.py")
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "HF_HUB_OFFLINE": "1",
}
_OURS = (
    "--name",
    "x",
    "--validation-fraction",
    "0",
    "--source-key",
    "none",
    "--default-source",
    "x",
)


class Measured(NamedTuple):
    """Repetition of a contestant: seconds by the clock and of CPU, the largest process in MB."""

    wall: float
    cpu: float
    resident: float


def run(command: list[object], **environment: str) -> str:
    """Run a command and return what it prints."""
    words = list(map(str, command))
    own = os.environ | _ENVIRONMENT | environment
    done = subprocess.run(words, capture_output=True, text=True, env=own)
    if done.returncode:
        sys.exit(f"{' '.join(words)} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def measured(printed: str) -> Measured:
    """Read what warm.py prints last."""
    return Measured(*map(float, printed.rpartition("measured:")[2].split()))


def plain_copy(compressed: Path) -> Path:
    """Return a directory with plain copies of compressed files, and all of them in one file."""
    directory = compressed.with_name(f"{compressed.name}-plain")
    directory.mkdir()
    joined = b""
    for path in sorted(compressed.iterdir()):
        content = zstandard.ZstdDecompressor().decompressobj().decompress(path.read_bytes())
        (directory / path.name.removesuffix(".zst")).write_bytes(content)
        joined += content
    compressed.with_name(f"{compressed.name}.jsonl").write_bytes(joined)
    return directory


def ours(work: Path, model: Path, workers: int, form: str) -> Measured:
    """Run our tokenize, into a fresh directory.

    Args:
        work: the directory that `prepare` has filled.
        model: the BPE model.
        workers: processes that tokenise.
        form: "" for compressed inputs, "-plain" for plain ones.
    """
    shutil.rmtree(work / "out", ignore_errors=True)
    inputs = (work / f"small-{workers}{form}", work / f"corpus{form}")
    command = [
        sys.executable,
        _WARM,
        *inputs,
        "data_pipeline",
        "tokenize",
        "{input}",
        "--tokenizer",
        model,
    ]
    return measured(run([*command, "--out", work / "out" / "{call}", "--workers", workers, *_OURS]))


def megatron_lm(
    work: Path, model: Path, workers: int, checkout: Path, python: str, fast: bool
) -> Measured:
    """Run Megatron-LM's tool, or its fast one.

    Args:
        work: the directory that `prepare` has filled.
        model: the BPE model, for the slower tool.
        workers: processes, or threads of the fast tool.
        checkout: of Megatron-LM.
        python: the interpreter that runs it.
        fast: run preprocess_data_fast.py.
    """
    tool = checkout / "tools" / ("preprocess_data_fast.py" if fast else "preprocess_data.py")
    inputs = (work / f"small-{workers}.jsonl", work / "corpus.jsonl")
    command: list[object] = [python, _WARM, *inputs, tool, "--input", "{input}", "--append-eod"]
    command += ["--output-prefix", work / tool.stem]
    if fast:
        command += ["--tokenizer-type", "HuggingFaceTokenizer", "--use-gigatoken"]
        command += ["--tokenizer-model", work / "huggingface"]
    else:
        command += ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", model]
        command += ["--workers", workers, "--log-interval", 1000000]
    # What the tool needs besides (six, regex, triton ...) may lie on the caller's PYTHONPATH.
    path = os.pathsep.join([str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])])
    return measured(run(command, PYTHONPATH=path, RAYON_NUM_THREADS=str(workers)))


def prepare(work: Path, megabytes: int) -> Path:
    """Write the corpus and a document for each worker, both also as plain text.

    `ids` is then ours of the corpus, and `huggingface` the model as the fast tool reads it.

    Args:
        work: where everything is written.
        megabytes: of the corpus.

    Returns:
        The BPE model.
    """
    write_corpus(work / "corpus", megabytes, files=2)
    plain_copy(work / "corpus")
    for workers in (1, 2):
        small = work / f"small-{workers}"
        small.mkdir()
        for number in range(workers):
            (small / f"{number}.jsonl.zst").write_bytes(
                zstandard.compress(b'{"text": "one document"}\n')
            )
        plain_copy(small)
    command = [sys.executable, "-m", "data_pipeline", "train-tokenizer", work / "corpus"]
    run([*command, "--out", work / "bpe", "--sample-bytes", 20000000])
    # Text by text, our ids are in the order of theirs: the same file.
    command = [sys.executable, "-m", "data_pipeline", "tokenize", work / "corpus.jsonl", *_OURS]
    run([*command, "--tokenizer", work / "bpe.model", "--out", work / "ids"])
    (work / "huggingface").mkdir()
    write_tokenizer(read_manifest(work / "ids"), work / "huggingface", model_max_length=512)
    return work / "bpe.model"


def report(rows: dict[tuple[str, int], list[Measured]], megabytes: int) -> None:
    """Print the table: rates, memory, and how many times as long as ours each contestant took.

    Args:
        rows: by (contestant, workers), the repetitions.
        megabytes: of the corpus.
    """
    print(f"{'':26}{'MB/CPU s':>10}{'most MB':>10}{'CPU s / ours':>22}{'s / ours':>22}")
    for (name, workers), runs in rows.items():
        rate = megabytes / statistics.median(run.cpu for run in runs)
        line = f"{f'{name}, {workers}':26}{rate:>10.2f}{max(run.resident for run in runs):>10.0f}"
        for clock in ("cpu", "wall"):
            pairs = zip(runs, rows["ours", workers], strict=True)
            ratios = [getattr(run, clock) / getattr(ours, clock) for run, ours in pairs]
            ratios = ratios if len(ratios) > 1 else 2 * ratios
            low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
            line += f"{f'{median:.2f} [{low:.2f}, {high:.2f}]':>22}"
        print(line)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="How fast tokenising is.")
    parser.add_argument("--megabytes", type=int, default=80, help="text of the corpus")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--megatron-lm", type=Path, help="a checkout of NVIDIA/Megatron-LM")
    parser.add_argument("--megatron-python", default=sys.executable, help="what runs its tools")
    arguments = parser.parse_args()
    checkout, python = arguments.megatron_lm, arguments.megatron_python
    rows: dict[tuple[str, int], list[Measured]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        model = prepare(work, arguments.megabytes)
        for workers in arguments.repetitions * (1, 2):
            results = {
                "ours": ours(work, model, workers, "-plain"),
                "ours, zst": ours(work, model, workers, ""),
            }
            if checkout:
                for name, fast in (("Megatron-LM", False), ("Megatron-LM, fast", True)):
                    results[name] = megatron_lm(
                        work, model, workers, checkout=checkout, python=python, fast=fast
                    )
            for name, result in results.items():
                rows.setdefault((name, workers), []).append(result)
                print(
                    f"{name}, {workers}: {result.cpu:.2f} CPU s, {result.wall:.2f} s",
                    file=sys.stderr,
                )
        report(rows, arguments.megabytes)
        (ids,) = (work / "ids").glob("*.bin")
        for theirs in work.glob("preprocess_data*_text_document.bin"):
            print(f"ids equal to those of {theirs.name}: {theirs.read_bytes() == ids.read_bytes()}")


if __name__ == "__main__":
    main()
