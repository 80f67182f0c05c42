"""Faults of other commands: inputs of tokenize, an export, seals, the controller of a Slurm."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from filecmp import cmp
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import psutil

from data_pipeline.shards.manifest import read_manifest
from data_pipeline.sources.discovery import RecordKeys, find_inputs
from data_pipeline.sources.records import read_documents
from tests.data_pipeline.helpers import digests
from tests.data_pipeline.sources.range_server import serving
from tests.fabricated_runs import write_run
from tests.slurm.cluster import Cluster, missing_programs
from tests.slurm.drills import Drills
from tests.slurm.drills import References as Uninterrupted
from tools.faults.plan import LAYOUTS, Case, Fault
from tools.faults.references import References
from tools.faults.starts import Disturb, End, Start, leave_alone, run_command

FILES, FILE_BYTES = 4, 6 << 20
SMALL_FILES = 240
"""Of a web server: each is asked for at least twice, so that some answers of a hundred are 503."""
SHARE_OF_503 = 0.01
DAMAGED_INPUTS = 3
LEAST_AWAY, MORE_AWAY = 15.0, 30.0
"""Seconds without a controller."""
HELD_BEFORE = 4


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.mkdir()


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _dangling(path: Path) -> None:
    path.symlink_to(path.with_name("gone"))


def _brackets(path: Path) -> None:
    path.write_text("[" * 100_000)


def _no_seal(path: Path) -> None:
    path.write_text('{"sealed": {"seeds": null}, "sha256": "0"}')


STRANGE = (_fifo, _folder, _device, _dangling, _brackets, _no_seal)
"""What makes a file that is no seal."""


def not_drawn() -> dict[Fault, str]:
    """The kinds that this machine cannot try, and why."""
    missing = {}
    if programs := missing_programs():
        missing[Fault.CONTROLLER_AWAY] = f"no Slurm here: {', '.join(programs)} missing"
    if find_spec("aiohttp") is None:
        missing[Fault.WEB_503] = "the extra `http` is not installed"
    if find_spec("transformers") is None:
        missing[Fault.EXPORT_KILLED] = "the extra `export` is not installed"
    return missing


class Verdict(Protocol):
    """What these cases note of a `cases.Outcome`."""

    happened: bool
    sentence: str
    wrong_end: list[str]
    left: list[str]
    different: list[str]


class Outside:
    """Runs these cases; what is undisturbed is made once, when it is first asked for.

    Args:
        corpus: text of all inputs, with `tokenizer.model` beside it.
    """

    def __init__(self, directory: Path, corpus: Path, references: References) -> None:
        self._directory, self._corpus, self._references = directory, corpus, references
        self._lock = threading.RLock()
        self._one_slurm = threading.Lock()
        self._stack = ExitStack()
        self._made: dict[str, object] = {}

    def close(self) -> None:
        """End the Slurm, if there is one."""
        self._stack.close()

    def run(self, case: Case, directory: Path, verdict: Verdict) -> None:
        """From the fault to the verdict.

        Args:
            case: its fault is one of OUTSIDE.
            directory: of the case's files.
            verdict: notes what happened.
        """
        tried = {
            Fault.INPUT_CUT: self._input_cut,
            Fault.WEB_503: self._web_503,
            Fault.EXPORT_KILLED: self._export_killed,
            Fault.CONTROLLER_AWAY: self._controller_away,
            Fault.STRANGE_SEAL: self._strange_seal,
        }
        tried[case.fault](case, directory, verdict)

    # --- tokenize ---

    def _input_cut(self, case: Case, directory: Path, verdict: Verdict) -> None:
        """One of four plain files becomes shorter while they are read."""
        whole = self._shards_of("large")
        inputs, out = directory / "inputs", directory / "shards"
        shutil.copytree(self._inputs("large"), inputs)
        file = sorted(inputs.iterdir())[int(case.file * FILES)]

        size = file.stat().st_size

        def cut(start: Start) -> None:
            if start.until(lambda: _position(start, file) > 0.8 * case.moment * size):
                os.truncate(file, int(case.place * size))

        end = self._tokenize([inputs], out, directory / "disturbed.log", cut)
        verdict.left += end.left
        verdict.happened = end.code != 0
        if verdict.happened:
            named = [line for line in end.errors.splitlines() if line.startswith("damaged input ")]
            verdict.sentence = " ".join(named)
            if (
                end.hung
                or end.code != DAMAGED_INPUTS
                or len(end.sentences) != 1
                or end.has_traceback
            ):
                verdict.wrong_end.append(f"exit code {end.code}: {end.errors[-300:]}")
            elif len(named) != 1 or file.name not in named[0]:
                verdict.wrong_end.append(f"not {file.name} alone is named: {named}")
            shutil.copyfile(self._inputs("large") / file.name, file)
            out = directory / "again"
            end = self._tokenize([inputs], out, directory / "again.log")
            verdict.left += end.left
        verdict.different += _other_shards(end, out, whole)

    def _web_503(self, case: Case, directory: Path, verdict: Verdict) -> None:
        """One answer of a hundred of a web server is 503."""
        whole = self._shards_of("small")
        files = {
            f"x/{path.name}": path.read_bytes() for path in sorted(self._inputs("small").iterdir())
        }
        chance = random.Random(f"{case.number}/{case.moment}")
        out = directory / "shards"

        def unlucky() -> bool:
            return chance.random() < SHARE_OF_503

        with serving(files) as web:
            web.unlucky = unlucky
            urls = [web.url(name) for name in files]
            end = self._tokenize(urls, out, directory / "disturbed.log")
            refused = web.refused
        verdict.happened = refused > 0
        verdict.sentence = f"{refused} answers were 503"
        verdict.left += end.left
        if end.hung or end.code != 0 or end.has_traceback:
            verdict.wrong_end.append(f"exit code {end.code}: {end.errors[-300:]}")
        verdict.different += _other_shards(end, out, whole)

    def _tokenize(
        self, inputs: list[object], out: Path, log: Path, disturb: Disturb = leave_alone
    ) -> End:
        tokenizer = ["--tokenizer", self._corpus.parent / "tokenizer.model", "--name", "text"]
        options = ["--out", out, "--workers", "2", "--files-per-shard", "40", *tokenizer]
        command = [sys.executable, "-m", "data_pipeline", "tokenize", *inputs, *options]
        return run_command([str(word) for word in command], out, log, disturb)

    def _inputs(self, size: str) -> Path:
        """Four large files or many small ones, of the corpus's text in plain lines."""
        with self._lock:
            directory = self._directory / "outside" / f"inputs-{size}"
            if not directory.exists():
                making = directory.with_suffix(".making")
                making.mkdir(parents=True)
                _write_inputs(self._corpus, making, size)
                making.rename(directory)
            return directory

    def _shards_of(self, size: str) -> Path:
        """The shards of these inputs, undisturbed."""
        with self._lock:
            if size not in self._made:
                out = self._directory / "outside" / f"shards-{size}"
                log = self._directory / f"{size}.log"
                end = self._tokenize([self._inputs(size)], out, log)
                assert end.code == 0 and not end.left, (end.errors, end.left)
                self._made[size] = out
            return self._made[size]  # type: ignore[return-value]

    # --- export ---

    def _export_killed(self, case: Case, directory: Path, verdict: Verdict) -> None:
        """SIGKILL of `export` at any moment; then the same command again."""
        whole, seconds = self._exported()
        out = directory / "exports/model"

        def kill(start: Start) -> None:
            start.until(lambda: start.seconds > case.moment * seconds)
            verdict.happened = start.alive
            for process in start.family():
                process.send_signal(signal.SIGKILL)

        end = self._export(out, directory / "disturbed.log", kill)
        verdict.left += end.left
        # If the export is there, it had done all, and was leaving.
        verdict.happened = verdict.happened and not out.exists()
        if verdict.happened:
            if end.code != -signal.SIGKILL:
                verdict.wrong_end.append(f"exit code {end.code}")
            end = self._export(out, directory / "again.log")
            verdict.left += end.left
        beside = [path.name for path in out.parent.iterdir() if path != out]
        verdict.left += [f"{name} beside --out" for name in beside]
        if not out.exists():
            verdict.different.append(f"no export: exit code {end.code}: {end.errors[-300:]}")
        elif contents(out) != contents(whole):
            verdict.different.append("the export has other files")

    def _exported(self) -> tuple[Path, float]:
        with self._lock:
            if "export" not in self._made:
                out = self._directory / "outside/exported/model"
                end = self._export(out, self._directory / "export.log")
                assert end.code == 0 and not end.left, (end.errors, end.left)
                self._made["export"] = out, end.seconds
            return self._made["export"]  # type: ignore[return-value]

    def _export(self, out: Path, log: Path, disturb: Disturb = leave_alone) -> End:
        run = self._references.of(next(iter(LAYOUTS))).run
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pretrain", "export", str(run), "--out", str(out)]
        return run_command(command, out, log, disturb)

    # --- compare ---

    def _strange_seal(self, case: Case, directory: Path, verdict: Verdict) -> None:
        """A file that is no seal lies where the seals of two runs are looked for."""
        runs = directory / "runs"
        write_run(runs, "baseline")
        write_run(runs, "other", "orthogonal")
        file = runs / "seals/0123456789ab.json"
        file.parent.mkdir()
        strange = STRANGE[int(case.file * len(STRANGE))]
        strange(file)
        found = self._compare(runs, directory / "disturbed.log", verdict)
        verdict.happened = True
        said = [line for line in found.output.splitlines() if str(file) in line]
        verdict.sentence = " ".join(said)
        if found.hung or found.code != 0 or found.has_traceback:
            verdict.wrong_end.append(f"exit code {found.code}: {found.errors[-300:]}")
        elif str(file) not in (directory / "comparison/report.md").read_text():
            verdict.wrong_end.append(f"the report does not name {file.name} ({strange.__name__})")
        whole = directory / "whole"
        shutil.move(directory / "comparison", whole)
        shutil.rmtree(file.parent)
        self._compare(runs, directory / "again.log", verdict)
        before, now = (each / "comparison.json" for each in (whole, directory / "comparison"))
        if not (before.is_file() and now.is_file() and cmp(before, now, shallow=False)):
            verdict.different.append("another comparison.json")

    def _compare(self, runs: Path, log: Path, verdict: Verdict) -> End:
        out = log.with_name("comparison")
        command = [sys.executable, "-m", "pretrain", "compare", runs / "baseline", runs / "other"]
        words = [str(word) for word in [*command, "--out", out]]
        end = run_command(words, out, log)
        verdict.left += end.left
        return end

    # --- Slurm ---

    def _controller_away(self, case: Case, _: Path, verdict: Verdict) -> None:
        """Slurmctld is gone while a rank is killed, or all are told to save and end; it returns."""
        drills = self._drills()
        with self._one_slurm:
            job = drills.train(f"away_{case.seed}_{case.number}", settings={"HOLD_AT": HELD_BEFORE})
            try:
                job.wait_for_step(HELD_BEFORE - 1)
                ranks = drills.cluster.ranks(job.number)
                verdict.happened = bool(ranks)
                with _away(drills.cluster, LEAST_AWAY + case.moment * MORE_AWAY):
                    struck = (
                        [ranks[case.rank % len(ranks)]] if case.whole_family else ranks.values()
                    )
                    for rank in struck:
                        rank.send_signal(signal.SIGKILL if case.whole_family else signal.SIGUSR1)
                ended = job.end()
                if (ended.state, ended.restarts) != ("COMPLETED", 1):
                    how = f"{ended.state} after {ended.restarts} restarts"
                    verdict.wrong_end.append(f"{how}: {job.log[-300:]}")
                drills.assert_finished(job)
            except AssertionError as error:
                verdict.different.append(str(error)[:1000])
            verdict.left += [
                f"process {each.pid}" for each in drills.cluster.ranks(job.number).values()
            ]

    def _drills(self) -> Drills:
        with self._lock:
            if "drills" not in self._made:
                cluster = self._stack.enter_context(Cluster(nodes=3))
                directory = self._directory / "outside/slurm"
                directory.mkdir(parents=True)
                shards = self._references.shards
                undisturbed = Uninterrupted(shards, directory / "runs")
                self._made["drills"] = Drills(
                    cluster, shards, directory, undisturbed, nodes=tuple(cluster.nodes[:2])
                )
            return self._made["drills"]  # type: ignore[return-value]


def _position(start: Start, file: Path) -> int:
    """How far a process of this start has read a file; -1 where none has opened it."""
    found = [-1]
    for process in start.family():
        with suppress(psutil.Error, OSError):
            found += [each.position for each in process.open_files() if each.path == str(file)]
    return max(found)


@contextmanager
def _away(cluster: Cluster, seconds: float) -> Iterator[None]:
    cluster.kill_controller()
    try:
        yield
        time.sleep(seconds)
    finally:
        cluster.start_controller()


def contents(directory: Path) -> dict[str, str]:
    """SHA-256 of every file."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _write_inputs(corpus: Path, directory: Path, size: str) -> None:
    found = find_inputs([corpus]).files
    texts = [each.text for file in found for each in read_documents(file, RecordKeys())]
    lines = [json.dumps({"text": text}).encode() + b"\n" for text in texts]
    if size == "small":
        for number in range(SMALL_FILES):
            (directory / f"{number:03d}.jsonl").write_bytes(b"".join(lines[number::SMALL_FILES]))
        return
    for number in range(FILES):
        with (directory / f"{number}.jsonl").open("wb") as file:
            while file.tell() < FILE_BYTES:
                file.writelines(lines)


def _other_shards(end: End, out: Path, whole: Path) -> list[str]:
    if end.hung or end.code != 0:
        return [f"no shards: exit code {end.code}: {end.errors[-300:]}"]
    return [] if digests(read_manifest(out)) == digests(read_manifest(whole)) else ["other shards"]
