"""Checkpoints of earlier versions are read for good, and their runs continue with the same bits.

tests/recorded has runs that were stopped after four of eight steps, of format 1 as tag v0.4-lab
wrote it and of format 2 as v0.5-lab did, and what the same code made of the rest: losses, gradient
norms, and digests of masters and moments. Bits are asked for only on a machine that rounds as that
of the recording (`tools.arithmetic`); elsewhere the rest agrees up to rounding.
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from pretrain.runs.metrics_file import read_metrics
from tests.command_line import checkpoint_tensors
from tests.conftest import make_shards
from tests.ranks import ROOT, run_ranks
from tests.tiny import tiny_overrides
from tools.made_corpus import write_made_corpus
from tools.record import machine

RECORDED = ROOT / "tests/recorded"
STEPS, STOPPED_AFTER = 8, 4
VOCAB_SIZE = 300
DESIGNS: dict[str, dict[str, object]] = {
    "vanilla": {"attention__variant": "vanilla"},
    "mixed": {
        "attention__variant": "orthogonal",
        "attention__frozen_heads": "{0: 1.0, 1: 0.5}",
        "attention__adapters": "[short_convolution, low_rank]",
        "attention__low_rank": 2,
    },
    "phases": {
        "attention__variant": "orthogonal",
        "attention__phases": "[{at: 0.25, train: 1}, {at: 0.75, freeze: 1}]",
    },
    "muon": {
        "attention__variant": "monarch_shared_conv",
        "model__norm": "rmsnorm",
        "model__mlp": "swiglu",
        "model__init": "fan_in",
        "model__z_loss": 1e-4,
        "optimizer__kind": "muon",
    },
}


class Layout(NamedTuple):
    """How a run is spread over processes."""

    ranks: int
    tensor_parallel: int
    zero_stage: int


class Case(NamedTuple):
    """A recorded run: its format, its design, the layout that wrote it, and another one."""

    format: int
    design: str
    layout: Layout
    other: Layout

    @property
    def name(self) -> str:
        ranks, size, stage = self.layout
        return f"{self.design}-tp{size}-dp{ranks // size}-zero{stage}"

    @property
    def recording(self) -> Path:
        return RECORDED / f"format_{self.format}" / self.name


FOUR = Layout(4, 2, 1)
TWO = Layout(2, 1, 0)
ONE = Layout(1, 1, 2)
CASES = (
    Case(1, "vanilla", FOUR, ONE),
    Case(1, "mixed", FOUR, Layout(2, 1, 3)),
    Case(1, "mixed", TWO, Layout(2, 2, 1)),
    Case(2, "phases", FOUR, ONE),
    Case(2, "muon", TWO, Layout(2, 2, 1)),
)
SAME, OTHER = "same", "other"
every_case = pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"format {case.format} {case.name}"
)


def overrides(case: Case, shards: Path, runs: Path, layout: Layout) -> list[str]:
    """The settings of a recorded run, under any layout."""
    settings: dict[str, object] = {
        "model__hidden_size": 8,
        "model__ffn_hidden_size": 16,
        "model__num_query_groups": 2,
        "model__vocab_size": VOCAB_SIZE,
        "data__global_batch_size": 4,
        "data__sequence_length": 16,
        "data__validation_samples": 2,
        "schedule__steps": STEPS,
        "checkpoint__keep_last": 3,
        "optimizer__learning_rate": 3e-3,
        "telemetry__tensorboard": "false",
        "deepspeed__config": f"zero{layout.zero_stage}",
        "parallel__tensor_model_parallel_size": layout.tensor_parallel,
        "parallel__sequence_parallel": layout.tensor_parallel > 1,
        **DESIGNS[case.design],
    }
    return tiny_overrides(shards, runs, case.name, **settings)


def digests(checkpoint: Path) -> dict[str, str]:
    """{place: SHA-256 of a whole master or moment, or the number of AdamW's steps}."""
    kinds = ("master/", "exp_avg/", "exp_avg_sq/", "momentum/", "step/")
    tensors = checkpoint_tensors(checkpoint)
    return {
        key: hashlib.sha256(value.numpy().tobytes()).hexdigest()[:16]
        if torch.is_tensor(value)
        else str(value)
        for key, value in sorted(tensors.items())
        if key.startswith(kinds)
    }


def curves(run: Path) -> dict[str, list[float]]:
    """Losses and gradient norms of all steps."""
    records = list(read_metrics(run / "metrics.jsonl"))
    tags = ("loss/train", "optim/grad_norm")
    return {tag: [record[tag] for record in records] for tag in tags}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("format-1")
    write_made_corpus(directory / "corpus")
    return make_shards(directory, "unigram", VOCAB_SIZE)


@pytest.fixture(scope="module")
def runs(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the recorded runs went on, in `same` at their own layouts and in `other` at others."""
    runs = tmp_path_factory.mktemp("runs")
    launches: dict[int, list[dict[str, Any]]] = {}
    for case in CASES:
        for kind, layout in ((SAME, case.layout), (OTHER, case.other)):
            shutil.copytree(case.recording, runs / kind / case.name)
            run = {
                "overrides": overrides(case, shards, runs / kind, layout),
                "steps": STEPS - STOPPED_AFTER,
                "echo": str(runs / kind / f"{case.name}-loaded"),
            }
            launches.setdefault(layout.ranks, []).append(run)
    for ranks, some in launches.items():
        answers = run_ranks(ranks, "tests.distributed.workers.layouts:go_on", {"runs": some})
        assert [answer["state"] for answer in answers] == ["finished"] * len(some)
    return runs


@pytest.fixture
def expected(case: Case) -> dict[str, Any]:
    """What the code of that time loaded from the checkpoint, and how its run continued."""
    answer: dict[str, Any] = json.loads(case.recording.with_suffix(".json").read_text())
    return answer


@every_case
@pytest.mark.parametrize("kind", [SAME, OTHER])
def test_all_of_the_state_is_read(
    case: Case, kind: str, runs: Path, expected: dict[str, Any]
) -> None:
    assert len(expected["loaded"]) > 50
    assert digests(runs / kind / f"{case.name}-loaded") == expected["loaded"]


@every_case
def test_the_run_continues_with_the_same_bits(
    case: Case, runs: Path, expected: dict[str, Any]
) -> None:
    run = runs / SAME / case.name
    for tag, values in curves(run).items():
        assert values == pytest.approx(expected["curves"][tag], rel=1e-5)
    if expected["machine"] == machine():
        assert curves(run) == expected["curves"]
        assert digests(run / f"checkpoints/step_{STEPS:08d}") == expected["final"]


@every_case
def test_the_run_continues_at_another_layout(
    case: Case, runs: Path, expected: dict[str, Any]
) -> None:
    continued = curves(runs / OTHER / case.name)
    assert len(continued["loss/train"]) == STEPS
    for tag, values in continued.items():
        assert values == pytest.approx(expected["curves"][tag], rel=2e-5), tag
