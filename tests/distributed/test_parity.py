"""The same training whatever the layout: losses and gradient norms over 20 steps agree to 1e-5."""

import itertools

import pytest

from tests.ranks import run_ranks
from tests.tiny import tiny_overrides

pytestmark = pytest.mark.timeout(1800)  # the first test trains all the models
LAYOUTS = [  # (ranks, tensor parallel size, sequence parallel)
    (1, 1, False),
    (2, 2, False),
    (2, 2, True),
    (2, 1, False),
    (4, 2, False),
    (4, 2, True),
    (4, 4, False),
    (4, 4, True),
]
VARIANTS = ("vanilla", "orthogonal")
STAGES = (1, 2, 3)
STEPS = 20
DROPOUT_STAGE = "1-dropout"
DATA_PARALLEL_LAYOUTS = [LAYOUTS[0], (2, 1, False)]


@pytest.fixture(scope="module")
def curves(tiny_shards, tmp_path_factory):
    """{(variant, zero stage, layout): curves}; one launch per world size, all its configs in the same
    processes.
    """
    runs = tmp_path_factory.mktemp("parity")
    found = {}
    for ranks in (1, 2, 4):
        cases = [
            (variant, stage, layout)
            for variant, stage, layout in itertools.product(VARIANTS, (*STAGES, DROPOUT_STAGE), LAYOUTS)
            if layout[0] == ranks and (stage != DROPOUT_STAGE or layout in DATA_PARALLEL_LAYOUTS)
        ]
        overrides = [
            tiny_overrides(
                tiny_shards,
                runs,
                f"{variant}-zero{stage}-{layout[0]}ranks-tp{layout[1]}-sp{layout[2]}",
                attention__variant=variant,
                deepspeed__config="zero1" if stage == DROPOUT_STAGE else f"zero{stage}",
                parallel__tensor_model_parallel_size=layout[1],
                parallel__sequence_parallel=layout[2],
                model__dropout=0.1 if stage == DROPOUT_STAGE else 0.0,
                schedule__steps=STEPS,
                # A high rate would let Adam amplify rounding differences from step to step: 1e-7 becomes 1e-4
                # in 20 steps.
                optimizer__learning_rate=3e-4,
                data__global_batch_size=4,
                data__sequence_length=16,
                data__validation_samples=2,
                telemetry__tensorboard="false",
            )
            for variant, stage, layout in cases
        ]
        answers = run_ranks(
            ranks, "tests.distributed.parity_worker:train_all", {"runs": overrides}, timeout=800
        )
        found.update(zip(cases, answers, strict=True))
    return found


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=lambda x: f"{x[0]}ranks-tp{x[1]}{'-sp' if x[2] else ''}")
def test_losses_and_gradient_norms_do_not_depend_on_the_layout(curves, variant, stage, layout):
    single, parallel = curves[variant, stage, LAYOUTS[0]], curves[variant, stage, layout]
    assert len(parallel["loss"]) == STEPS
    for quantity in ("loss", "gradient_norm", "validation"):
        assert parallel[quantity] == pytest.approx(single[quantity], rel=1e-5), quantity


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("stage", (2, 3))
def test_the_zero_stage_does_not_change_the_training(curves, variant, stage):
    for layout in LAYOUTS:
        first, other = curves[variant, 1, layout], curves[variant, stage, layout]
        assert other["loss"] == pytest.approx(first["loss"], rel=1e-5)
        assert other["gradient_norm"] == pytest.approx(first["gradient_norm"], rel=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_dropout_masks_do_not_depend_on_the_data_parallel_size(curves, variant):
    single, parallel = (curves[variant, DROPOUT_STAGE, layout] for layout in DATA_PARALLEL_LAYOUTS)
    assert parallel["loss"] == pytest.approx(single["loss"], rel=1e-5)
    assert single["loss"] != pytest.approx(
        curves[variant, 1, LAYOUTS[0]]["loss"], rel=1e-4
    )  # dropout did something


def test_the_curves_are_not_constants(curves):
    """Guards the tests above: steps differ from each other, and the variants differ."""
    vanilla, orthogonal = (curves[variant, 1, LAYOUTS[0]] for variant in VARIANTS)
    for quantity in ("loss", "gradient_norm"):
        assert len(set(vanilla[quantity])) == len(set(orthogonal[quantity])) == STEPS
        assert vanilla[quantity] != pytest.approx(orthogonal[quantity], rel=1e-4)
