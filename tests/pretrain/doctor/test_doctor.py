"""The preflight with real gloo ranks, each started on its own as srun would, with a node name of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pretrain.config.counting import checkpoint_bytes, count_attention, count_parameters
from pretrain.config.load import load_config
from pretrain.doctor.checks import Unfit, bank_facts, disk_facts, gpu_facts
from pretrain.doctor.collectives import WrongSum, all_reduce_speed
from pretrain.doctor.meeting import bounded, expand_hosts, missing_nodes
from pretrain.doctor.verdict import (
    BAD_NODES,
    FINE,
    SITE,
    Gathered,
    bad_nodes,
    exit_code,
    find_problems,
    find_warnings,
    name_ranks,
)
from pretrain.runs.finished import newest_checkpoint_bytes
from tests.command_line import train
from tests.conftest import data_pipeline
from tests.ranks import ROOT, rank_environment
from tests.tiny import tiny_overrides


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


def test_room_for_the_checkpoints(tmp_path: Path, tiny_shards: Path) -> None:
    small = load_config("demo", tiny_overrides(tiny_shards, tmp_path / "runs", "room"))
    assert disk_facts(small)["bytes_per_second"] > 0
    sizes = {"model__num_layers": 4000, "model__hidden_size": 16384, "attention__variant": "vanilla"}
    large = load_config("demo", tiny_overrides(tiny_shards, tmp_path / "runs", "room", **sizes))
    with pytest.raises(Unfit, match=r"free, and this run's checkpoints need 61\d\.\d TB \(20\d\.\d TB each"):
        disk_facts(large)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a tmpfs")
def test_a_full_disk(tmp_path: Path, tiny_shards: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(disk)], capture_output=True)
    if mount.returncode:
        pytest.skip(f"mount: {mount.stderr.decode().strip()}")
    try:
        config = load_config("demo", tiny_overrides(tiny_shards, disk, "full"))
        disk_facts(config)
        (disk / "other").write_bytes(bytes(3 << 20))
        with pytest.raises(Unfit, match="free, and this run's checkpoints need"):
            disk_facts(config)
        assert [path.name for path in disk.iterdir()] == ["other"]
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_size_of_a_checkpoint(tmp_path: Path, tiny_shards: Path) -> None:
    sizes = {"model__hidden_size": 128, "schedule__steps": 1, "schedule__warmup_steps": 0}
    overrides = tiny_overrides(tiny_shards, tmp_path, "size", **sizes, precision__dtype="bf16")
    assert train(overrides, 1).returncode == 0
    config = load_config("demo", overrides)
    shape = config.shape()
    count = count_parameters(shape, count_attention(shape, config.policy()))
    assert newest_checkpoint_bytes(config.run_path) == pytest.approx(
        checkpoint_bytes(count, "bf16"), rel=0.03
    )


def test_the_bank_check_keeps_its_time_and_its_order(tiny_shards: Path, tmp_path: Path) -> None:
    config = load_config("demo", tiny_overrides(tiny_shards, tmp_path, "bank"))
    everything = bank_facts(config, 100)
    assert len(everything["digests"]) == everything["heads"] == 2 * 2 * 4
    assert [place for place, _ in everything["digests"]][:4] == [
        "layer 0 query head 0",
        "layer 0 key head 0",
        "layer 1 query head 0",
        "layer 1 key head 0",
    ]
    assert bank_facts(config, 0) == {"digests": everything["digests"][:1], "heads": 16}
    half = tiny_overrides(
        tiny_shards, tmp_path, "half", attention__variant="hybrid", attention__frozen_heads='{"0": 0.5}'
    )
    assert [place for place, _ in bank_facts(load_config("demo", half), 9)["digests"]] == [
        *("layer 0 query head 1", "layer 0 key head 1", "layer 0 query head 3", "layer 0 key head 3")
    ]
    by_layer = load_config("demo", [*tiny_overrides(tiny_shards, tmp_path, "bank"), "attention.scope=layer"])
    assert len(bank_facts(by_layer, 0)["digests"]) == 4  # a layer's heads are made at once


def test_a_wrong_sum_is_seen() -> None:
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=20))
    assert all_reduce_speed(group, 0, 1, torch.device("cpu")) is None
    with pytest.raises(WrongSum, match="of 1,048,576 sums are wrong"):
        all_reduce_speed(group, 3, 1, torch.device("cpu"))  # this rank puts in what is rank 3's


def test_what_hangs_is_left_behind() -> None:
    with pytest.raises(TimeoutError, match="the check of data did not end within 0 s"):
        bounded(lambda: time.sleep(60), 0.1, "the check of data")
    with pytest.raises(ZeroDivisionError):
        bounded(lambda: 1 / 0, 60, "division")


def test_fewer_gpus_than_expected() -> None:
    with pytest.raises(Unfit, match=f"torch sees {torch.cuda.device_count()} GPUs of 99"):
        gpu_facts(0, 99)


def test_nodes_of_missing_ranks() -> None:
    assert expand_hosts("n[1-3,07],gpu-a,r[1-2]c[8-9]") == [
        *("n1", "n2", "n3", "n07", "gpu-a"),
        *("r1c8", "r1c9", "r2c8", "r2c9"),
    ]
    slurm = {"SLURM_STEP_NODELIST": "n[1-3]", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}
    assert missing_nodes([3, 4], {0: "n1", 1: "n1", 2: "n2"}, 5, slurm) == {3: "n2", 4: "n3"}
    assert missing_nodes([3], {0: "n1", 1: "n2", 2: "n3", 4: "n2"}, 5, slurm) == {3: None}  # cyclic
    assert missing_nodes([3, 4], {0: "a", 2: "b"}, 6, {"LOCAL_WORLD_SIZE": "2"}) == {3: "b", 4: None}
    assert name_ranks([3]) == "rank 3" and name_ranks([8, 9, 10]) == "ranks 8-10"
    assert name_ranks([1, 5]) == "ranks 1, 5"


def gathered(nodes: int, per_node: int = 2, **changes: Any) -> Gathered:
    """Ranks that all found the same and nothing wrong."""
    world = range(nodes * per_node)
    versions = {"torch": "2.13.0+cu126", "driver": "550.54"}
    gpus = {"names": ["NVIDIA A100-SXM4-80GB 79 GiB"] * per_node, "free": 84e9}
    facts = {r: {"failures": {}, "versions": dict(versions), "gpus": dict(gpus)} for r in world}
    collectives = {
        r: {"failures": {}, "links": {}, "link_failures": {}, "node": 200.0, "world": 80.0} for r in world
    }
    content: dict[str, Any] = {
        "world_size": len(world),
        "nodes": {r: f"n{r // per_node + 1}" for r in world},
        "facts": facts,
        "collectives": collectives,
        "ran_collectives": True,
        **changes,
    }
    return Gathered(**content)


def judged(state: Gathered) -> tuple[int, list[str], list[str]]:
    problems = find_problems(state)
    return exit_code(problems), bad_nodes(problems), [problem.sentence for problem in problems]


def test_the_majority_is_right_and_the_head_node_where_there_is_none() -> None:
    assert judged(gathered(3)) == (FINE, [], [])
    for nodes, wrong, expected in ((3, 0, "n1"), (3, 2, "n2"), (2, 0, "n2")):
        state = gathered(nodes)
        for rank in (wrong, wrong + 1):
            state.facts[rank]["versions"]["driver"] = "535.104"
        code, bad, (sentence,) = judged(state)
        assert (code, bad) == (BAD_NODES, [expected])
        here, elsewhere = ("550.54", "535.104") if nodes == 2 else ("535.104", "550.54")
        assert sentence == f"bad node {expected}: driver is {here}, elsewhere {elsewhere}"


def test_a_failure_of_some_nodes_is_theirs_and_of_all_the_sites() -> None:
    state = gathered(2)
    state.facts[3]["failures"]["gpus"] = "local rank 1 has no GPU: 1 visible"
    assert judged(state) == (BAD_NODES, ["n2"], ["bad node n2: rank 3: local rank 1 has no GPU: 1 visible"])
    for rank in range(4):
        state.facts[rank]["failures"]["gpus"] = "torch sees 0 GPUs of 8"
    assert judged(state) == (SITE, [], ["torch sees 0 GPUs of 8"])
    absent = gathered(2, missing={4: "n3"})  # a third node that never came is no reason to blame the others
    for rank in range(4):
        absent.facts[rank]["failures"]["data"] = "data directory data/x does not exist"
    assert judged(absent)[:2] == (SITE, ["n3"])
    alone = gathered(1)
    for rank in range(2):
        alone.facts[rank]["failures"]["gpus"] = "torch sees 7 GPUs of 8"
    assert judged(alone)[:2] == (BAD_NODES, ["n1"])


def test_failing_collectives_name_the_node_that_can_be_named() -> None:
    state = gathered(3)
    state.collectives[4]["failures"]["node"] = "all-reduce within the node failed: 12 of 99 sums are wrong"
    assert judged(state)[:2] == (BAD_NODES, ["n3"])
    state = gathered(3)
    state.collectives[0]["link_failures"]["n2"] = "all-reduce between nodes n1 and n2 did not end within 65 s"
    assert judged(state)[:2] == (BAD_NODES, ["n2"])
    state.collectives[0]["link_failures"]["n3"] = "all-reduce between nodes n1 and n3 did not end within 65 s"
    assert judged(state)[:2] == (BAD_NODES, ["n1"])  # it reaches nobody: it is the one
    state = gathered(3)
    for rank in range(6):
        state.collectives[rank]["failures"]["world"] = "all-reduce over all ranks did not end within 65 s"
    code, bad, (sentence,) = judged(state)
    assert (code, bad) == (SITE, []) and "NCCL_SOCKET_IFNAME" in sentence


def test_clocks_and_slow_nodes() -> None:
    clocks = {"n1": (0.0, 0.0), "n2": (7.5, 0.001), "n3": (0.2, 0.001)}
    _, bad, (sentence,) = judged(gathered(3, clocks=clocks))
    assert bad == ["n2"] and "its clock is 7.3 s ahead of the others" in sentence
    clocks = {"n1": (0.0, 0.0), "n2": (7.5, 0.001), "n3": (7.6, 0.001)}
    assert judged(gathered(3, clocks=clocks))[1] == ["n1"]
    state = gathered(3)
    state.collectives[2]["node"] = 24.0
    assert find_warnings(state) == [
        "slow node n2: all-reduce within the node at 24.0 GB/s, the median is 200.0"
    ]
