"""Any split of the work, any kill: the same commands again end with the same bytes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zstandard

from tests.data_pipeline.helpers import REPOSITORY, Workshop, contents, run, wait_until
from tests.ranks import run_program

pytestmark = pytest.mark.distributed

FILES = 6


@pytest.fixture(scope="module")
def arguments(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A tokenize command, without --out, over enough text to be interrupted (about 5 MB a unit)."""
    corpus = tmp_path_factory.mktemp("large")
    parts = [
        zstandard.ZstdDecompressor().decompressobj().decompress(p.read_bytes())
        for p in sorted(workshop.corpus.glob("*.zst"))
    ]
    for number in range(FILES):
        (corpus / f"{number}.jsonl").write_bytes(b"".join(parts[number % 2 :]) * 2)
    settings = ("--tokenizer", str(workshop.model), "--name", "cut", "--workers", "2")
    return ["tokenize", str(corpus), *settings]


@pytest.fixture(scope="module")
def uninterrupted(
    arguments: list[str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("whole") / "out"
    assert run(*arguments, "--out", out).code == 0
    return contents(out)


def start(arguments: list[str], out: Path, *more: str) -> subprocess.Popen[str]:
    """The command in a session of its own, as from a terminal that can send it Ctrl-C."""
    return subprocess.Popen(
        [sys.executable, "-m", "data_pipeline", *arguments, "--out", str(out), *more],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell starts background jobs with Ctrl-C ignored, and their children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
    )


def workers_of(parent: int) -> list[int]:
    """Process ids of the parent's workers (not of multiprocessing's resource tracker)."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [
        int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def documents_in_units(out: Path) -> int:
    """Documents of all units that are recorded."""
    records = [json.loads(path.read_bytes()) for path in (out / "units").glob("*.json")]
    return sum(group["documents"] for record in records for group in record["groups"])


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the workers in /proc")
@pytest.mark.parametrize(
    "victim",
    [
        "worker",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("all, by Ctrl-C", "parent")),
    ],
)
def test_what_is_killed_continues_with_what_is_missing(
    victim: str, arguments: list[str], uninterrupted: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    process = start(arguments, out)
    wait_until(lambda: any((out / "units").glob("*.json")), "finished unit")
    workers = workers_of(process.pid)
    assert len(workers) == 2
    if victim == "worker":  # another one takes its place, and its unit is made once more
        os.kill(workers[0], signal.SIGKILL)
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        assert contents(out) == uninterrupted
        return
    if victim == "parent":
        process.kill()
    else:
        os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    wait_until(lambda: not any(running(pid) for pid in workers), "end of the workers")
    if victim != "parent":
        assert process.returncode == 130
        *progress, last = errors.splitlines()  # on a slow machine it has said how far it is
        assert last == "error: interrupted; what is finished is kept: the same command continues"
        assert all("documents, " in line for line in progress), errors
    finished = documents_in_units(out)
    shards = json.loads(uninterrupted["manifest.json"])["shards"]
    everything = sum(shard["documents"] for shard in shards)
    assert 0 < finished < everything and not (out / "manifest.json").exists()
    done = run(*arguments, "--out", out)
    assert done.code == 0 and f" {everything - finished:,} documents, " in done.out, done.err
    assert contents(out) == uninterrupted  # no temporary file is left either


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_write_that_fails_is_one_sentence_and_can_be_continued(
    workshop: Workshop, tmp_path: Path, workers: str
) -> None:
    # A limit on the size of a file stands for a full disk: write() fails in the middle of a shard.
    out = tmp_path / "out"
    command = [str(word) for word in workshop.command(out, "--workers", workers)]
    limit = workshop.model.stat().st_size + 1000
    program = (
        f"import resource, runpy, sys\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
        f"sys.argv[1:] = {command!r}; runpy.run_module('data_pipeline', run_name='__main__')"
    )
    failed = run_program([sys.executable, "-c", program])
    assert failed.returncode == 2, failed.stderr
    (sentence,) = failed.stderr.strip().splitlines()
    assert sentence.startswith("error: cannot write the shards of demo-0000")
    assert "File too large" in sentence
    assert not (out / "manifest.json").exists()
    assert run(*command).code == 0
    assert contents(out) == contents(workshop.shards)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the workers in /proc")
def test_tasks_killed_again_and_again_at_any_moment(
    arguments: list[str], uninterrupted: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    generator = random.Random(3)
    splits = [("--num-tasks", "3", "--task", task) for task in "012"]
    for attempt in range(6):
        process = start(arguments, out, *generator.choice(splits))
        # From before the plan is written to the middle of the work, on a machine of any speed.
        deadline = time.monotonic() + generator.uniform(0.2, 0.9)
        while time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.001)
        victims = [process.pid] if attempt % 2 else [*workers_of(process.pid)[:1], process.pid]
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=60)
    for split in generator.sample(splits, len(splits)):
        assert run(*arguments, "--out", out, *split, "--workers", "1").code == 0
    assert run("merge-manifests", out).code == 0
    assert contents(out) == uninterrupted
