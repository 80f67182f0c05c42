"""What `benchmarks/tokenize.py` measures.

One corpus of real text in SlimPajama's format, one SentencePiece model of 32,000 pieces for each type, and on
them, at 1 and 4 processes, in turns, so that other work on the machine disturbs all alike:

* bare: SentencePiece over text that is in memory, ids thrown away, in so many processes at once;
* pipeline: ours, from the compressed files to shards on disk and a manifest with their hashes;
* Megatron-LM's tools/preprocess_data.py, from one plain file (it reads no zstd), if a checkout is given;
* datasets: load_dataset and map to ids, if `datasets` is installed.

Each is a process of its own. Wall times are the median of the repetitions and begin when the workers do: the
start-up is a column of its own (of Megatron-LM's tool it is the time for a file of one document). CPU
seconds are those of the whole process and its children, imports included; of `bare` those of its loop.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from corpus_text import write_corpus

_HERE = Path(__file__).parent
_TOKENS = 100e9
_FILES = 16
# BPE is four times slower, and its ratio to the bare loop settles sooner.
_BPE_MEGABYTES = 50
_MEMORY_MEGABYTES = (50, 500)


@dataclass(frozen=True)
class Run:
    """One measurement: seconds, MB.

    startup: of the processes, not in `wall`; rss_mb: the largest sum over the processes at one time;
    largest_mb: the largest of one process.
    """

    wall: float
    startup: float
    cpu: float
    tokens: int
    rss_mb: float
    largest_mb: float


def run(command: list[str], environment: dict[str, str] | None = None) -> Run:
    """Run a command that prints `seconds SECONDS tokens TOKENS cpu SECONDS` or not, watching its memory."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.monotonic()
    variables = os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {})
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables
    )
    peaks = [0.0, 0.0]
    watcher = threading.Thread(target=_watch, args=(process.pid, peaks))
    watcher.start()
    output, _ = process.communicate()
    whole = time.monotonic() - started
    watcher.join()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{output[-3000:]}")
    stated = dict(re.findall(r"(seconds|startup|tokens|cpu) ([\d.]+)", output))
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Run(
        float(stated.get("seconds", whole)),
        float(stated.get("startup", 0)),
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
    """Places of one benchmark, and the command of each contestant."""

    work: Path
    megatron: Path | None

    def pipeline(self, corpus: list[Path], model: Path, workers: int) -> Run:
        """Ours."""
        out = self.work / "out"
        shutil.rmtree(out, ignore_errors=True)
        program = str(_HERE / "pipeline_run.py")
        return run([sys.executable, program, str(workers), str(model), str(out), *map(str, corpus)])

    def bare(self, corpus: list[Path], model: Path, workers: int) -> Run:
        """SentencePiece alone."""
        return run([sys.executable, str(_HERE / "bare_loop.py"), str(workers), str(model), *map(str, corpus)])

    def megatron_lm(self, plain: Path, model: Path, workers: int) -> Run:
        """Their tool; its wall time is that of the whole command less that of one without documents."""
        assert self.megatron is not None
        prefix = self.work / "megatron"
        command = [sys.executable, str(self.megatron / "tools" / "preprocess_data.py"), "--append-eod"]
        command += ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(model)]
        command += ["--workers", str(workers), "--output-prefix", str(prefix), "--log-interval", "1000000"]
        # What the tool needs besides (six, regex, triton ...) may lie on the caller's PYTHONPATH.
        path = [str(self.megatron), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {"PYTHONPATH": os.pathsep.join(path)}
        empty = self.work / "one.jsonl"
        empty.write_text('{"text": "x"}\n')
        start = run([*command, "--input", str(empty)], environment)
        whole = run([*command, "--input", str(plain)], environment)
        tokens = Path(f"{prefix}_text_document.bin").stat().st_size // 2
        return replace(
            whole, wall=whole.wall - start.wall, startup=start.wall, cpu=whole.cpu - start.cpu, tokens=tokens
        )

    def datasets_map(self, corpus: list[Path], model: Path, workers: int) -> Run:
        """load_dataset and map, in a fresh cache."""
        cache = self.work / "datasets-cache"
        shutil.rmtree(cache, ignore_errors=True)
        program = str(_HERE / "datasets_map.py")
        command = [sys.executable, program, str(workers), str(model), str(cache), *map(str, corpus)]
        return run(command, {"HF_HUB_OFFLINE": "1"})


def train(work: Path, corpus: list[Path], model_type: str) -> Path:
    """A model of 32,000 pieces from 20 MB of the corpus; not part of what is measured."""
    prefix = work / model_type
    command = [
        sys.executable,
        "-m",
        "data_pipeline",
        "train-tokenizer",
        *map(str, corpus),
        "--out",
        str(prefix),
    ]
    run([*command, "--model-type", model_type, "--sample-bytes", "20000000"])
    return Path(f"{prefix}.model")


def decompressed(corpus: list[Path], path: Path) -> Path:
    """All of the corpus as one plain file."""
    import zstandard

    if not path.exists():
        with open(path, "wb") as stream:
            for part in corpus:
                stream.write(zstandard.ZstdDecompressor().decompressobj().decompress(part.read_bytes()))
    return path


def measure(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    """All rows, each a list of runs; the contestants take turns."""
    bench = Bench(work, arguments.megatron_lm)
    sizes = {"unigram": arguments.megabytes, "bpe": min(arguments.megabytes, _BPE_MEGABYTES)}
    rows: dict[str, list[Run]] = {}
    everything = write_corpus(work / "corpus", arguments.megabytes, _FILES)
    models = {model_type: train(work, everything, model_type) for model_type in sizes}
    for _ in range(arguments.repetitions):
        for model_type, megabytes in sizes.items():
            corpus, model = write_corpus(work / "corpus", megabytes, _FILES), models[model_type]
            for workers in (1, 4):
                key = f"{model_type} {{}} {workers}"
                rows.setdefault(key.format("bare"), []).append(bench.bare(corpus, model, workers))
                rows.setdefault(key.format("pipeline"), []).append(bench.pipeline(corpus, model, workers))
        if bench.megatron:
            plain = decompressed(everything, work / f"plain-{arguments.megabytes}.jsonl")
            taken = bench.megatron_lm(plain, models["unigram"], 4)
            rows.setdefault("unigram megatron-lm 4", []).append(taken)
        if importlib.util.find_spec("datasets"):
            taken = bench.datasets_map(everything, models["unigram"], 4)
            rows.setdefault("unigram datasets.map 4", []).append(taken)
    memory = {
        megabytes: bench.pipeline(write_corpus(work / "corpus", megabytes, _FILES), models["unigram"], 4)
        for megabytes in _MEMORY_MEGABYTES
    }
    return {"rows": rows, "megabytes": sizes, "memory": memory}


_COLUMNS = {
    "start s": lambda row, bare, ours: row.startup,
    "wall s": lambda row, bare, ours: row.wall,
    "CPU s": lambda row, bare, ours: row.cpu,
    "of bare": lambda row, bare, ours: bare.wall / row.wall,
    "CPU of bare": lambda row, bare, ours: bare.cpu / row.cpu,
    "ours/it": lambda row, bare, ours: row.wall / ours.wall,
    "CPU ours/it": lambda row, bare, ours: row.cpu / ours.cpu,
}


def median(runs: list[Run]) -> Run:
    """The median of every number."""
    values = {key: statistics.median(asdict(run)[key] for run in runs) for key in asdict(runs[0])}
    return Run(**values)


def report(result: dict[str, Any]) -> dict[str, Any]:
    """Print the tables; the same as a JSON value."""
    sizes, medians = result["megabytes"], {name: median(runs) for name, runs in result["rows"].items()}
    print(f"{'':26}{'MB/s':>9}" + "".join(f"{heading:>13}" for heading in _COLUMNS))
    table = {}
    for name, row in medians.items():
        model_type, workers = name.split()[0], name.split()[-1]
        bare, ours = medians[f"{model_type} bare {workers}"], medians[f"{model_type} pipeline {workers}"]
        values = {heading: column(row, bare, ours) for heading, column in _COLUMNS.items()}
        print(
            f"{name:26}{sizes[model_type] / row.wall:9.1f}" + "".join(f"{v:13.2f}" for v in values.values())
        )
        table[name] = values | {"runs": [asdict(run) for run in result["rows"][name]]}
    costs = {}
    for model_type, megabytes in sizes.items():
        row = medians[f"{model_type} pipeline 4"]
        rate = row.tokens / row.cpu
        costs[model_type] = {"tokens_per_second_and_core": rate, "core_hours_per_100b": _TOKENS / rate / 3600}
        print(
            f"{model_type}: {rate / 1e6:.2f} M tokens a second and core, "
            f"{megabytes * 1e6 / row.tokens:.2f} bytes a token; "
            f"100 B tokens cost {_TOKENS / rate / 3600:.1f} core-hours"
        )
    memory = {str(megabytes): asdict(run) for megabytes, run in result["memory"].items()}
    for megabytes, taken in result["memory"].items():
        print(
            f"{megabytes} MB of text, 4 workers: at most {taken.largest_mb:.0f} MB of memory in a process, "
            f"{taken.rss_mb:.0f} MB in all"
        )
    return {"megabytes": sizes, "table": table, "costs": costs, "memory": memory, "cores": os.cpu_count()}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="How fast tokenising is.")
    parser.add_argument("--megabytes", type=int, default=400, help="text of the corpus")
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
