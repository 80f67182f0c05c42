"""Phases: layers become trainable on the way or are frozen, and nothing else is disturbed.

A resume is exact across it.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.workers.unfreeze import TAGS
from tests.ranks import run_ranks
from tests.tiny import tiny_overrides

pytestmark = pytest.mark.timeout(900)
STEPS = 10
LAST_STEPS = (3, 6)  # of phases 0 and 1, by the variant's own schedule: 0.3 and 0.6 of the run
SHARDED = {"parallel__tensor_model_parallel_size": 2, "parallel__sequence_parallel": "true"}
# Odd on purpose: partitions have to be padded on two data-parallel ranks.
ODD_SIZES = {"model__hidden_size": 33, "model__head_dim": 8, "model__ffn_hidden_size": 64}
ONE_RANK = {"zero1": {}, "zero2": {"deepspeed__config": "zero2"}}
TWO_RANKS = {
    "dp2 zero1": {},
    "dp2 zero2": {"deepspeed__config": "zero2"},
    "tp2 zero1": {"parallel__tensor_model_parallel_size": 2},
    "tp2 sp zero2": {**SHARDED, "deepspeed__config": "zero2"},
}
WATCHED = {  # on two data-parallel ranks, but for the last
    "zero1 fp32": {},
    "zero2 fp32": {"deepspeed__config": "zero2"},
    "zero1 bf16": {"precision__dtype": "bf16"},
    "zero2 bf16": {"precision__dtype": "bf16", "deepspeed__config": "zero2"},
    "tp2 zero1 bf16": {"precision__dtype": "bf16", **SHARDED},
}
MODERN = {  # with Muon, and with what measures weights
    "model__norm": "rmsnorm",
    "model__mlp": "swiglu",
    "model__qk_norm": "true",
    "model__z_loss": 1e-3,
    "optimizer__kind": "muon",
    "telemetry__weights_every": 2,
    "telemetry__spectral_norms": "['*.linear_proj.weight']",
}
RESUMED = {
    "zero1 fp32": {"model__dropout": 0.1, **MODERN},
    "zero2 bf16": {"precision__dtype": "bf16", "deepspeed__config": "zero2"},
}
FREEZES = {"attention__variant": "vanilla", "attention__phases": "[{at: 0.3, freeze: 1}]"}
FROZEN = {  # on two data-parallel ranks, but for those with tp2
    "zero1 fp32": FREEZES,
    "zero2 bf16": {**FREEZES, "precision__dtype": "bf16", "deepspeed__config": "zero2"},
    "tp2 zero1 bf16": {
        **SHARDED,
        "precision__dtype": "bf16",
        "model__hidden_size": 36,
        "attention__variant": "monarch_trainable",
        "attention__shared": "true",
        "attention__adapters": "[short_convolution, query_key_bias]",
        "attention__phases": "[{at: 0.3, freeze: 1}, {at: 0.6, freeze: all}]",
    },
}
RESUMED_FREEZE = {
    "freezes": {
        **SHARDED,
        **MODERN,
        **FREEZES,
        "precision__dtype": "bf16",
        "model__hidden_size": 36,
    }
}
AFTER = (2, 3, 4, 6)  # before, at and after a change of phase, and at the second


@pytest.fixture(scope="module")
def found(tiny_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the workers saw: one launch of one rank, one of two."""
    runs = tmp_path_factory.mktemp("unfreeze")

    def overrides(name: str, **changes: object) -> list[str]:
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

    kept = {"checkpoint__every": 1, "checkpoint__keep_last": STEPS}
    worker = "tests.distributed.workers.unfreeze"
    one = run_ranks(
        1,
        f"{worker}:one_rank",
        {
            "curves": {
                name: overrides(name, **changes)
                for name, changes in {**ONE_RANK, "freezes": FREEZES}.items()
            },
            "references": {
                "zero1": overrides("reference"),
                "freezes": overrides("freezing reference", **FREEZES),
            },
        },
    )
    two = run_ranks(
        2,
        f"{worker}:two_ranks",
        {
            "curves": {name: overrides(name, **changes) for name, changes in TWO_RANKS.items()},
            "watch": {
                name: overrides(f"watch {name}", **changes) for name, changes in WATCHED.items()
            },
            "freeze": {
                name: overrides(f"freeze {name}", **changes) for name, changes in FROZEN.items()
            },
            "resume": {
                name: overrides(f"resume {name}", **changes, **kept)
                for name, changes in (RESUMED | RESUMED_FREEZE).items()
            },
            "after": AFTER,
            "longer": ["schedule.steps=20"],
        },
    )
    return {**two, "references": one["references"], "curves": {**one["curves"], **two["curves"]}}


@pytest.mark.parametrize("case", ["zero1", "freezes"])
def test_training_is_that_of_plain_pytorch(found: dict[str, Any], case: str) -> None:
    for tag, values in found["references"][case].items():
        assert found["curves"][case][tag] == pytest.approx(values, rel=1e-5), tag


@pytest.mark.parametrize("case", FROZEN)
def test_rows_are_frozen_as_they_are_and_nothing_else_is_changed(
    found: dict[str, Any], case: str
) -> None:
    freezes = found["freezes"][case]
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


@pytest.mark.parametrize("case", [*list(ONE_RANK)[1:], *TWO_RANKS])
def test_no_layout_or_stage_changes_the_training(found: dict[str, Any], case: str) -> None:
    for tag in TAGS:
        assert found["curves"][case][tag] == pytest.approx(
            found["curves"]["zero1"][tag], rel=1e-5
        ), tag
    assert len(found["curves"][case]["loss/train"]) == STEPS


def test_the_learning_rate_and_the_counts_change_where_the_schedule_says(
    found: dict[str, Any],
) -> None:
    curve = found["curves"]["zero1"]
    per_layer = 2 * 4 * 8 * 33  # W_Q and W_K of 4 heads of 8 rows
    first = curve["memory/trainable_parameters"][0]
    assert curve["memory/trainable_parameters"] == [
        first + per_layer * sum(step > last for last in LAST_STEPS) for step in range(1, STEPS + 1)
    ]
    rates = curve["optim/lr"]
    # The factors 0.5 and 0.2 / 0.5, times the cosine's fall.
    assert rates[3] / rates[2] < 0.5 and rates[6] / rates[5] < 0.4


@pytest.mark.parametrize("case", WATCHED)
def test_a_change_of_phase_keeps_everything_bit_for_bit(found: dict[str, Any], case: str) -> None:
    changes = found["changes"][case]["changes"]
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
    found: dict[str, Any], case: str
) -> None:
    moved = found["changes"][case]["moved"]  # after each step, for each layer
    for step, (first, second) in enumerate(moved, start=1):
        assert (second > 0) == (step > LAST_STEPS[0]), (step, moved)
        assert (first > 0) == (step > LAST_STEPS[1]), (step, moved)
    # AdamW's first step is about the learning rate: it is no rounding that moves.
    assert moved[LAST_STEPS[0]][1] > 1e-5 and moved[LAST_STEPS[1]][0] > 1e-5


@pytest.mark.parametrize("case", WATCHED)
def test_what_is_unfrozen_counts_its_own_steps(found: dict[str, Any], case: str) -> None:
    matrices, vectors, second, first = found["changes"][case]["step counts"]
    assert matrices == vectors == STEPS
    assert (second, first) == (STEPS - LAST_STEPS[0], STEPS - LAST_STEPS[1])


@pytest.mark.parametrize("case", RESUMED | RESUMED_FREEZE)
@pytest.mark.parametrize("after", AFTER)
def test_resume_is_exact_before_at_and_after_a_change_of_phase(
    found: dict[str, Any], case: str, after: int
) -> None:
    resumed = found["resumes"][case]
    assert resumed["tensors"] > 50
    assert resumed[str(after)] == {"tensors": [], "metrics": True, "phases": True}


@pytest.mark.parametrize("case", RESUMED)
def test_the_audit_lists_every_phase(found: dict[str, Any], case: str) -> None:
    phases = found["resumes"][case]["phases"]
    assert [phase["phase"] for phase in phases] == [0, 1, 2]
    assert [phase["first_step"] for phase in phases] == [1, LAST_STEPS[0] + 1, LAST_STEPS[1] + 1]
    assert [phase["learning_rate_factor"] for phase in phases] == [1.0, 0.5, 0.2]
    assert [phase["newly_trainable_layers"] for phase in phases] == [[], [1], [0]]
    assert [phase["frozen_in_zero"] for phase in phases] == [0, 0, 0]
    per_layer = 2 * 4 * 8 * 33
    assert [phase["model_frozen_parameters"] for phase in phases] == [2 * per_layer, per_layer, 0]
    assert (
        len(
            {sum(p[f"model_{kind}_parameters"] for kind in ("trainable", "frozen")) for p in phases}
        )
        == 1
    )


def test_a_length_that_would_move_the_changes_is_refused_on_resume(found: dict[str, Any]) -> None:
    said = "attention.phases applied after steps [3, 6], in this run it would after [6, 12]"
    assert said in found["refused"]
