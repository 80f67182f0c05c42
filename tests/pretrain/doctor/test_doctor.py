"""The preflight on real gloo ranks, each with a node name of its own, as srun would start them."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pretrain.doctor.verdict import BAD_NODES, SITE
from tests.command_line import cli
from tests.conftest import data_pipeline
from tests.ranks import ROOT, function_on_warm_ranks
from tests.tiny import tiny_overrides

pytestmark = pytest.mark.distributed


WORKER = "tests.distributed.workers.doctor:"


@dataclass(frozen=True)
class Preflight:
    """The doctor's ranks, each as on a node of its own; files of all of them lie in `directory`."""

    directory: Path

    def run(
        self,
        nodes: Sequence[str],
        arguments: Sequence[Sequence[str]],
        directories: Sequence[Path] = (),
        function: str = "on_nodes",
        **environment: str,
    ) -> None:
        """Run the doctor on one rank per node, with the rank's own arguments and directory."""
        self.directory.mkdir()
        ranks = [
            {"node": node, "arguments": list(rank_arguments), "directory": str(directory)}
            for node, rank_arguments, directory in zip(
                nodes, arguments, directories or [ROOT] * len(nodes), strict=True
            )
        ]
        payload = {"ranks": ranks, "directory": str(self.directory), "environment": environment}
        done = function_on_warm_ranks(len(nodes), WORKER + function, payload, timeout=300)
        assert "Traceback" not in done.stderr, done.stderr

    def output(self, rank: int, *codes: int) -> str:
        """Return a rank's output, once its exit code is known to be one of `codes`."""
        output = (self.directory / f"output_{rank}").read_text()
        assert int((self.directory / f"code_{rank}").read_text()) in codes, (rank, output)
        return output

    def report(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.directory / "report.json").read_text())
        return content


@pytest.fixture
def ranks(tmp_path: Path) -> Preflight:
    return Preflight(tmp_path / "preflight")


def texts(report: dict[str, Any]) -> dict[tuple[str, str], str]:
    """(node, check) -> text; node "" for problems of no node."""
    return {(",".join(p["nodes"]), p["check"]): p["text"] for p in report["problems"]}


def test_fit_nodes(ranks: Preflight, tiny_shards: Path, tmp_path: Path) -> None:
    overrides = tiny_overrides(tiny_shards, tmp_path / "runs", "fit", data__global_batch_size=12)
    ranks.run(("n1", "n1", "n2"), [overrides] * 3)
    said = ranks.output(0, 0)
    assert ranks.output(1, 0) == ranks.output(2, 0) == ""
    report = ranks.report()
    assert (report["exit_code"], report["bad_nodes"], report["problems"]) == (0, [], [])
    ranks_of = {node: facts["ranks"] for node, facts in report["nodes"].items()}
    assert ranks_of == {"n1": [0, 1], "n2": [2]}
    assert abs(report["nodes"]["n2"]["clock_ahead_seconds"]) < 5
    assert "fit for this run: all 3 ranks on 2 nodes" in said
    assert sum(line.endswith(", ok") for line in said.splitlines()) == 2
    # Nothing is left behind.
    assert [path.name for path in tmp_path.iterdir()] == ["preflight"]


def test_other_data_no_data_and_another_config_are_named(
    ranks: Preflight, tiny_shards: Path, tmp_path: Path
) -> None:
    """The same config on every rank, but each node sees other files at the same path."""
    other = tmp_path / "n2" / "shards"
    tokenizer = tiny_shards.parent / "tokenizer.model"
    options = ("--tokenizer", tokenizer, "--out", other, "--name=tiny", "--validation-fraction=0.2")
    data_pipeline("tokenize", tiny_shards.parent / "corpus", *options)
    for node in ("n1", "n3", "n4"):
        (tmp_path / node).mkdir()
    for node in ("n1", "n4"):
        (tmp_path / node / "shards").symlink_to(tiny_shards)
    overrides = tiny_overrides(Path("shards"), Path("runs"), "unfit")
    nodes = ("n1", "n2", "n3", "n4")
    arguments = [overrides, overrides, overrides, [*overrides, "attention.seed=99"]]
    ranks.run(nodes, arguments, [tmp_path / node for node in nodes])
    said = ranks.output(0, BAD_NODES)
    for rank in (1, 2, 3):
        ranks.output(rank, BAD_NODES)
    report = ranks.report()
    problems = texts(report)
    assert report["bad_nodes"] == ["n2", "n3", "n4"]
    assert "manifest fingerprint" in problems["n2", "data"]
    assert "data directory shards does not exist" in problems["n3", "data"]
    assert "overrides differ" in problems["n4", "config"]
    assert set(problems) == {("n2", "data"), ("n3", "data"), ("n4", "config")}
    assert "bad node n3: data directory shards does not exist" in said
    assert said.splitlines()[-1] == "bad-nodes: n2,n3,n4"  # what the job script gives to --exclude


def test_a_rank_that_never_comes_and_one_that_falls_silent_are_named(
    ranks: Preflight, tiny_shards: Path, tmp_path: Path
) -> None:
    overrides = tiny_overrides(tiny_shards, tmp_path, "absent", data__global_batch_size=12)
    step = {"SLURM_STEP_NODELIST": "n[1-3]", "SLURM_STEP_TASKS_PER_NODE": "1(x3)"}
    arguments = [[*overrides, "--timeout", "3"], [*overrides, "--timeout", "200"], []]
    ranks.run(("n1", "n2", "n3"), arguments, function="with_a_silent_and_an_absent_rank", **step)
    # On a busy machine 3 s may be too short for n1's own checks.
    said = ranks.output(0, BAD_NODES, SITE)
    assert {"n2", "n3"} <= set(ranks.report()["bad_nodes"])
    assert "bad node n3: rank 2 did not answer within 3 s" in said
    assert "bad node n2: rank 1 came, but did not end" in said


def test_without_rank_0_the_head_node_is_named(tmp_path: Path) -> None:
    """The command itself, as srun starts it, in a process of its own."""
    report = tmp_path / "report.json"
    arguments = ["doctor", "demo", "--timeout", "1", "--report", str(report)]
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        environment = {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
        environment |= {"SLURMD_NODENAME": "gpu-08", "SLURM_STEP_NODELIST": "gpu-[07-08]"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(unused.getsockname()[1])}
        environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        done = cli(arguments, environment=environment)
    assert done.returncode == BAD_NODES and done.stdout == "", done.stdout + done.stderr
    sentence = "error: bad node gpu-07: rank 0 does not answer rank 1 on node gpu-08 within 1 s"
    assert done.stderr.startswith(sentence) and done.stderr.count("\n") == 1
    assert json.loads(report.read_text())["bad_nodes"] == ["gpu-07"]


@pytest.mark.slow
def test_what_no_other_node_would_mend_is_the_users(tmp_path: Path) -> None:
    """On ranks of one machine, which all get the same words."""
    path = tmp_path / "report.json"
    arguments = ["doctor", "demo", *tiny_overrides(tmp_path / "nowhere", tmp_path, "site")]
    done = cli([*arguments, "--report", str(path), "--timeout=100", "--local-ranks=2"])
    assert done.returncode == SITE, done.stdout + done.stderr
    assert f"error: data directory {tmp_path}/nowhere does not exist" in done.stderr
    report = json.loads(path.read_text())
    assert (report["exit_code"], report["bad_nodes"]) == (SITE, [])
    ((node, facts),) = report["nodes"].items()
    assert node == socket.gethostname() and facts["ranks"] == [0, 1]
    assert facts["disk"]["free"]  # what can be checked is checked
