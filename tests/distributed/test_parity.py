"""The same training whatever the layout: losses and gradient norms over 20 steps agree to 1e-5.

What test_designs.py lets meet in its own runs is left to `full` here.
"""

from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.distributed import test_designs
from tests.distributed.covering import covering
from tests.distributed.designs import DESIGNS
from tests.ranks import run_ranks
from tests.tiny import tiny_overrides

pytestmark = pytest.mark.timeout(1800)  # the first test trains all the models
VARIANTS = ("orthogonal", "vanilla")
STAGES = (1, 2, 3)
STEPS = 20


class Layout(NamedTuple):
    """How a run is spread over processes."""

    ranks: int
    tensor_parallel: int
    sequence_parallel: bool

    def __str__(self) -> str:
        return (
            f"{self.ranks}ranks-tp{self.tensor_parallel}{'-sp' if self.sequence_parallel else ''}"
        )


class Case(NamedTuple):
    variant: str
    stage: int
    layout: Layout
    dropout: float = 0.0

    def __str__(self) -> str:
        return f"{self.variant}-zero{self.stage}-{self.layout}-dropout{self.dropout}"


Curves = dict[Case, dict[str, list[float]]]
SINGLE, PAIR = Layout(1, 1, False), Layout(2, 1, False)
LAYOUTS = (
    Layout(2, 2, False),
    Layout(2, 2, True),
    PAIR,
    Layout(4, 2, False),
    Layout(4, 2, True),
    Layout(4, 4, False),
    Layout(4, 4, True),
)
REFERENCES = [Case(variant, stage, SINGLE) for variant in VARIANTS for stage in STAGES]
DROPOUT = [Case(variant, 1, layout, 0.1) for variant in VARIANTS for layout in (SINGLE, PAIR)]


def factors(case: Case) -> dict[str, object]:
    """What must meet: a variant, a stage, and the parts of a layout."""
    return {
        "variant": case.variant,
        "stage": case.stage,
        "tensor parallel": case.layout.tensor_parallel,
        "sequence parallel": case.layout.sequence_parallel,
        "data parallel": case.layout.ranks // case.layout.tensor_parallel,
    }


PRODUCT = [
    Case(variant, stage, layout) for variant in VARIANTS for stage in STAGES for layout in LAYOUTS
]
ELSEWHERE = [
    Case(
        DESIGNS[design]["variant"],
        there.zero_stage,
        Layout(there.ranks, there.tensor_parallel, there.sequence_parallel),
    )
    for design, there in test_designs.COVERING
]
"""Cases that test_designs.py compares with one rank, over 10 steps to 2e-5."""
BY_VARIANT_AND_STAGE = itemgetter(0, 1)
COVERING = covering(PRODUCT, factors, ELSEWHERE, at_least={BY_VARIANT_AND_STAGE: 1})
REMAINING = [case for case in PRODUCT if case not in COVERING]


class Trainings:
    """Trains sets of cases, all of one world size in one launch."""

    def __init__(self, shards: Path, runs: Path) -> None:
        self._shards = shards
        self._runs = runs

    def curves(self, cases: Sequence[Case]) -> Curves:
        found: Curves = {}
        for ranks in (1, 2, 4):
            some = [case for case in cases if case.layout.ranks == ranks]
            if some:
                runs = [self._overrides(case) for case in some]
                worker = "tests.distributed.workers.parity:train_all"
                found.update(
                    zip(some, run_ranks(ranks, worker, {"runs": runs}, timeout=800), strict=True)
                )
        return found

    def _overrides(self, case: Case) -> list[str]:
        return tiny_overrides(
            self._shards,
            self._runs,
            str(case),
            attention__variant=case.variant,
            deepspeed__config=f"zero{case.stage}",
            parallel__tensor_model_parallel_size=case.layout.tensor_parallel,
            parallel__sequence_parallel=case.layout.sequence_parallel,
            model__dropout=case.dropout,
            schedule__steps=STEPS,
            # A high rate would let Adam amplify rounding differences from step to step: 1e-7 becomes 1e-4 in
            # 20 steps.
            optimizer__learning_rate=3e-4,
            data__global_batch_size=4,
            data__sequence_length=16,
            data__validation_samples=2,
            telemetry__tensorboard="false",
        )


@pytest.fixture(scope="module")
def trainings(tiny_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    return Trainings(tiny_shards, tmp_path_factory.mktemp("parity"))


@pytest.fixture(scope="module")
def single(trainings: Trainings) -> Curves:
    return trainings.curves(REFERENCES)


@pytest.fixture(scope="module")
def selected(trainings: Trainings) -> Curves:
    return trainings.curves(COVERING)


@pytest.fixture(scope="module")
def remaining(trainings: Trainings) -> Curves:
    return trainings.curves(REMAINING)


@pytest.fixture(scope="module")
def with_dropout(trainings: Trainings) -> Curves:
    return trainings.curves(DROPOUT)


def _parameters(cases: Sequence[Case], *marks: pytest.MarkDecorator) -> list[Any]:
    return [pytest.param(case, id=str(case), marks=marks) for case in cases]


@pytest.mark.parametrize(
    "case", [*_parameters(COVERING), *_parameters(REMAINING, pytest.mark.full)]
)
def test_losses_and_gradient_norms_do_not_depend_on_layout_and_stage(
    case: Case, single: Curves, request: pytest.FixtureRequest
) -> None:
    parallel = request.getfixturevalue("selected" if case in COVERING else "remaining")[case]
    assert len(parallel["loss"]) == STEPS
    for stage in {case.stage, 1}:
        reference = single[Case(case.variant, stage, SINGLE)]
        for quantity in ("loss", "gradient_norm", "validation"):
            assert parallel[quantity] == pytest.approx(reference[quantity], rel=1e-5), (
                quantity,
                stage,
            )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("stage", STAGES[1:])
def test_the_zero_stage_does_not_change_the_training_of_one_rank(
    single: Curves, variant: str, stage: int
) -> None:
    first, other = single[Case(variant, 1, SINGLE)], single[Case(variant, stage, SINGLE)]
    for quantity in ("loss", "gradient_norm", "validation"):
        assert other[quantity] == pytest.approx(first[quantity], rel=1e-5), quantity


@pytest.mark.parametrize("variant", VARIANTS)
def test_dropout_masks_do_not_depend_on_the_data_parallel_size(
    variant: str, with_dropout: Curves, single: Curves
) -> None:
    alone, parallel = (with_dropout[Case(variant, 1, layout, 0.1)] for layout in (SINGLE, PAIR))
    assert parallel["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    without = single[Case(variant, 1, SINGLE)]
    assert alone["loss"] != pytest.approx(without["loss"], rel=1e-4)  # dropout did something


def test_the_curves_are_not_constants(single: Curves) -> None:
    """Guards the tests above: steps differ from each other, and the variants differ."""
    orthogonal, vanilla = (single[Case(variant, 1, SINGLE)] for variant in VARIANTS)
    for quantity in ("loss", "gradient_norm"):
        assert len(set(vanilla[quantity])) == len(set(orthogonal[quantity])) == STEPS
        assert vanilla[quantity] != pytest.approx(orthogonal[quantity], rel=1e-4)


def test_adapters_of_no_elements_train_like_those_of_one_rank(
    tiny_shards: Path, tmp_path: Path
) -> None:
    """Three of four ranks have no frozen head, and empty adapters: DeepSpeed's ZeRO once failed on such
    parameters (#8279, #8297)."""

    def overrides(size: int, stage: int) -> list[str]:
        return tiny_overrides(
            tiny_shards,
            tmp_path,
            f"tp{size}-zero{stage}",
            attention__variant="hybrid",
            attention__frozen_heads="{0: 0.25, 1: 0.5}",
            attention__adapters="[channel_scale, low_rank, qk_norm]",
            attention__low_rank=3,
            deepspeed__config=f"zero{stage}",
            parallel__tensor_model_parallel_size=size,
            schedule__steps=4,
        )

    worker = "tests.distributed.workers.designs:train_all"

    def runs(*layouts: tuple[int, int]) -> dict[str, Any]:
        return {
            "runs": [{"overrides": overrides(*layout), "interrupted": False} for layout in layouts]
        }

    (one,) = run_ranks(1, worker, runs((1, 1)))
    for other in run_ranks(4, worker, runs((4, 1), (4, 2))):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-6)
