"""How many of a job's ranks a run uses, and what is said of the rest."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.errors import UserError
from pretrain.job.__main__ import begin_training
from pretrain.job.shape import Batches, Shape, shape_to_use
from tests.command_line import assert_refused
from tests.ranks import run_program
from tests.tiny import tiny_overrides


@pytest.mark.parametrize("override", ["run.directory=my runs", "run.name=a%j"])
def test_a_path_that_slurm_would_read_otherwise_is_refused(override: str) -> None:
    with pytest.raises(UserError, match="has a blank, a percent sign or a backslash"):
        begin_training("demo", [override])


@pytest.mark.parametrize(
    ("allocated", "batches", "used"),
    [
        ((2, 8), (512, 8, 1), (2, 8)),
        ((3, 8), (512, 8, 1), (2, 8)),  # 24 do not divide 64; 16 on two whole nodes, not on three
        # Fewer ranks on each node: 15 of 60, where two nodes have 12.
        ((3, 8), (480, 8, 1), (3, 5)),
        ((7, 8), (512, 8, 1), (4, 8)),
        ((3, 8), (512, 8, 8), (2, 8)),  # three copies of the model do not divide 64
        ((1, 7), (8, 2, 2), (1, 4)),
        ((3, 6), (8, 2, 4), (2, 4)),  # 16 ranks are not the same number on each of three nodes
        ((2, 3), (8, 2, 4), (2, 2)),  # one copy over two nodes, since none has four ranks
        ((3, 6), (8, 8, 6), (1, 6)),
        ((4, 6), (16, 4, 4), (4, 4)),  # ranks of one copy share a node where they can
    ],
)
def test_the_most_ranks_that_are_possible(
    allocated: tuple[int, int], batches: tuple[int, int, int], used: tuple[int, int]
) -> None:
    shape, sentence = shape_to_use(Shape(*allocated), Batches(*batches))
    assert shape == Shape(*used)
    assert (sentence is None) == (allocated == used)


def test_no_larger_part_of_a_job_is_possible() -> None:
    """By trying every number of ranks on every number of nodes."""
    for nodes in range(1, 6):
        for per_node in range(1, 9):
            for size in (1, 2, 4):
                batches = Batches(24, 2, size)
                shape, sentence = shape_to_use(Shape(nodes, per_node), batches)
                possible = {
                    some * ranks_per_node
                    for some in range(1, nodes + 1)
                    for ranks_per_node in range(1, per_node + 1)
                    if some * ranks_per_node % size == 0
                    and 12 % (some * ranks_per_node // size) == 0
                }
                if possible:
                    assert shape.ranks == max(possible)
                    assert shape.nodes <= nodes and shape.ranks_per_node <= per_node
                else:
                    assert (shape, sentence) == (Shape(nodes, per_node), None)


def test_what_is_said_of_the_rest() -> None:
    assert shape_to_use(Shape(3, 8), Batches(512, 8, 1))[1] == (
        "trains on 16 ranks (2 x 8) of the job's 24 ranks (3 x 8): data.global_batch_size=512 is "
        "not divisible by data.micro_batch_size=8 times 24 data-parallel ranks"
    )
    assert shape_to_use(Shape(1, 7), Batches(8, 2, 2))[1] == (
        "trains on 4 ranks (1 x 4) of the job's 7 ranks (1 x 7): 7 is not a multiple of "
        "parallel.tensor_model_parallel_size=2"
    )
    # A smaller micro batch, where more ranks can share the batch then: `large` on eight nodes.
    assert shape_to_use(Shape(8, 8), Batches(400, 25, 1))[1] == (
        "trains on 16 ranks (2 x 8) of the job's 64 ranks (8 x 8): data.global_batch_size=400 is "
        "not divisible by data.micro_batch_size=25 times 64 data-parallel ranks; with "
        "data.micro_batch_size=10 it would on 40 ranks (5 x 8)"
    )


def job(verb: str, *words: str) -> subprocess.CompletedProcess[str]:
    program = "laboratory.slurm" if verb == "sweep-runs" else "pretrain.job"
    command = [sys.executable, "-m", program, verb, *words]
    environment = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]"}
    return run_program(command, environment, timeout=60)


@pytest.mark.distributed
def test_a_training_begins_on_what_it_can_use(tiny_shards: Path, tmp_path: Path) -> None:
    overrides = tiny_overrides(tiny_shards, tmp_path, "run")
    arguments = ("--nodes=3", "--ranks-per-node=1", "--", "demo", *overrides)
    done = job("begin-training", *arguments)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    assert done.stdout == f"run 2 1 {run} {run}/slurm/job_7-restart_0\n"
    assert [line[:17] for line in done.stderr.splitlines()] == ["trains on 2 ranks"]
    (begin,) = map(json.loads, (run / "slurm/segments.jsonl").read_text().splitlines())
    assert (begin["event"], begin["nodes"], begin["ranks"]) == ("begin", "n[1-3]", 2)
    few = job("begin-training", *arguments, "parallel.tensor_model_parallel_size=4")
    key = "parallel.tensor_model_parallel_size"
    assert_refused(few, f"{key}=4 needs at least 4 processes, but there are 3")


def test_the_runs_of_a_sweep_each_begin_on_what_they_can_use(
    tiny_shards: Path, tmp_path: Path
) -> None:
    grid = tmp_path / "grid.yaml"
    grid.write_text(
        f"base: demo\ndirectory: {tmp_path}\ngrid: "
        f"{{parallel.tensor_model_parallel_size: [1, 2]}}\n"
    )
    overrides = [
        word
        for word in tiny_overrides(tiny_shards, tmp_path, "any")
        if not word.startswith(("run.", "parallel.t"))
    ]
    arguments = ("--nodes=3", "--ranks-per-node=1", "--", str(grid), *overrides)
    done = job("sweep-runs", *arguments)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2
