"""orthogonal_penalty: the right term exactly once, whatever the micro batches.

Its layouts and ZeRO stages are those of `test_designs.py`.
"""

from pathlib import Path

import pytest

from tests.distributed.workers.penalty import TAGS
from tests.ranks import run_ranks
from tests.tiny import tiny_overrides

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
STEPS = 6
STRENGTH = 0.1
# Of a deviation of 1e-3 from orthonormal, fp32 leaves three digits; a wrong factor is far outside.
TOLERANCE = {"loss/orthogonal_penalty": 2e-3}
RUNS = {
    "zero1": {"deepspeed__config": "zero1"},
    "one micro batch": {"data__micro_batch_size": 8},
    "eight micro batches": {"data__micro_batch_size": 1},
    "bf16 zero3": {"precision__dtype": "bf16", "deepspeed__config": "zero3"},
    "weak": {"attention__penalty": 1e-6},
    "no penalty": {"attention__penalty": "null", "attention__variant": "orthogonal_trainable"},
}
SAME = ("one micro batch", "eight micro batches")


@pytest.fixture(scope="module")
def logs(
    tiny_shards: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, list[float]]]:
    """{case: {tag: values}}, "reference" among them."""
    runs = tmp_path_factory.mktemp("penalty")

    def overrides(name: str, **changes: object) -> list[str]:
        return tiny_overrides(
            tiny_shards,
            runs,
            name.replace(" ", "-"),
            **{
                "attention__variant": "orthogonal_penalty",
                "attention__penalty": STRENGTH,
                "model__num_query_groups": 2,
                "schedule__steps": STEPS,
                # eps far above the gradients: AdamW's steps are smooth in them. Else it would make
                # a whole step of what rounding leaves where a gradient is 0.
                "optimizer__eps": 0.01,
                "optimizer__learning_rate": 0.01,
                "optimizer__gradient_clip": 0.0,
                "data__validation_samples": 2,
                "telemetry__tensorboard": "false",
                **changes,
            },
        )

    answers = run_ranks(
        1,
        "tests.distributed.workers.penalty:curves_and_reference",
        {
            "runs": [overrides(name, **changes) for name, changes in RUNS.items()],
            "reference": overrides("reference"),
        },
    )
    curves = dict(zip(RUNS, answers["curves"], strict=True))
    return {**curves, "reference": answers["reference"]}


def test_training_is_that_of_plain_pytorch_with_the_definition(
    logs: dict[str, dict[str, list[float]]],
) -> None:
    for tag, values in logs["reference"].items():
        # From step 2 on: orthonormal rows start with no penalty but rounding.
        assert logs["zero1"][tag][1:] == pytest.approx(values[1:], rel=TOLERANCE.get(tag, 1e-5)), (
            tag
        )


@pytest.mark.parametrize("case", SAME)
def test_no_accumulation_changes_the_training(
    logs: dict[str, dict[str, list[float]]], case: str
) -> None:
    for tag in TAGS:
        assert len(logs[case][tag]) == (1 if tag == "loss/valid" else STEPS)
        first = tag == "loss/orthogonal_penalty"  # rounding alone at step 1
        expected = pytest.approx(logs["zero1"][tag][first:], rel=TOLERANCE.get(tag, 1e-5))
        assert logs[case][tag][first:] == expected, tag


def test_bf16_under_zero3_trains_on_it_too(logs: dict[str, dict[str, list[float]]]) -> None:
    for tag in ("loss/train", "optim/grad_norm"):
        assert logs["bf16 zero3"][tag] == pytest.approx(logs["zero1"][tag], rel=0.03), tag
    # Rows rounded to bf16 are orthonormal to 1e-3 only, so the term has a floor.
    assert 0 < logs["bf16 zero3"]["loss/orthogonal_penalty"][-1] < 100 * STRENGTH * 1e-3


def test_the_penalty_is_reported_apart_and_holds_the_rows_together(
    logs: dict[str, dict[str, list[float]]],
) -> None:
    strong, weak, none = logs["zero1"], logs["weak"], logs["no penalty"]
    penalty = "loss/orthogonal_penalty"
    assert 0 <= strong[penalty][0] < 1e-9
    assert strong[penalty][-1] > 0
    # The sum of squared deviations, without the factor, is smaller where the factor is large.
    assert strong[penalty][-1] / STRENGTH < 0.7 * weak[penalty][-1] / 1e-6
    assert none[penalty] == []
    # loss/train stays the language-model loss: nearly the same where the penalty hardly counts.
    assert weak["loss/train"] == pytest.approx(none["loss/train"], rel=1e-5)
    assert strong["loss/train"][0] == pytest.approx(none["loss/train"][0], rel=1e-6)
    assert strong["optim/grad_norm"][-1] != pytest.approx(none["optim/grad_norm"][-1], rel=1e-6)
