"""Mistakes that only a started rank sees, through the command line.

One sentence, exit 2, nothing half done.

The run directory of a refused run must not appear, and one that was there before must not change.
"""

import shutil
import socket
from pathlib import Path

import pytest

from tests.command_line import assert_refused
from tests.ports import free_ports
from tests.ranks import train_on_warm_ranks, warm_cli
from tests.tiny import tiny_overrides

pytestmark = pytest.mark.slow

TIMEOUT = 300  # a refusal comes within seconds on an idle machine; a busy one takes its time
SECONDS_TO_WAIT = 3


def one_of_two(rank: int) -> dict[str, str]:
    environment = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_ports(1)[0],
    }
    return {name: str(value) for name, value in environment.items()}


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        (
            one_of_two(0),
            ("rank 0 waited 3 s for 2 ranks at 127.0.0.1:", "check that every rank started"),
        ),
        (
            one_of_two(1),
            ("rank 1 waited 3 s for 2 ranks at 127.0.0.1:", "check that every rank started"),
        ),
        (
            {"RANK": "1", "LOCAL_RANK": "1"},
            ("the environment sets RANK but not WORLD_SIZE", "start ranks with torchrun"),
        ),
    ],
    ids=["rank 0 alone", "rank 1 alone", "half an environment"],
)
def test_a_rank_without_the_others_is_one_sentence_and_leaves_no_run_directory(
    environment: dict[str, str], sentence: tuple[str, ...], tiny_shards: Path, tmp_path: Path
) -> None:
    changes = {"parallel__timeout_seconds": SECONDS_TO_WAIT}
    overrides = tiny_overrides(tiny_shards, tmp_path / "runs", "run", **changes)
    assert_refused(warm_cli(["train", "demo", *overrides], TIMEOUT, environment), *sentence)
    assert not (tmp_path / "runs").exists()


def test_a_port_that_another_program_has_is_named(tiny_shards: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        environment = one_of_two(0) | {"MASTER_PORT": str(listener.getsockname()[1])}
        overrides = tiny_overrides(tiny_shards, tmp_path / "runs", "run")
        done = warm_cli(["train", "demo", *overrides], TIMEOUT, environment)
    taken = "which MASTER_PORT names, is taken by another program on 127.0.0.1"
    assert_refused(done, taken, "set MASTER_PORT to a free one")
    assert not (tmp_path / "runs").exists()


def test_a_damaged_shard_is_named_by_every_rank_once(tiny_shards: Path, tmp_path: Path) -> None:
    copy = tmp_path / "flipped"
    shutil.copytree(tiny_shards, copy)
    shard = copy / "tiny-train-PydocTopics_00000.bin"
    content = bytearray(shard.read_bytes())
    content[1000] ^= 1
    shard.write_bytes(content)
    done = train_on_warm_ranks(tiny_overrides(copy, tmp_path / "runs", "run"), 2, TIMEOUT)
    damaged = "tiny-train-PydocTopics_00000.bin does not have the SHA-256 that the manifest says"
    assert_refused(done, damaged, "python -m data_pipeline verify")
    assert not (tmp_path / "runs").exists()
