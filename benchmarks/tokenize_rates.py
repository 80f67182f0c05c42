"""What `benchmarks/tokenize.py` measures.

One corpus of real text in SlimPajama's format, one SentencePiece model of 32,000 pieces for each type, and on
them, in turns, so that other work on the machine disturbs all alike:

* bare: SentencePiece alone, over text that lies in memory, its ids thrown away: in its fastest way, and
  (`bare, lists`) in the usual loop of one document after the other;
* pipeline: ours, from the compressed files to shards on disk and a manifest with their hashes;
* Megatron-LM's tools/preprocess_data.py, from one plain file (it reads no zstd), if a checkout is given;
* datasets: load_dataset and map to ids, if `datasets` is installed (pip install '.[bench]').

Seconds are those of the command and its children, less those of the same command on one document for each
worker: imports and the start of processes do not grow with the corpus. (`bare` times its loop alone.) CPU
seconds count on a machine with other work on it, wall seconds on an idle one. Every ratio is the median, over
the repetitions, of the ratio to what ran beside it in the same repetition.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import zstandard
from corpus_text import write_corpus
from tokenize_report import Measured, Run, report

_HERE = Path(__file__).parent
_FILES = 16
# BPE is four times slower, and its ratio to the bare loop settles sooner.
_BPE_MEGABYTES = 50
_MEMORY_MEGABYTES = (50, 500)


def run(command: list[str], environment: dict[str, str] | None = None) -> Run:
    """Run a command and watch its memory; `measured: seconds S cpu S tokens N`, if it prints that, counts."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.monotonic()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {}),
    )
    peaks = [0.0, 0.0]
    watcher = threading.Thread(target=_watch, args=(process.pid, peaks))
    watcher.start()
    output = "\n" + process.communicate()[0]
    wall = time.monotonic() - started
    watcher.join()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{output[-3000:]}")
    stated = dict(re.findall(r"(seconds|cpu|tokens) ([\d.]+)", output.rpartition("\nmeasured:")[2]))
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Run(
        float(stated.get("seconds", wall)),
        float(stated.get("cpu", cpu)),
        int(stated.get("tokens", 0)),
        *peaks,
    )


def _watch(pid: int, peaks: list[float]) -> None:
    """The largest resident memory of a process and its children, together and alone, in MB."""
    try:
        parent = psutil.Process(pid)
        while parent.is_running() and parent.status() != psutil.STATUS_ZOMBIE:
            sizes = [0.0]
            for process in [parent, *parent.children(recursive=True)]:
                try:
                    sizes.append(process.memory_info().rss / 1e6)
                except psutil.NoSuchProcess:
                    continue
            peaks[:] = [max(peaks[0], sum(sizes)), max(peaks[1], *sizes)]
            time.sleep(0.1)
    except psutil.NoSuchProcess:
        return


@dataclass(frozen=True)
class Bench:
    """Where the work is, and the command of each contestant."""

    work: Path
    megatron: Path | None

    def bare(self, how: str, corpus: list[Path], model: Path, workers: int) -> Run:
        """SentencePiece alone."""
        program = str(_HERE / "bare_loop.py")
        return run([sys.executable, program, how, str(workers), str(model), *map(str, corpus)])

    def pipeline(self, corpus: list[Path], model: Path, workers: int) -> Run:
        """Ours, into a fresh directory."""
        out = self.work / "out"

        def once(files: list[Path]) -> Run:
            shutil.rmtree(out, ignore_errors=True)
            program = str(_HERE / "pipeline_run.py")
            return run([sys.executable, program, str(workers), str(model), str(out), *map(str, files)])

        return _without(once(self.one_document_each(workers)), once(corpus))

    def datasets_map(self, corpus: list[Path], model: Path, workers: int) -> Run:
        """load_dataset and map, in a fresh cache."""
        cache = self.work / "datasets-cache"

        def once(files: list[Path]) -> Run:
            shutil.rmtree(cache, ignore_errors=True)
            program = str(_HERE / "datasets_map.py")
            command = [sys.executable, program, str(workers), str(model), str(cache), *map(str, files)]
            return run(command, {"HF_HUB_OFFLINE": "1"})

        return _without(once(self.one_document_each(workers)), once(corpus))

    def megatron_lm(self, corpus: list[Path], model: Path, workers: int) -> Run:
        """Their tool."""
        assert self.megatron is not None
        prefix = self.work / "megatron"
        command = [sys.executable, str(self.megatron / "tools" / "preprocess_data.py"), "--append-eod"]
        command += ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(model)]
        command += ["--workers", str(workers), "--output-prefix", str(prefix), "--log-interval", "1000000"]
        # What the tool needs besides (six, regex, triton ...) may lie on the caller's PYTHONPATH.
        path = [str(self.megatron), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {"PYTHONPATH": os.pathsep.join(path)}
        start, whole = (
            run([*command, "--input", str(self.plain(files))], environment)
            for files in (self.one_document_each(workers), corpus)
        )
        # Its ids have two bytes each.
        tokens = Path(f"{prefix}_text_document.bin").stat().st_size // 2
        return _without(start, replace(whole, tokens=tokens))

    def one_document_each(self, workers: int) -> list[Path]:
        """A corpus of as many documents and files as there are workers."""
        paths = [self.work / f"one-{workers}-{number}.jsonl.zst" for number in range(workers)]
        for path in paths:
            path.write_bytes(zstandard.compress(b'{"text": "one document"}\n'))
        return paths

    def plain(self, corpus: list[Path]) -> Path:
        """All of a corpus as one plain file."""
        path = self.work / f"plain-{corpus[0].name.removesuffix('.zst')}"
        if not path.exists():
            with open(path, "wb") as stream:
                for part in corpus:
                    stream.write(zstandard.ZstdDecompressor().decompressobj().decompress(part.read_bytes()))
        return path


def _without(start: Run, whole: Run) -> Run:
    return replace(whole, wall=whole.wall - start.wall, cpu=whole.cpu - start.cpu)


def train(work: Path, corpus: list[Path], model_type: str) -> Path:
    """A model of 32,000 pieces from 20 MB of the corpus; not part of what is measured."""
    prefix = work / model_type
    command = [sys.executable, "-m", "data_pipeline", "train-tokenizer", *map(str, corpus)]
    run([*command, "--out", str(prefix), "--model-type", model_type, "--sample-bytes", "20000000"])
    return Path(f"{prefix}.model")


def measure(arguments: argparse.Namespace, work: Path) -> Measured:
    """All rows, each a list of runs; the contestants take turns."""
    bench = Bench(work, arguments.megatron_lm)
    sizes = {"unigram": arguments.megabytes, "bpe": min(arguments.megabytes, _BPE_MEGABYTES)}
    corpora = {name: write_corpus(work / "corpus", size, _FILES) for name, size in sizes.items()}
    models = {name: train(work, corpora["unigram"], name) for name in sizes}
    rows: dict[tuple[str, str, int], list[Run]] = {}

    def add(name: str, contestant: str, workers: int, taken: Run) -> None:
        rows.setdefault((name, contestant, workers), []).append(taken)
        print(f"{name}, {contestant}, {workers}: {taken.cpu:.1f} CPU s, {taken.wall:.1f} s", file=sys.stderr)

    for _ in range(arguments.repetitions):
        for name, corpus in corpora.items():
            model = models[name]
            add(name, "bare, lists", 1, bench.bare("lists", corpus, model, 1))
            for workers in (1, 4):
                add(name, "bare", workers, bench.bare("batch", corpus, model, workers))
                add(name, "pipeline", workers, bench.pipeline(corpus, model, workers))
        corpus, model = corpora["unigram"], models["unigram"]
        if bench.megatron:
            add("unigram", "Megatron-LM", 4, bench.megatron_lm(corpus, model, 4))
        if importlib.util.find_spec("datasets"):
            add("unigram", "datasets.map", 4, bench.datasets_map(corpus, model, 4))
    memory = {}
    for megabytes in _MEMORY_MEGABYTES:
        corpus = write_corpus(work / "corpus", megabytes, _FILES)
        memory[megabytes] = bench.pipeline(corpus, models["unigram"], 4)
    return Measured(rows, sizes, memory)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="How fast tokenising is.")
    parser.add_argument("--megabytes", type=int, default=200, help="text of the corpus")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--megatron-lm", type=Path, help="a checkout of NVIDIA/Megatron-LM")
    parser.add_argument("--work", type=Path, help="keep corpus and models here; default: a temporary place")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        result = report(measure(arguments, work))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
