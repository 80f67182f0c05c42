"""Speed of tokenising beside gigatoken alone and Megatron-LM's tools.

    python -m benchmarks.data.tokenizing [--megabytes 80] [--repetitions 3]
        [--also [preprocess_data] [huge_pages] [memory]] [--megatron-lm CHECKOUT [--megatron-python PYTHON]]

One corpus of real text in SlimPajama's format, one BPE model of 32,000 pieces, and on them, in turns, so that
other work on the machine disturbs all alike:

* bare: gigatoken alone;
* pipeline: ours, from plain files to shards and a manifest; and, zst, from the same files compressed;
* Megatron-LM's tools/preprocess_data.py, from the same text in one plain file (they read no zstd), and
  preprocess_data_fast.py, which is gigatoken with as many threads; if a checkout is given. Its newest one
  needs Python 3.12 and more packages (transformers, gigatoken): --megatron-python names an interpreter that
  has them;
* huge pages: bare, and Megatron-LM's fast tool, with the setting of glibc that the pipeline is measured with
  too, as slurm/tokenize.sh sets it.

What each does exactly: benchmarks.data.contestants. Imports and the start of processes are taken off: they do
not grow with the corpus. CPU seconds count on a machine with other work on it, wall seconds on an idle one.
Every ratio is the median, with quartiles, over the repetitions, of the ratio to what ran beside it in the
same repetition.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import zstandard

from benchmarks.data.corpus_text import write_corpus

_FILES = 2
_WORKERS = (1, 2)
_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
_NOTHING: Mapping[str, str] = MappingProxyType({})
# What may be left out, for a run that holds a quiet machine for minutes only.
_ALSO = ("preprocess_data", "huge_pages", "memory")
# Memory at the size of the corpus and at so many times that.
_LARGER = 3


@dataclass(frozen=True)
class Measured:
    """Repetition of a contestant: seconds, tokens, and the most MB that one of its processes held."""

    wall: float
    cpu: float
    tokens: int
    resident: float


def run(command: list[str], environment: Mapping[str, str] = _NOTHING) -> Measured:
    """Run a command that prints `measured: seconds S cpu S tokens N`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        _, status, used = os.wait4(process.pid, 0)
        output.seek(0)
        printed = output.read()
    if status:
        sys.exit(f"{' '.join(command)} failed:\n{printed[-3000:]}")
    stated = dict(re.findall(r"(seconds|cpu|tokens) (-?[\d.]+)", printed.rpartition("measured:")[2]))
    wall, cpu, tokens = (float(stated.get(name, 0)) for name in ("seconds", "cpu", "tokens"))
    return Measured(wall, cpu, int(tokens), used.ru_maxrss / 1e3)


def contestant(*words: object, environment: Mapping[str, str], python: str = sys.executable) -> Measured:
    """Run a contestant in a process of its own."""
    return run([python, "-m", "benchmarks.data.contestants", *map(str, words)], environment)


@dataclass(frozen=True)
class Bench:
    """The working directory, the corpus and the model, and the command of each contestant."""

    work: Path
    corpus: list[Path]
    model: Path
    megatron: Path | None
    python: str

    def bare(self, workers: int, huge: bool = False) -> Measured:
        """gigatoken alone."""
        environment = _HUGE_PAGES if huge else _NOTHING
        return contestant("bare", workers, self.model, *self.corpus, environment=environment)

    def pipeline(self, files: list[Path], workers: int) -> Measured:
        """Ours, into a fresh directory, with huge pages, as slurm/tokenize.sh does it."""
        out = self.work / "out"
        shutil.rmtree(out, ignore_errors=True)
        words = [*self.one_document_each(workers), "--", *files]
        return contestant("pipeline", workers, self.model, out, *words, environment=_HUGE_PAGES)

    def ids(self) -> bytes:
        """Our ids of the corpus as Megatron-LM's tools write them: in one file, in the order of the text."""
        out = self.work / "ids"
        shutil.rmtree(out, ignore_errors=True)
        command = [sys.executable, "-m", "data_pipeline", "tokenize", str(self.plain(self.corpus))]
        command += ["--name", "x", "--tokenizer", str(self.model), "--out", str(out)]
        # No record has this key, so all belong to one source.
        command += [
            "--validation-fraction",
            "0",
            "--source-key",
            "no such key",
            "--range-bytes",
            str(1 << 40),
        ]
        run(command)
        (path,) = out.glob("*.bin")
        return path.read_bytes()

    def megatron_lm(self, workers: int, fast: bool = False, huge: bool = False) -> Measured:
        """Their tool, or their fast one."""
        assert self.megatron is not None
        tool = self.megatron / "tools" / ("preprocess_data_fast.py" if fast else "preprocess_data.py")
        prefix = self.work / ("megatron-fast" if fast else "megatron")
        inputs = [self.plain(files) for files in (self.one_document_each(workers), self.corpus)]
        words: list[object] = [tool, *inputs, "--append-eod", "--output-prefix", prefix]
        if fast:
            words += ["--tokenizer-type", "HuggingFaceTokenizer", "--use-gigatoken"]
            words += ["--tokenizer-model", self.as_huggingface()]
        else:
            words += ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", self.model]
            words += ["--workers", workers, "--log-interval", 1000000]
        # What the tool needs besides (six, regex, triton ...) may lie on the caller's PYTHONPATH.
        path = [str(self.megatron), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {"PYTHONPATH": os.pathsep.join(path), "RAYON_NUM_THREADS": str(workers)}
        environment |= {"HF_HUB_OFFLINE": "1"} | (_HUGE_PAGES if huge else {})
        result = contestant("megatron", *words, environment=environment, python=self.python)
        # Its ids have two bytes each.
        return replace(result, tokens=Path(f"{prefix}_text_document.bin").stat().st_size // 2)

    def as_huggingface(self) -> Path:
        """A directory with the same BPE model as a tokenizer.json: their fast tool reads no other."""
        from gigatoken._load.sentencepiece import sentencepiece_to_tokenizer_json

        directory = self.work / "huggingface"
        directory.mkdir(exist_ok=True)
        content = sentencepiece_to_tokenizer_json(self.model.read_bytes())
        (directory / "tokenizer.json").write_text(content, encoding="utf-8")
        names = '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "<unk>"}'
        (directory / "tokenizer_config.json").write_text(names, encoding="utf-8")
        return directory

    def one_document_each(self, workers: int) -> list[Path]:
        """A corpus of as many documents and files as there are workers."""
        paths = [self.work / f"one-{workers}-{number}.jsonl.zst" for number in range(workers)]
        for path in paths:
            path.write_bytes(zstandard.compress(b'{"text": "one document"}\n'))
        return paths

    def plain(self, files: list[Path]) -> Path:
        """Files of a corpus as one plain file."""
        path = self.work / f"plain-{len(files)}-{files[0].name.removesuffix('.zst')}"
        if not path.exists():
            parts = (zstandard.ZstdDecompressor().decompressobj().decompress(f.read_bytes()) for f in files)
            path.write_bytes(b"".join(parts))
        return path


def train(work: Path, corpus: list[Path]) -> Path:
    """A model of 32,000 pieces from 20 MB of the corpus; not part of what is measured."""
    command = [sys.executable, "-m", "data_pipeline", "train-tokenizer", *map(str, corpus)]
    run([*command, "--out", str(work / "bpe"), "--sample-bytes", "20000000"])
    return work / "bpe.model"


def measure(bench: Bench, repetitions: int, also: list[str]) -> dict[tuple[str, int], list[Measured]]:
    """All rows, by contestant and number of workers, one entry a repetition; the contestants take turns."""
    rows: dict[tuple[str, int], list[Measured]] = {}
    plain = [bench.plain([path]) for path in bench.corpus]

    def add(name: str, workers: int, result: Measured) -> None:
        rows.setdefault((name, workers), []).append(result)
        print(f"{name}, {workers}: {result.cpu:.2f} CPU s, {result.wall:.2f} s", file=sys.stderr)

    for _ in range(repetitions):
        for workers in _WORKERS:
            add("bare", workers, bench.bare(workers))
            add("pipeline", workers, bench.pipeline(plain, workers))
            add("pipeline, zst", workers, bench.pipeline(bench.corpus, workers))
            if bench.megatron and "preprocess_data" in also:
                add("Megatron-LM", workers, bench.megatron_lm(workers))
            if bench.megatron:
                add("Megatron-LM, fast", workers, bench.megatron_lm(workers, fast=True))
            if "huge_pages" in also:
                add("bare, huge pages", workers, bench.bare(workers, huge=True))
                if bench.megatron:
                    result = bench.megatron_lm(workers, fast=True, huge=True)
                    add("Megatron-LM, fast, huge pages", workers, result)
    return rows


def report(rows: dict[tuple[str, int], list[Measured]], megabytes: int) -> None:
    """Print the table: rates, and how many times as long as the pipeline each contestant took."""
    print(f"{'':34}{'MB/CPU s':>10}{'M tokens/CPU s':>16}{'CPU s / ours':>22}{'s / ours':>22}")
    for (name, workers), runs in rows.items():
        cpu, tokens = (statistics.median(getattr(run, field) for run in runs) for field in ("cpu", "tokens"))
        line = f"{f'{name}, {workers}':34}{megabytes / cpu:>10.2f}{tokens / cpu / 1e6:>16.2f}"
        for clock in ("cpu", "wall"):
            pairs = zip(runs, rows["pipeline", workers], strict=True)
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
    parser.add_argument("--also", nargs="*", default=_ALSO, choices=_ALSO, help="what else to measure")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        corpus = write_corpus(work / "corpus", arguments.megabytes, _FILES)
        model = train(work, corpus)
        bench = Bench(work, corpus, model, arguments.megatron_lm, arguments.megatron_python)
        report(measure(bench, arguments.repetitions, arguments.also), arguments.megabytes)
        if bench.megatron:
            ours = bench.ids()
            for theirs in work.glob("*_text_document.bin"):
                print(f"ids equal to those of {theirs.name}: {theirs.read_bytes() == ours}")
        for times in (1, _LARGER) if "memory" in arguments.also else ():
            larger = [work / f"larger-{times}-{path.name}" for path in corpus]
            for path, original in zip(larger, corpus, strict=True):
                path.write_bytes(times * original.read_bytes())  # so many zstd frames
            held = bench.pipeline(larger, _WORKERS[-1]).resident
            print(f"{times * arguments.megabytes} MB of text: at most {held:.0f} MB of memory in a process")


if __name__ == "__main__":
    main()
