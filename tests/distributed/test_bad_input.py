"""Mistakes that only a started rank sees, through the command line.

One sentence, exit 2, nothing half done.

The run directory of a refused run must not appear, and one that was there before must not change.
"""

import shutil
import socket
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.command_line import (
    assert_refused,
    deterministic_metrics,
    files_under,
    logged_steps,
    started,
    wait_until,
)
from tests.ports import free_ports
from tests.ranks import train_on_warm_ranks, warm_cli
from tests.tiny import tiny_overrides

Refused = dict[str, tuple[subprocess.CompletedProcess[str], bool]]
TIMEOUT = 300  # a refusal comes within seconds on an idle machine; a busy one takes its time
SECONDS_TO_WAIT = 3


class Cases:
    """Commands that must be refused, on a trained run or without any."""

    def __init__(self, shards: Path, directory: Path) -> None:
        self.shards = shards
        self.directory = directory
        self.trained = directory / "trained" / "run"
        done = train_on_warm_ranks(self.overrides("trained"), ranks=1)
        assert done.returncode == 0, done.stderr

    def overrides(self, name: str, **changes: object) -> list[str]:
        return tiny_overrides(
            self.shards, self.directory / name, "run", schedule__steps=2, **changes
        )

    def resumed(self, ranks: int) -> tuple[subprocess.CompletedProcess[str], bool]:
        """(the process, whether the trained run's directory is as it was before)"""
        before = files_under(self.trained)
        done = self._run(self.overrides("trained"), ranks, {})
        return done, files_under(self.trained) == before

    def fresh(
        self,
        name: str,
        ranks: int | None = None,
        environment: dict[str, str] | None = None,
        **changes: object,
    ) -> tuple[subprocess.CompletedProcess[str], bool]:
        """(the process, whether it left no run directory)"""
        done = self._run(self.overrides(name, **changes), ranks, environment or {})
        return done, not (self.directory / name).exists()

    @staticmethod
    def _run(
        overrides: list[str], ranks: int | None, environment: dict[str, str]
    ) -> subprocess.CompletedProcess[str]:
        if ranks:
            return train_on_warm_ranks(overrides, ranks, TIMEOUT)
        return warm_cli(["train", "demo", *overrides], TIMEOUT, environment)


@pytest.fixture(scope="module")
def refused(tiny_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Refused:
    """{case: (process, directory in order)}.

    Three run at a time, for they use one core each, or wait.
    """
    directory = tmp_path_factory.mktemp("bad_input")
    listener = socket.create_server(("127.0.0.1", 0))
    port = {"MASTER_PORT": str(listener.getsockname()[1])}
    cases = Cases(tiny_shards, directory)
    commands: dict[str, Callable[[], tuple[subprocess.CompletedProcess[str], bool]]] = {
        "ranks that do not divide": lambda: cases.resumed(ranks=3),
        "damaged shard": lambda: cases.fresh(
            "shard", ranks=2, data__directory=_with_a_flipped_byte(cases)
        ),
        "rank 0 alone": lambda: cases.fresh("rank0", environment=_one_of_two(0), **_IMPATIENT),
        "rank 1 alone": lambda: cases.fresh("rank1", environment=_one_of_two(1), **_IMPATIENT),
        "taken port": lambda: cases.fresh("port", environment=_one_of_two(0) | port),
        "half an environment": lambda: cases.fresh(
            "environment", environment={"RANK": "1", "LOCAL_RANK": "1"}
        ),
    }
    with listener, ThreadPoolExecutor(max_workers=3) as pool:
        running = {case: pool.submit(command) for case, command in commands.items()}
        return {case: future.result() for case, future in running.items()}


_IMPATIENT = {"parallel__timeout_seconds": SECONDS_TO_WAIT}


def _one_of_two(rank: int) -> dict[str, str]:
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_ports(1)[0],
    }
    return {name: str(value) for name, value in place.items()}


def _with_a_flipped_byte(cases: Cases) -> Path:
    copy = cases.directory / "flipped"
    shutil.copytree(cases.shards, copy)
    shard = copy / "tiny-train-PydocTopics_00000.bin"
    content = bytearray(shard.read_bytes())
    content[1000] ^= 1
    shard.write_bytes(content)
    return copy


SENTENCES = {
    "ranks that do not divide": (
        "data.global_batch_size=8 is not divisible by data.micro_batch_size=2 times 3 "
        "data-parallel ranks",
        "the number of processes",
    ),
    "damaged shard": (
        "tiny-train-PydocTopics_00000.bin does not have the SHA-256 that the manifest says",
        "python -m data_pipeline verify",
    ),
    "rank 0 alone": (
        "rank 0 waited 3 s for 2 ranks at 127.0.0.1:",
        "check that every rank started",
    ),
    "rank 1 alone": (
        "rank 1 waited 3 s for 2 ranks at 127.0.0.1:",
        "check that every rank started",
    ),
    "taken port": (
        "which MASTER_PORT names, is taken by another program on 127.0.0.1",
        "set MASTER_PORT to a free one",
    ),
    "half an environment": (
        "the environment sets RANK but not WORLD_SIZE",
        "start ranks with torchrun",
    ),
}


@pytest.mark.parametrize("case", SENTENCES)
def test_a_mistake_is_one_sentence_and_leaves_the_run_directory_alone(
    case: str, refused: Refused
) -> None:
    done, directory_in_order = refused[case]
    assert_refused(done, *SENTENCES[case])
    assert directory_in_order


def test_a_run_killed_before_its_first_checkpoint_starts_again(
    tiny_shards: Path, tmp_path: Path
) -> None:
    overrides = tiny_overrides(tiny_shards, tmp_path, "run", schedule__steps=60)
    run = tmp_path / "run"
    with started(overrides, 1, tmp_path / "log") as launcher:
        wait_until(lambda: len(logged_steps(run)) > 1, launcher, "the first steps")
        launcher.kill()
        launcher.wait(timeout=60)
    assert (run / "state").read_text() == "running\n"
    assert not list(run.rglob("COMPLETE")) and not (run / "summary.json").exists()
    before = deterministic_metrics(run)
    assert 1 < len(before) < 60
    assert_refused(
        warm_cli(["compare", str(run)], TIMEOUT),
        "has not finished (its state is 'running')",
        "resume it",
    )

    done = train_on_warm_ranks(overrides, ranks=1)
    assert done.returncode == 0, done.stderr
    assert (run / "state").read_text() == "finished\n"
    assert logged_steps(run) == list(range(1, 61))
    assert deterministic_metrics(run)[: len(before)] == before
    assert (run / "checkpoints/step_00000060/COMPLETE").is_file()
