"""Phases: layers become trainable on the way or are frozen, and nothing else is disturbed.

Layouts, stages and a resume around each change are those of `test_designs.py`, and a resume with
Muon is that of `test_muon.py`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.tiny import tiny_overrides

WORKER = "tests.distributed.workers.unfreeze"
pytestmark = pytest.mark.timeout(900)
STEPS = 10
LAST_STEPS = (3, 6)  # of phases 0 and 1, by the variant's own schedule: 0.3 and 0.6 of the run
PER_LAYER = 2 * 4 * 8 * 33  # W_Q and W_K of 4 heads of 8 rows
SHARDED = {"parallel__tensor_model_parallel_size": 2, "parallel__sequence_parallel": "true"}
# Odd on purpose: partitions have to be padded on two data-parallel ranks.
ODD_SIZES = {"model__hidden_size": 33, "model__head_dim": 8, "model__ffn_hidden_size": 64}
WATCHED = {  # on two data-parallel ranks, but for the last
    "zero1 fp32": {},
    "zero2 bf16": {"precision__dtype": "bf16", "deepspeed__config": "zero2"},
    "tp2 zero1 bf16": {"precision__dtype": "bf16", **SHARDED},
}
FREEZES = {"attention__variant": "vanilla", "attention__phases": "[{at: 0.3, freeze: 1}]"}
FROZEN = {  # on two data-parallel ranks, but for the last
    "zero2 bf16": {**FREEZES, "precision__dtype": "bf16", "deepspeed__config": "zero2"},
    "tp2 zero1 bf16": {
        **SHARDED,
        "precision__dtype": "bf16",
        "model__hidden_size": 36,
        "attention__variant": "monarch_trainable",
        "attention__shared": "true",
        "attention__adapters": "[short_convolution, query_key_bias]",
        "attention__phases": "[{at: 0.3, freeze: 1}, {at: 0.6, freeze: all, decay_steps: 2}]",
    },
}

REFERENCES: dict[str, dict[str, Any]] = {
    "unfreezes": {},
    "freezes": {**FREEZES, "optimizer__gradient_clip": 0.05},
    "decays": {
        "attention__variant": "vanilla",
        "attention__phases": "[{at: 0.6, freeze: all, decay_steps: 4}]",
        "optimizer__learning_rate": 5e-3,  # at 1e-3 the rows do not move enough to be seen
    },
}


Overrides = Callable[..., list[str]]


@pytest.fixture(scope="module")
def overrides(tiny_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Overrides:
    runs = tmp_path_factory.mktemp("unfreeze")

    def of(name: str, **changes: object) -> list[str]:
        return tiny_overrides(
            tiny_shards,
            runs,
            name.replace(" ", "-"),
            **{
                "attention__variant": "unfreeze",
                **ODD_SIZES,
                "schedule__steps": STEPS,
                "optimizer__learning_rate": 1e-3,
                "optimizer__eps": 1e-4,  # AdamW's steps are smooth where gradients are nearly 0
                "optimizer__gradient_clip": 0.0,
                "data__validation_samples": 2,
                "telemetry__tensorboard": "false",
                **changes,
            },
        )

    return of


@pytest.fixture(scope="module")
def answers(overrides: Overrides) -> dict[str, Any]:
    """What the workers saw: one launch of one rank, one of two."""
    asked = {
        "curves": {name: overrides(name, **changes) for name, changes in REFERENCES.items()},
        "references": {
            name: overrides(f"{name} reference", **changes) for name, changes in REFERENCES.items()
        },
        "watch": {name: overrides(f"watch {name}", **changes) for name, changes in WATCHED.items()},
        "freeze": {
            name: overrides(f"freeze {name}", **changes) for name, changes in FROZEN.items()
        },
    }
    return {
        **run_ranks(1, f"{WORKER}:curves_and_references", asked),
        **run_ranks(2, f"{WORKER}:changes_of_phase", asked),
    }


@pytest.mark.parametrize("case", REFERENCES)
def test_training_is_that_of_plain_pytorch(answers: dict[str, Any], case: str) -> None:
    for tag, values in answers["references"][case].items():
        assert answers["curves"][case][tag] == pytest.approx(values, rel=1e-5), tag


@pytest.mark.parametrize("case", FROZEN)
def test_rows_are_frozen_as_they_are_and_nothing_else_is_changed(
    answers: dict[str, Any], case: str
) -> None:
    freezes = answers["freezes"][case]
    names = ("trained_query_key",)
    if "monarch" in FROZEN[case]["attention__variant"]:
        names = ("trained_left_query_key", "trained_right_query_key")
    layers = [1, 0][: len(freezes["changes"])]
    assert [change.pop("step") for change in freezes["changes"]] == list(LAST_STEPS)[: len(layers)]
    for change, layer in zip(freezes["changes"], layers, strict=True):
        module = f"decoder.layers.{layer}.self_attention.linear_qkv"
        assert change.pop("kept") == [f"{module}.{name}" for name in names]
        assert all(change.values()), change
    assert freezes["rows stayed"] and freezes["stored"]
    assert freezes["audit"][-1]["frozen_in_zero"] == 0
    sizes = [entry["model_frozen_parameters"] for entry in freezes["audit"]]
    assert sizes[0] == 0 and sizes == [sizes[1] * n for n in range(len(sizes))]


def test_the_learning_rate_and_the_counts_change_where_the_schedule_says(
    answers: dict[str, Any],
) -> None:
    curve = answers["curves"]["unfreezes"]
    first = curve["memory/trainable_parameters"][0]
    assert curve["memory/trainable_parameters"] == [
        first + PER_LAYER * sum(step > last for last in LAST_STEPS) for step in range(1, STEPS + 1)
    ]
    rates = curve["optim/lr"]
    # The factors 0.5 and 0.2 / 0.5, times the cosine's fall.
    assert rates[3] / rates[2] < 0.5 and rates[6] / rates[5] < 0.4


@pytest.mark.parametrize("case", WATCHED)
def test_a_change_of_phase_keeps_everything_bit_for_bit(answers: dict[str, Any], case: str) -> None:
    changes = answers["changes"][case]["changes"]
    assert [change.pop("step") for change in changes] == list(LAST_STEPS)
    for change, layer in zip(changes, (1, 0), strict=True):
        name = f"decoder.layers.{layer}.self_attention.linear_qkv.trained_query_key"
        assert change.pop("new parameters") == [name]
        assert change.pop("shared memory grew") <= 0
        not_rounded = change.pop("masters are not rounded")
        assert not_rounded, "the check of the masters could not fail"
        assert all(change.values()), change


@pytest.mark.parametrize("case", WATCHED)
def test_what_is_unfrozen_moves_and_what_is_frozen_does_not(
    answers: dict[str, Any], case: str
) -> None:
    moved = answers["changes"][case]["moved"]  # after each step, for each layer
    for step, (first, second) in enumerate(moved, start=1):
        assert (second > 0) == (step > LAST_STEPS[0]), (step, moved)
        assert (first > 0) == (step > LAST_STEPS[1]), (step, moved)
    # AdamW's first step is about the learning rate: it is no rounding that moves.
    assert moved[LAST_STEPS[0]][1] > 1e-5 and moved[LAST_STEPS[1]][0] > 1e-5


@pytest.mark.parametrize("case", WATCHED)
def test_what_is_unfrozen_counts_its_own_steps(answers: dict[str, Any], case: str) -> None:
    matrices, vectors, second, first = answers["changes"][case]["step counts"]
    assert matrices == vectors == STEPS
    assert (second, first) == (STEPS - LAST_STEPS[0], STEPS - LAST_STEPS[1])


def test_the_audit_lists_every_phase(answers: dict[str, Any]) -> None:
    phases = answers["audit"]
    assert [phase["phase"] for phase in phases] == [0, 1, 2]
    assert [phase["first_step"] for phase in phases] == [1, LAST_STEPS[0] + 1, LAST_STEPS[1] + 1]
    assert [phase["learning_rate_factor"] for phase in phases] == [1.0, 0.5, 0.2]
    assert [phase["newly_trainable_layers"] for phase in phases] == [[], [1], [0]]
    assert [phase["frozen_in_zero"] for phase in phases] == [0, 0, 0]
    frozen = [phase["model_frozen_parameters"] for phase in phases]
    assert frozen == [2 * PER_LAYER, PER_LAYER, 0]
    trained = [phase["model_trainable_parameters"] for phase in phases]
    assert len({sum(both) for both in zip(frozen, trained, strict=True)}) == 1
