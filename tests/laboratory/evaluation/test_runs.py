"""evaluate on real runs: any layout loads with the loss the run logged; reports; refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import assert_refused
from tests.ranks import run_ranks, warm_cli
from tests.tiny import tiny_overrides

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

QUIET = {"telemetry__tensorboard": "false", "optimizer__learning_rate": 2e-2}
PARALLEL = {"parallel__tensor_model_parallel_size": 2, "parallel__sequence_parallel": True}
ONE_RANK: dict[str, dict[str, Any]] = {
    "orthogonal": {},
    "learned": {"model__position_embedding": "learned", "run__seed": 5},
    "scores": {"attention__variant": "synthesizer_random"},
}
# Learned positions are the weights that megatron-core makes in fp32 whatever the compute dtype.
BF16: dict[str, dict[str, Any]] = {
    "bf16": {"model__position_embedding": "learned", "precision__dtype": "bf16"}
}
FOUR_RANKS: dict[str, dict[str, Any]] = {
    "tensor-parallel": {**PARALLEL, "attention__variant": "vanilla", "model__num_query_groups": 2},
    # On each rank a head trains and one is frozen in layer 0; in layer 1 one trains, on rank 0.
    "hybrid": {
        **PARALLEL,
        "attention__variant": "hybrid",
        "attention__frozen_heads": "{'0': 0.5, '1': 0.75}",
        "attention__adapters": "[query_key_bias, channel_scale, low_rank]",
    },
    "unfreeze": {
        **PARALLEL,
        "attention__variant": "unfreeze",
        "attention__phases": "[{at: 0.25, train: all}, {at: 0.5, freeze: 1}]",
    },
    "zero3": {**PARALLEL, "deepspeed__config": "zero3", "model__tied_embeddings": "false"},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("evaluated")


@pytest.fixture(scope="module")
def answers(tiny_shards: Path, runs: Path) -> dict[str, Any]:
    def all_of(changes: dict[str, dict[str, Any]]) -> list[list[str]]:
        return [
            tiny_overrides(tiny_shards, runs, name, **QUIET, **more)
            for name, more in changes.items()
        ]

    payload = {"runs": all_of(FOUR_RANKS)}
    states = run_ranks(4, "tests.distributed.workers.runs:train_all", payload)
    assert states == ["finished"] * 4
    payload = {
        "runs": all_of({**ONE_RANK, **BF16}),
        "load": [str(runs / name) for name in (*ONE_RANK, *BF16, *FOUR_RANKS)],
        "spoilt": str(runs / "spoilt"),
    }
    return run_ranks(1, "tests.distributed.workers.evaluation:evaluate_all", payload)


def test_every_layout_loads_on_one_process_with_the_loss_the_run_logged(
    answers: dict[str, Any],
) -> None:
    assert answers["states"] == ["finished"] * 4
    assert set(answers["losses"]) == {*ONE_RANK, *BF16, *FOUR_RANKS}
    for loaded, logged in answers["losses"].values():
        assert loaded == pytest.approx(logged, rel=1e-5)
        assert logged < 5.8  # an untrained model has ln 512 = 6.24


def test_what_does_not_fit_the_run_is_refused(answers: dict[str, Any]) -> None:
    refusals = answers["refusals"]
    assert "frozen digest mismatch at layer=1 role=key" in refusals["bank"]
    assert "the weights are not those of that step" in refusals["weights"]
    assert "config.yaml has model.ffn_hidden_size 64, but by" in refusals["shape"]
    assert "step_00000006/checkpoint.json it is 128" in refusals["shape"]
    assert "rank_00000.safetensors does not have the SHA-256" in refusals["flipped"]


def test_approximation_repeats_exactly_and_learns(answers: dict[str, Any]) -> None:
    first, again = answers["trials"]
    assert first == again
    sizes = [(variant, width) for width in (8, 16) for variant in ("vanilla", "orthogonal")]
    assert [(t["variant"], t["width"]) for t in first] == sizes
    assert all(0 < trial["error"] < 1 for trial in first)
    assert len({trial["error"] for trial in first}) == 4
    assert max(answers["moved_by_order"]) < 1e-6, "there are no positions"
    diverged = answers["refusals"]["diverged"]
    assert diverged.endswith("width 8, depth 1, seed 1 is nan; lower --learning-rate")


def test_diversity_report(answers: dict[str, Any], runs: Path, tmp_path: Path) -> None:
    paths = [str(runs / name) for name in ("tensor-parallel", "zero3", "scores")]
    options = ["--samples", "2", "--out", str(tmp_path)]
    done = warm_cli(["evaluate", "diversity", *paths, *options])
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    groups = [(verdict["group"], verdict["n"]) for verdict in report["verdicts"]]
    assert groups == [("vanilla", 1), ("orthogonal", 1), ("synthesizer_random", 1)]
    vanilla, orthogonal, scores = report["runs"]
    assert scores["trained"][0]["query"] is None and scores["trained"][0]["divergence"] > 0
    assert len(vanilla["trained"]) == 2
    for layer, at_start in zip(orthogonal["trained"], orthogonal["untrained"], strict=True):
        assert layer["query"] == at_start["query"]  # frozen
        assert layer["divergence"] != at_start["divergence"]
        assert 0 < layer["relative_entropy"] < 1
    assert vanilla["trained"][0]["query"] != vanilla["untrained"][0]["query"]
    assert "criterion held" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "diversity.png").stat().st_size > 10_000


def test_length_report_says_what_is_not_possible(
    answers: dict[str, Any], runs: Path, tmp_path: Path
) -> None:
    paths = [str(runs / name) for name in ONE_RANK]
    done = warm_cli(["evaluate", "length", *paths, "--samples", "4", "--out", str(tmp_path)])
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    rotary, learned, scores = report["runs"]
    lengths = {key: entry["length"] for key, entry in rotary["lengths"].items()}
    assert lengths == {"0.5": 16, "1": 32, "1.5": 48}
    assert {entry["predictions"] for entry in rotary["lengths"].values()} == {3 * 4 * 96}
    assert set(learned["lengths"]) == set(scores["lengths"]) == {"0.5", "1"}
    assert "score matrices have rows for the 32" in scores["not_possible"]["1.5"]
    assert learned["not_possible"] == {"1.5": "there is no learned position beyond the 32 trained"}
    assert "not possible: there is no learned position" in (tmp_path / "report.md").read_text()
    assert rotary["gain_by_position"][:16] == [0.0] * 16 and any(rotary["gain_by_position"][16:])
    assert (tmp_path / "length.png").stat().st_size > 10_000


def test_a_refusal_is_one_sentence(answers: dict[str, Any], runs: Path, tmp_path: Path) -> None:
    run_path = str(runs / "learned")
    out = tmp_path / "out"
    command = ["evaluate", "diversity", run_path, "--out", str(out)]
    assert_refused(warm_cli([*command, run_path]), "given twice")
    assert not out.exists()
