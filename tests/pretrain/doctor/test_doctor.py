"""The preflight with real gloo ranks, each started on its own as srun would, with a node name of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from pretrain.doctor.verdict import (
    BAD_NODES,
    SITE,
)
from tests.conftest import data_pipeline
from tests.ranks import ROOT, rank_environment
from tests.tiny import tiny_overrides

pytestmark = pytest.mark.distributed


class Ranks:
    """Doctor processes that meet in a store of the test's own, as under torchrun."""

    def __init__(self, world_size: int, directory: Path) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self.world_size, self.directory = world_size, directory
        self.processes: dict[int, subprocess.Popen[str]] = {}

    def start(
        self, rank: int, node: str, arguments: Sequence[str], cwd: Path = ROOT, **environment: str
    ) -> None:
        env = rank_environment() | {
            "PYTHONPATH": str(ROOT),
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "SLURMD_NODENAME": node,
            **environment,
        }
        command = [sys.executable, "-m", "pretrain", "doctor", "demo", *arguments]
        report = ["--report", str(self.directory / "report.json")]
        pipe = subprocess.PIPE
        self.processes[rank] = subprocess.Popen(
            [*command, *report], cwd=cwd, env=env, stdout=pipe, stderr=pipe, text=True
        )

    def wait(self, rank: int, *codes: int) -> str:
        """The rank's output, once it has ended with one of `codes`."""
        out, err = self.processes[rank].communicate(timeout=300)
        assert self.processes[rank].returncode in codes, (rank, out, err)
        return out + err

    def report(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.directory / "report.json").read_text())
        return content


@pytest.fixture
def ranks(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ranks]:
    started = Ranks(request.param, tmp_path)
    yield started
    for process in started.processes.values():
        process.kill()
        process.communicate()


def texts(report: dict[str, Any]) -> dict[tuple[str, str], str]:
    """(node, check) -> text; node "" for problems of no node."""
    return {(",".join(p["nodes"]), p["check"]): p["text"] for p in report["problems"]}


@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_fit_nodes(ranks: Ranks, tiny_shards: Path, tmp_path: Path) -> None:
    overrides = tiny_overrides(tiny_shards, tmp_path / "runs", "fit", data__global_batch_size=12)
    for rank, node in enumerate(("n1", "n1", "n2")):
        ranks.start(rank, node, overrides)
    said = ranks.wait(0, 0)
    assert ranks.wait(1, 0) == ranks.wait(2, 0) == ""
    report = ranks.report()
    assert (report["exit_code"], report["bad_nodes"], report["problems"]) == (0, [], [])
    assert {node: facts["ranks"] for node, facts in report["nodes"].items()} == {"n1": [0, 1], "n2": [2]}
    assert report["nodes"]["n1"]["all_reduce_gb_per_s"] > 0
    assert abs(report["nodes"]["n2"]["clock_ahead_seconds"]) < 5
    assert "frozen bank: all 16 heads regenerated and compared on 3 ranks" in said
    assert "fit for this run: all 3 ranks on 2 nodes" in said
    assert sum(line.endswith(" ok") for line in said.splitlines()) == 2
    assert not (tmp_path / "runs").exists() and not list(tmp_path.glob(".doctor*"))  # nothing is left behind


@pytest.mark.parametrize("ranks", [4], indirect=True)
def test_other_data_no_data_and_another_bank_are_named(
    ranks: Ranks, tiny_shards: Path, tmp_path: Path
) -> None:
    """The same config on every rank, as under srun, but each node sees other files at the same path."""
    other = tmp_path / "n2" / "shards"
    arguments = ("--tokenizer", tiny_shards.parent / "tokenizer.model", "--out", other, "--name", "tiny")
    data_pipeline("tokenize", tiny_shards.parent / "corpus", *arguments, "--validation-fraction", 0.2)
    for node in ("n1", "n3", "n4"):
        (tmp_path / node).mkdir()
    for node in ("n1", "n4"):
        (tmp_path / node / "shards").symlink_to(tiny_shards)
    overrides = tiny_overrides(Path("shards"), Path("runs"), "unfit")
    for rank, node in enumerate(("n1", "n2", "n3", "n4")):
        seed = ["attention.seed=99"] if node == "n4" else []
        ranks.start(rank, node, overrides + seed, cwd=tmp_path / node)
    said = ranks.wait(0, BAD_NODES)
    for rank in (1, 2, 3):
        ranks.wait(rank, BAD_NODES)
    report = ranks.report()
    found = texts(report)
    assert report["bad_nodes"] == ["n2", "n3", "n4"]
    assert "manifest fingerprint" in found["n2", "data"]
    assert "data directory shards does not exist" in found["n3", "data"]
    assert "layer 0 query head 0" in found["n4", "bank"] and "overrides differ" in found["n4", "config"]
    assert set(found) == {("n2", "data"), ("n3", "data"), ("n4", "bank"), ("n4", "config")}
    assert "bad node n3: data directory shards does not exist" in said
    assert said.splitlines()[-1] == "bad-nodes: n2,n3,n4"  # what the job script gives to --exclude


@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_a_rank_that_never_comes_and_one_that_falls_silent_are_named(
    ranks: Ranks, tiny_shards: Path, tmp_path: Path
) -> None:
    overrides = tiny_overrides(tiny_shards, tmp_path, "absent", data__global_batch_size=12)
    step = {"SLURM_STEP_NODELIST": "n[1-3]", "SLURM_STEP_TASKS_PER_NODE": "1(x3)"}
    ranks.start(1, "n2", [*overrides, "--timeout", "200"], **step)
    ranks.store.wait(["doctor/0/hello/1"], timedelta(seconds=200))
    os.kill(ranks.processes[1].pid, signal.SIGSTOP)  # as a node that hangs
    ranks.start(0, "n1", [*overrides, "--timeout", "3"], **step)
    said = ranks.wait(0, BAD_NODES, SITE)  # on a busy machine 3 s may be too short for n1's own checks
    assert {"n2", "n3"} <= set(ranks.report()["bad_nodes"])
    assert "bad node n3: rank 2 did not answer within 3 s" in said
    assert "bad node n2: rank 1 came, but did not end" in said


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_without_rank_0_the_head_node_is_named(ranks: Ranks, tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        address = {"MASTER_PORT": str(unused.getsockname()[1]), "SLURM_STEP_NODELIST": "gpu-[07-08]"}
        ranks.start(1, "gpu-08", ["--timeout", "1"], **address)
        said = ranks.wait(1, BAD_NODES)
    assert said.startswith("error: bad node gpu-07: rank 0 does not answer rank 1 on node gpu-08 within 1 s")
    assert said.count("\n") == 1 and ranks.report()["bad_nodes"] == ["gpu-07"]


@pytest.mark.parametrize("ranks", [1], indirect=True)
def test_what_no_other_node_would_mend_is_the_users(ranks: Ranks, tmp_path: Path) -> None:
    ranks.start(0, "n1", tiny_overrides(tmp_path / "nowhere", tmp_path, "site"))
    said = ranks.wait(0, SITE)
    assert "bank: all 16 heads" in said  # what can be checked is checked
    assert f"error: data directory {tmp_path}/nowhere does not exist" in said
    assert (ranks.report()["exit_code"], ranks.report()["bad_nodes"]) == (SITE, [])
