"""Speed of tokenising beside the bare tokenizer, Megatron-LM's tool and datasets.map.

    python -m benchmarks.data.tokenizing [--megabytes 80] [--repetitions 3] [--unigram] [--json FILE]
        [--also [preprocess_data] [huge_pages] [sentencepiece] [datasets] [memory]]
        [--megatron-lm CHECKOUT [--megatron-python PYTHON]]

One corpus of real text in SlimPajama's format, one SentencePiece model of 32,000 pieces for each type, and on
them, in turns, so that other work on the machine disturbs all alike:

* bare: the fastest program for the model alone: gigatoken for BPE, SentencePiece for unigram (--unigram);
* SentencePiece: the same with SentencePiece, in its fastest way and in the usual loop (`lists`);
* pipeline: ours, from plain files to shards and a manifest; and, zst, from the same files compressed;
* Megatron-LM's tools/preprocess_data.py, from the same text in one plain file (they read no zstd), and
  preprocess_data_fast.py, which is gigatoken with as many threads; if a checkout is given. Its newest one
  needs Python 3.12 and more packages (transformers, gigatoken): --megatron-python names an interpreter that
  has them;
* huge pages: bare, and Megatron-LM's fast tool, with the setting of glibc that the pipeline is measured with
  too, as slurm/tokenize.sh sets it;
* datasets: load_dataset and map to ids, if `datasets` is installed (pip install '.[bench]').

What each does exactly: benchmarks.data.contestants. Seconds are those of the work and its child processes,
less those of the same on one document for each worker: imports and the start of processes do not grow with
the corpus. (`bare` times its loop alone.) CPU seconds count on a machine with other work on it, wall seconds
on an idle one. Every ratio is the median, over the repetitions, of the ratio to what ran beside it in the
same repetition.
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
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import psutil
import zstandard

from benchmarks.data.corpus_text import write_corpus
from benchmarks.data.tokenizing_report import Measured, Run, report

_FILES = 2
_WORKERS = (1, 2)
_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
# By model type, the program that is fastest.
_FASTEST = {"bpe": "gigatoken", "unigram": "batch"}
# What may be left out, for a run that holds a quiet machine for minutes only.
_ALSO = ("preprocess_data", "huge_pages", "sentencepiece", "datasets", "memory")
# Memory at the size of the corpus and at so many times that.
_LARGER = 3


def run(command: list[str], environment: Mapping[str, str] = MappingProxyType({})) -> Run:
    """Run a command and watch its memory; `measured: seconds S cpu S tokens N`, if it prints that, counts."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.monotonic()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
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
    stated = dict(re.findall(r"(seconds|cpu|tokens) (-?[\d.]+)", output.rpartition("\nmeasured:")[2]))
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    seconds = float(stated.get("seconds", wall)), float(stated.get("cpu", cpu))
    return Run(*seconds, int(stated.get("tokens", 0)), *peaks)


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


def contestant(*words: object, environment: Mapping[str, str], python: str = sys.executable) -> Run:
    """Run a contestant in a process of its own."""
    return run([python, "-m", "benchmarks.data.contestants", *map(str, words)], environment)


@dataclass(frozen=True)
class Bench:
    """The working directory, and the command of each contestant."""

    work: Path
    megatron: Path | None
    python: str

    def bare(self, how: str, corpus: list[Path], model: Path, workers: int, huge: bool = False) -> Run:
        """A program alone."""
        return contestant("bare", how, workers, model, *corpus, environment=_HUGE_PAGES if huge else {})

    def pipeline(self, corpus: list[Path], model: Path, workers: int) -> Run:
        """Ours, into a fresh directory, with huge pages, as slurm/tokenize.sh does it."""
        out = self.work / "out"
        shutil.rmtree(out, ignore_errors=True)
        files = [*self.one_document_each(workers), "--", *corpus]
        return contestant("pipeline", workers, model, out, *files, environment=_HUGE_PAGES)

    def datasets_map(self, corpus: list[Path], model: Path, workers: int) -> Run:
        """load_dataset and map, in a fresh cache; less what the start takes."""
        start, whole = (
            self._datasets_map(files, model, workers) for files in (self.one_document_each(workers), corpus)
        )
        return replace(whole, wall=whole.wall - start.wall, cpu=whole.cpu - start.cpu)

    def _datasets_map(self, files: list[Path], model: Path, workers: int) -> Run:
        cache = self.work / "datasets-cache"
        shutil.rmtree(cache, ignore_errors=True)
        offline = {"HF_HUB_OFFLINE": "1"}
        return contestant("datasets_map", workers, model, cache, *files, environment=offline)

    def ids(self, corpus: list[Path], model: Path) -> bytes:
        """Our ids of a corpus as Megatron-LM's tools write them: in one file, in the order of the text."""
        out = self.work / "ids"
        shutil.rmtree(out, ignore_errors=True)
        command = [sys.executable, "-m", "data_pipeline", "tokenize", str(self.plain(corpus)), "--name", "x"]
        command += ["--tokenizer", str(model), "--out", str(out), "--validation-fraction", "0"]
        # No record has this key, so all belong to one source.
        run([*command, "--source-key", "no such key", "--range-bytes", str(1 << 40)])
        (path,) = out.glob("*.bin")
        return path.read_bytes()

    def megatron_lm(
        self, corpus: list[Path], model: Path, workers: int, fast: bool = False, huge: bool = False
    ) -> Run:
        """Their tool, or their fast one."""
        assert self.megatron is not None
        prefix = self.work / ("megatron-fast" if fast else "megatron")
        tool = self.megatron / "tools" / ("preprocess_data_fast.py" if fast else "preprocess_data.py")
        inputs = [self.plain(files) for files in (self.one_document_each(workers), corpus)]
        words = [tool, *inputs, "--append-eod", "--output-prefix", prefix]
        if fast:
            words += ["--tokenizer-type", "HuggingFaceTokenizer", "--use-gigatoken"]
            words += ["--tokenizer-model", self.as_huggingface(model)]
        else:
            words += ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", model]
            words += ["--workers", workers, "--log-interval", 1000000]
        # What the tool needs besides (six, regex, triton ...) may lie on the caller's PYTHONPATH.
        path = [str(self.megatron), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {"PYTHONPATH": os.pathsep.join(path), "RAYON_NUM_THREADS": str(workers)}
        environment |= {"HF_HUB_OFFLINE": "1"} | (_HUGE_PAGES if huge else {})
        result = contestant("megatron", *words, environment=environment, python=self.python)
        # Its ids have two bytes each.
        return replace(result, tokens=Path(f"{prefix}_text_document.bin").stat().st_size // 2)

    def as_huggingface(self, model: Path) -> Path:
        """A directory with the same BPE model as a tokenizer.json: their fast tool reads no other."""
        from gigatoken._load.sentencepiece import sentencepiece_to_tokenizer_json

        directory = self.work / "huggingface"
        directory.mkdir(exist_ok=True)
        content = sentencepiece_to_tokenizer_json(model.read_bytes())
        (directory / "tokenizer.json").write_text(content, encoding="utf-8")
        names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "<unk>"}
        (directory / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")
        return directory

    def one_document_each(self, workers: int) -> list[Path]:
        """A corpus of as many documents and files as there are workers."""
        paths = [self.work / f"one-{workers}-{number}.jsonl.zst" for number in range(workers)]
        for path in paths:
            path.write_bytes(zstandard.compress(b'{"text": "one document"}\n'))
        return paths

    def plain(self, corpus: list[Path]) -> Path:
        """Files of a corpus as one plain file."""
        path = self.work / f"plain-{len(corpus)}-{corpus[0].name.removesuffix('.zst')}"
        if not path.exists():
            with open(path, "wb") as stream:
                for part in corpus:
                    stream.write(zstandard.ZstdDecompressor().decompressobj().decompress(part.read_bytes()))
        return path


def train(work: Path, corpus: list[Path], model_type: str) -> Path:
    """A model of 32,000 pieces from 20 MB of the corpus; not part of what is measured."""
    prefix = work / model_type
    command = [sys.executable, "-m", "data_pipeline", "train-tokenizer", *map(str, corpus)]
    run([*command, "--out", str(prefix), "--model-type", model_type, "--sample-bytes", "20000000"])
    return Path(f"{prefix}.model")


def measure(arguments: argparse.Namespace, work: Path) -> Measured:
    """All rows, each a list of runs; the contestants take turns."""
    bench = Bench(work, arguments.megatron_lm, str(arguments.megatron_python))
    corpus = write_corpus(work / "corpus", arguments.megabytes, _FILES)
    names = ["bpe", "unigram"] if arguments.unigram else ["bpe"]
    models = {name: train(work, corpus, name) for name in names}
    rows: dict[tuple[str, str, int], list[Run]] = {}
    plain = [bench.plain([path]) for path in corpus]

    def add(name: str, what: str, workers: int, result: Run) -> None:
        rows.setdefault((name, what, workers), []).append(result)
        print(f"{name}, {what}, {workers}: {result.cpu:.2f} CPU s, {result.wall:.2f} s", file=sys.stderr)

    for _ in range(arguments.repetitions):
        for name, model in models.items():
            fast = bench.megatron is not None and name == "bpe"
            for workers in _WORKERS:
                add(name, "bare", workers, bench.bare(_FASTEST[name], corpus, model, workers))
                add(name, "pipeline", workers, bench.pipeline(plain, model, workers))
                add(name, "pipeline, zst", workers, bench.pipeline(corpus, model, workers))
                if bench.megatron and "preprocess_data" in arguments.also:
                    add(name, "Megatron-LM", workers, bench.megatron_lm(corpus, model, workers))
                if fast:
                    result = bench.megatron_lm(corpus, model, workers, fast=True)
                    add(name, "Megatron-LM, fast", workers, result)
                if "huge_pages" in arguments.also:
                    result = bench.bare(_FASTEST[name], corpus, model, workers, huge=True)
                    add(name, "bare, huge pages", workers, result)
                    if fast:
                        result = bench.megatron_lm(corpus, model, workers, fast=True, huge=True)
                        add(name, "Megatron-LM, fast, huge pages", workers, result)
            if "sentencepiece" in arguments.also:
                add(name, "SentencePiece, lists", 1, bench.bare("lists", corpus, model, 1))
                if name == "bpe":
                    add(name, "SentencePiece", 1, bench.bare("batch", corpus, model, 1))
        if "datasets" in arguments.also and importlib.util.find_spec("datasets"):
            add("bpe", "datasets.map", 1, bench.datasets_map(corpus, models["bpe"], 1))
    equal = {}
    if bench.megatron:
        ours = bench.ids(corpus, models["bpe"])
        for prefix in ("megatron", "megatron-fast")["preprocess_data" not in arguments.also :]:
            theirs = (work / f"{prefix}_text_document.bin").read_bytes()
            equal[prefix] = theirs == ours if prefix == "megatron-fast" or names == ["bpe"] else None
    memory = {}
    for times in (1, _LARGER) if "memory" in arguments.also else ():
        larger = [work / f"larger-{times}-{path.name}" for path in corpus]
        for path, original in zip(larger, corpus, strict=True):
            path.write_bytes(times * original.read_bytes())  # so many zstd frames
        memory[times * arguments.megabytes] = bench.pipeline(larger, models["bpe"], _WORKERS[-1])
    return Measured(rows, dict.fromkeys(names, arguments.megabytes), memory, equal)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="How fast tokenising is.")
    parser.add_argument("--megabytes", type=int, default=80, help="text of the corpus")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--megatron-lm", type=Path, help="a checkout of NVIDIA/Megatron-LM")
    parser.add_argument("--megatron-python", type=Path, default=sys.executable, help="what runs its tools")
    parser.add_argument("--also", nargs="*", default=_ALSO, choices=_ALSO, help="what else to measure")
    parser.add_argument("--unigram", action="store_true", help="also measure a unigram model")
    parser.add_argument("--work", type=Path, help="keep corpus and models here; default: a temporary place")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        result = report(measure(arguments, work))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
