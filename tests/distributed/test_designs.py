"""What must hold for every kind of attention.

The same training under any layout, an audit that agrees with the formulas, an exact resume, and the
loss curve it has always had.
"""

import json
import os
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pytest

from laboratory.compare.theory import expected_cost
from laboratory.runs.finished import read_finished_run
from tests.command_line import assert_resumed_exactly
from tests.conftest import make_shards
from tests.distributed.covering import covering
from tests.distributed.designs import DESIGNS, PHASED, STEPS, design_overrides
from tests.ranks import run_ranks
from tools.made_corpus import write_made_corpus

pytestmark = pytest.mark.timeout(1800)  # the first test trains all the models


class Layout(NamedTuple):
    """How a run is spread over processes."""

    ranks: int
    tensor_parallel: int
    sequence_parallel: bool
    zero_stage: int

    def __str__(self) -> str:
        sequence = "-sp" if self.sequence_parallel else ""
        return f"{self.ranks}ranks-tp{self.tensor_parallel}{sequence}-zero{self.zero_stage}"


Case = tuple[str, Layout]
Reports = dict[Case, dict[str, Any]]
SINGLE = Layout(1, 1, False, 1)
LAYOUTS = (
    SINGLE,
    Layout(1, 1, False, 3),
    Layout(2, 1, False, 0),
    Layout(2, 2, True, 0),
    Layout(2, 2, False, 1),
    Layout(2, 2, True, 2),
    Layout(4, 4, False, 1),
    Layout(4, 2, True, 3),
)
REFERENCES: list[Case] = [(design, SINGLE) for design in DESIGNS]
GOLDEN = Path(__file__).parent / "golden_losses.json"
LIKE = {
    "gaussian": "orthogonal",
    "hadamard": "orthogonal",
    "dct": "orthogonal",
    "orthogonal_trainable": "vanilla",
}
"""Variants that differ from another only in their numbers at the start.

The tests of the bank hold those bits for any number of ranks.
"""


def factors(case: Case) -> dict[str, object]:
    """What must meet: a kind of attention and the parts of a layout.

    A kind at 4 ranks is `full`.
    """
    design, layout = case
    return {
        "kind": LIKE.get(DESIGNS[design]["variant"], DESIGNS[design]["variant"]),
        "tensor parallel": layout.tensor_parallel > 1,
        "sequence parallel": layout.sequence_parallel,
        "stage": layout.zero_stage,
    }


PRODUCT: list[Case] = [
    (design, layout)
    for design in DESIGNS
    for layout in LAYOUTS[1:]
    if design not in PHASED or layout.zero_stage in (1, 2)  # is refused elsewhere
]
COVERING = covering(PRODUCT, factors, REFERENCES, at_least={itemgetter(0): 1, itemgetter(1): 3})
REMAINING = [case for case in PRODUCT if case not in COVERING]
QUICK = {
    "vanilla",
    "orthogonal",
    "monarch",
    "hybrid-three-adapters",
    "unfreeze",
    "synthesizer_random",
    "modern-monarch_shared_conv",
}
"""Designs of `make test`, one of each kind. The rest is marked `slow`.

Trained rows, frozen ones, factors, heads that differ, a phase, no scores, the modern block.
"""
AFTER = {"monarch-freezes": 3}
"""The step after which a design is resumed, if not 5: when its phase changes, or before.

The second change of `unfreeze` is behind step 5, that of `vanilla-freezes` at it.
"""


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text that is the same everywhere, unlike the Python installation's.

    Golden curves depend on it.
    """
    directory = tmp_path_factory.mktemp("golden")
    write_made_corpus(directory / "corpus")
    return make_shards(directory, "unigram")  # as when the curves were drawn


def _batches() -> list[list[Case]]:
    """Cases that are trained together: what one test asks for, those beside it will."""
    halves = [
        [case for case in cases if (case[0] in QUICK) == quick]
        for quick in (True, False)
        for cases in (REFERENCES, COVERING)
    ]
    return [*halves, REMAINING]


BATCHES = _batches()


class Trained:
    """Trains the cases of a batch, all of one world size in one launch, when one is asked for."""

    def __init__(self, shards: Path, runs: Path) -> None:
        self._shards = shards
        self._runs = runs
        self._reports: Reports = {}

    def path(self, case: Case) -> Path:
        return self._runs / f"{case[0]}-{case[1]}"

    def report(self, case: Case) -> dict[str, Any]:
        """The report of a case, whose batch is trained if it was not.

        References are resumed too.
        """
        if case not in self._reports:
            self._train(next(batch for batch in BATCHES if case in batch))
        return self._reports[case]

    def _train(self, cases: Sequence[Case]) -> None:
        for ranks in (1, 2, 4):
            some = [case for case in cases if case[1].ranks == ranks]
            if not some:
                continue
            runs = [self._run(case) for case in some]
            worker = "tests.distributed.workers.designs:train_all"
            reports = run_ranks(ranks, worker, {"runs": runs}, timeout=1200)
            self._reports.update(zip(some, reports, strict=True))

    def _run(self, case: Case) -> dict[str, Any]:
        design, layout = case
        after = AFTER.get(design, 5) if layout == SINGLE else None
        overrides = design_overrides(
            design,
            self._shards,
            runs=self._runs,
            name=self.path(case).name,
            zero_stage=layout.zero_stage,
            parallel__tensor_model_parallel_size=layout.tensor_parallel,
            parallel__sequence_parallel=layout.sequence_parallel,
            checkpoint__every=after or 0,
            checkpoint__keep_last=STEPS,
        )
        return {"overrides": overrides, "after": after}


@pytest.fixture(scope="module")
def trained(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(shards, tmp_path_factory.mktemp("designs"))


@pytest.fixture
def report(case: Case, trained: Trained) -> dict[str, Any]:
    """The report of the test's `case`."""
    return trained.report(case)


def _parameters(cases: Sequence[Case], *marks: pytest.MarkDecorator) -> list[Any]:
    return [
        pytest.param(
            case,
            id=f"{case[0]}-{case[1]}",
            marks=marks if case[0] in QUICK else (*marks, pytest.mark.slow),
        )
        for case in cases
    ]


PARALLEL = [*_parameters(COVERING), *_parameters(REMAINING, pytest.mark.full)]
every_design = pytest.mark.parametrize("case", _parameters(REFERENCES))
every_parallel_case = pytest.mark.parametrize("case", PARALLEL)
every_case = pytest.mark.parametrize("case", [*_parameters(REFERENCES), *PARALLEL])


@every_parallel_case
def test_training_does_not_depend_on_the_layout(
    case: Case, report: dict[str, Any], trained: Trained
) -> None:
    reference = trained.report((case[0], SINGLE))
    assert len(report["loss"]) == STEPS
    for quantity in ("loss", "gradient_norm", "z_loss", "validation"):
        assert report[quantity] == pytest.approx(reference[quantity], rel=2e-5), quantity


def test_every_trained_weight_counts(tmp_path: Path) -> None:
    """None is left out of the loss, nor undone by what comes after it."""
    runs = [design_overrides(design, tmp_path, tmp_path, name="run") for design in DESIGNS]
    answers = run_ranks(1, "tests.distributed.workers.designs:gradients", {"runs": runs})
    for design, gradients in zip(DESIGNS, answers, strict=True):
        least = 1e-5 * median(gradients.values())
        assert min(gradients.values()) > least > 0, (design, gradients)


@pytest.mark.slow
def test_four_tensor_parallel_ranks_compute_what_one_does(tmp_path: Path) -> None:
    """For every design that does not train on four ranks above."""
    trained = {design for design, layout in COVERING if layout.tensor_parallel == 4}
    designs = [design for design in DESIGNS if design not in trained]
    losses = []
    for size in (1, 4):
        layout = {
            "parallel__tensor_model_parallel_size": size,
            "parallel__sequence_parallel": str(size > 1).lower(),
        }
        runs = [
            design_overrides(
                design,
                tmp_path,
                runs=tmp_path,
                name=design,
                zero_stage=1,
                model__init_std=0.2,
                **layout,
            )
            for design in designs
        ]
        losses.append(run_ranks(size, "tests.distributed.workers.designs:descents", {"runs": runs}))
    for design, alone, four in zip(designs, *losses, strict=True):
        # The steps moved the weights; with norms of queries and keys they are long, and overshoot.
        assert abs(alone[0] - alone[-1]) > 0.05, design
        assert four == pytest.approx(alone, rel=2e-5), design


@every_case
def test_the_audit_agrees_with_the_formulas(case: Case, report: dict[str, Any]) -> None:
    totals = report["audit"]["totals"]
    assert report["audit"]["frozen_in_zero"] == 0
    assert totals["model_trainable_parameters"] == report["counted"]["trainable"]
    assert totals["model_frozen_parameters"] == report["counted"]["frozen"]


@every_case
def test_memory_is_what_the_formulas_of_compare_say(
    case: Case, report: dict[str, Any], trained: Trained
) -> None:
    """ZeRO pads each rank's part of a group, which is much for models this small."""
    run = read_finished_run(trained.path(case))
    theory = expected_cost(run)
    assert theory is not None and theory.size.trainable_parameters == run.size.trainable_parameters
    for part in ("weight", "frozen", "gradient", "optimizer_state"):
        held = getattr(run.states, f"{part}_bytes")
        expected = getattr(theory.states, f"{part}_bytes")
        assert held == pytest.approx(expected, rel=0.01), part


@every_design
def test_a_resumed_run_ends_like_an_uninterrupted_one(
    case: Case, report: dict[str, Any], trained: Trained
) -> None:
    run = trained.path(case)
    assert_resumed_exactly(run, run.with_name(f"{run.name}-after-{AFTER.get(case[0], 5)}"))


@every_design
def test_the_loss_curve_is_the_golden_one(case: Case, report: dict[str, Any]) -> None:
    """ORA_WRITE_GOLDEN=NAME[,NAME…] writes the curves of these designs.

    Look at them before committing.
    """
    golden = json.loads(GOLDEN.read_text())
    if case[0] in os.environ.get("ORA_WRITE_GOLDEN", "").split(","):
        written = golden | {case[0]: report["loss"]}
        golden = {design: written[design] for design in DESIGNS if design in written}
        GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")
    assert case[0] in golden, f"no curve is recorded; ORA_WRITE_GOLDEN={case[0]} records it"
    assert report["loss"] == pytest.approx(golden[case[0]], rel=1e-4)


@pytest.mark.slow
def test_the_designs_differ(trained: Trained) -> None:
    """Guards the tests above: no two designs train alike."""
    curves = [tuple(trained.report(case)["loss"]) for case in REFERENCES]
    assert len(set(curves)) == len(curves)
