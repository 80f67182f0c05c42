"""What several tests of the package use besides the fixtures."""

from __future__ import annotations

import io
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data_pipeline.__main__ import main
from data_pipeline.io.files import to_checked_json
from data_pipeline.io.pool import Progress
from data_pipeline.shards.manifest import Manifest
from data_pipeline.shards.writing import ShardWriter, pack
from data_pipeline.sources.discovery import Inputs, RecordKeys, find_inputs
from data_pipeline.sources.records import Document, read_documents
from data_pipeline.tokenizer.encoder import Encoded
from data_pipeline.tokenizing.plan import Task, TokenizeOptions
from data_pipeline.tokenizing.rejects import Limits
from data_pipeline.tokenizing.run import Made, Run

REPOSITORY = Path(__file__).resolve().parents[2]


def quiet(progress: Progress) -> None:
    """A reporter that shows nothing."""


@dataclass(frozen=True)
class Workshop:
    """What the fixtures made: a corpus of 8 files, a tokenizer of 1,000 pieces, their shards."""

    corpus: Path
    model: Path
    shards: Path

    def run(
        self,
        out: Path,
        inputs: Sequence[Path] = (),
        limits: Limits | None = None,
        workers: int = 1,
        report: Callable[[Progress], None] = quiet,
        files: slice = slice(None),
        model: Path | None = None,
        **options: Any,
    ) -> Run:
        """A run of tokenize, by default what made the shards; of some of the inputs' files."""
        all_inputs = find_inputs(inputs or [self.corpus])
        return Run(
            Inputs(all_inputs.files[files], all_inputs.passed_over),
            model or self.model,
            out,
            TokenizeOptions(**{"name": "small"} | options),
            workers=workers,
            report=report,
            limits=limits or Limits(),
        )

    def tokenize(self, out: Path, *inputs: Path, **settings: Any) -> tuple[Manifest, int]:
        """Make a shard directory, or finish it; the manifest, and how many units were made now."""
        run = self.run(out, inputs, **settings)
        counts = run.make()
        return run.finish(), counts.now

    def make_tasks(self, out: Path, count: int, *indices: int, **settings: Any) -> list[Made]:
        """Make the units of some tasks, by default of all."""
        return [
            self.run(out, **settings).make(Task(index, count)) for index in indices or range(count)
        ]

    def command(self, out: Path, *more: str | Path, corpus: str | Path = "") -> list[str | Path]:
        """The command that makes the shards, or those of another corpus."""
        options = ["--tokenizer", self.model, "--name", "small", "--out", out]
        return ["tokenize", corpus or self.corpus, *options, *more]


def all_documents(directory: Path) -> list[Document]:
    """Every document below a directory, in the order of the pipeline."""
    return [
        d for file in find_inputs([directory]).files for d in read_documents(file, RecordKeys())
    ]


@dataclass(frozen=True)
class Outcome:
    """How a command line ended."""

    code: int
    out: str
    err: str

    def sentence(self) -> str:
        """The one error sentence, after checking that the command ended as it should."""
        assert self.code == 2, (self.code, self.out, self.err)
        assert "Traceback" not in self.err
        lines = self.err.strip().splitlines()
        assert len(lines) == 1 and lines[0].startswith("error: "), self.err
        return lines[0]


def run(*arguments: str | Path) -> Outcome:
    """`python -m data_pipeline ARGUMENTS`, in this process: what it does not handle fails."""
    out = io.StringIO()
    err = io.StringIO()
    code = 0
    words = [str(REPOSITORY / "data_pipeline/__main__.py"), *map(str, arguments)]
    saved_argv = sys.argv
    sys.argv = words
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main()
    except SystemExit as ended:
        code = int(ended.code or 0)
    finally:
        sys.argv = saved_argv
    return Outcome(code, out.getvalue(), err.getvalue())


@contextmanager
def apart(**variables: str) -> Iterator[Callable[..., Outcome]]:
    """`run` in another process, for variables that a library reads once, as it is imported.

    One process for all commands: importing `datasets` takes longer than most of them.
    """
    program = "from tests.data_pipeline.helpers import answer_commands; answer_commands()"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=REPOSITORY,
        env=os.environ | {"USE_TORCH": "0"} | variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:

        def ask(*arguments: str | Path) -> Outcome:
            assert process.stdin is not None and process.stdout is not None
            print(json.dumps([*map(str, arguments)]), file=process.stdin, flush=True)
            return Outcome(*json.loads(process.stdout.readline()))

        yield ask


def answer_commands() -> None:
    """Do what each line of standard input says, and answer with its outcome."""
    for line in sys.stdin:
        print(json.dumps(astuple(run(*json.loads(line)))), flush=True)


def write_texts(path: Path, texts: Iterable[str]) -> Path:
    """A file of JSON lines with these texts."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def change_checked(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the content of a file of checked JSON and make its checksum right again."""
    value = json.loads(path.read_bytes())
    value.pop("checksum")
    change(value)
    path.write_bytes(to_checked_json(value))


@contextmanager
def files_limited_to(size: int) -> Iterator[None]:
    """A limit of the bytes of a file stands for a full disk: either way a write is cut short."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def contents(directory: Path) -> dict[str, bytes]:
    """Every file below a directory: its bytes by its relative path."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait up to a minute for something that another process does."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"no {what} in 60 s"
        time.sleep(0.005)


def write_documents(
    writer: ShardWriter, documents: list[npt.NDArray[np.int32]], eod_id: int = 2
) -> None:
    """Append documents to a shard."""
    encoded = Encoded.of(documents, eod_id)
    writer.append_ids(pack(encoded.ids, writer.dtype))
    writer.append_lengths(encoded.lengths)


ShardSpec = tuple[str, str, int, list[list[int]]]
MakeManifest = Callable[[list[ShardSpec]], Manifest]


def digests(manifest: Manifest) -> list[tuple[str, str, str]]:
    """The shards' content."""
    return [(shard.name, shard.bin_sha256, shard.idx_sha256) for shard in manifest.shards]
