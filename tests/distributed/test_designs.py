"""What must hold for every kind of attention: the same training under any layout, an audit that agrees with
the formulas, an exact resume, and the loss curve it has always had.
"""

import json
import os
import random
from pathlib import Path

import pytest

from pretrain.compare.theory import expected_cost
from pretrain.runs.finished import read_finished_run
from tests.command_line import checkpoint_tensors, equal
from tests.conftest import make_shards
from tests.distributed.designs import DESIGNS, STEPS, design_overrides
from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(1800)  # the first test trains all the models
SINGLE = (1, 1, False, 1)
RUNS = [  # (ranks, tensor parallel size, sequence parallel, zero stage)
    SINGLE,
    (1, 1, False, 3),
    (2, 2, False, 1),
    (2, 2, True, 2),
    (4, 4, False, 1),
    (4, 2, True, 3),
]
CASES = [
    (design, layout)
    for design in DESIGNS
    for layout in RUNS
    if design != "unfreeze" or layout[3] < 3  # is refused under ZeRO-3
]
GOLDEN = Path(__file__).parent / "golden_losses.json"


def run_name(design, layout, interrupted=False):
    ranks, size, sequence_parallel, stage = layout
    name = f"{design}-{ranks}ranks-tp{size}-sp{sequence_parallel}-zero{stage}"
    return name + ("-interrupted" if interrupted else "")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return tmp_path_factory.mktemp("designs")


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Text that is the same everywhere, unlike the Python installation's: golden curves depend on it."""
    directory = tmp_path_factory.mktemp("golden")
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(700)]
    frequency = [1 / rank for rank in range(1, len(words) + 1)]
    (directory / "corpus").mkdir()
    with (directory / "corpus/text.jsonl").open("w") as file:
        for _ in range(200):
            text = " ".join(draw.choices(words, frequency, k=150))
            file.write(json.dumps({"text": text, "meta": {"redpajama_set_name": "made"}}) + "\n")
    return make_shards(directory)


@pytest.fixture(scope="module")
def reports(shards, runs):
    """{(design, layout, interrupted): report}; one launch per world size."""
    found = {}
    for ranks in (1, 2, 4):
        cases = [(design, layout, False) for design, layout in CASES if layout[0] == ranks]
        if ranks == 1:
            cases += [(design, SINGLE, True) for design in DESIGNS]
        payload = [
            {
                "overrides": design_overrides(
                    design,
                    shards,
                    runs,
                    run_name(design, layout, interrupted),
                    layout[3],
                    parallel__tensor_model_parallel_size=layout[1],
                    parallel__sequence_parallel=layout[2],
                ),
                "interrupted": interrupted,
            }
            for design, layout, interrupted in cases
        ]
        answers = run_ranks(
            ranks, "tests.distributed.designs_worker:train_all", {"runs": payload}, timeout=1200
        )
        found.update(zip(cases, answers, strict=True))
    return found


@pytest.mark.parametrize(
    ("design", "layout"),
    [pytest.param(*case, id=run_name(*case)) for case in CASES if case[1] != SINGLE],
)
def test_training_does_not_depend_on_the_layout(reports, design, layout):
    single, parallel = reports[design, SINGLE, False], reports[design, layout, False]
    assert len(parallel["loss"]) == STEPS
    for quantity in ("loss", "gradient_norm", "validation"):
        assert parallel[quantity] == pytest.approx(single[quantity], rel=2e-5), quantity


@pytest.mark.parametrize("design", DESIGNS)
def test_the_audit_agrees_with_the_formulas_under_every_layout(reports, design):
    for layout in (layout for name, layout in CASES if name == design):
        report = reports[design, layout, False]
        totals = report["audit"]["totals"]
        assert report["audit"]["frozen_in_zero"] == 0
        assert totals["model_trainable_parameters"] == report["counted"]["trainable"], layout
        assert totals["model_frozen_parameters"] == report["counted"]["frozen"], layout


@pytest.mark.parametrize("design", DESIGNS)
def test_memory_is_what_the_formulas_of_compare_say(reports, runs, design):
    """ZeRO pads each rank's part of a group, which is much for models this small."""
    for layout in (layout for name, layout in CASES if name == design):
        run = read_finished_run(runs / run_name(design, layout))
        theory = expected_cost(run)
        assert theory is not None and theory.size.trainable_parameters == run.size.trainable_parameters
        for part in ("weight", "frozen", "gradient", "optimizer_state"):
            held, expected = getattr(run, f"{part}_bytes"), getattr(theory, f"{part}_bytes")
            assert held == pytest.approx(expected, rel=0.01), (layout, part)


@pytest.mark.parametrize("design", DESIGNS)
def test_an_interrupted_run_ends_like_an_uninterrupted_one(reports, runs, design):
    whole, resumed = reports[design, SINGLE, False], reports[design, SINGLE, True]
    for quantity in ("loss", "gradient_norm"):
        assert resumed[quantity] == whole[quantity]
    ours, theirs = (
        checkpoint_tensors(runs / run_name(design, SINGLE, interrupted) / f"checkpoints/step_{STEPS:08d}")
        for interrupted in (True, False)
    )
    assert ours.keys() == theirs.keys() and len(ours) > 20
    assert [place for place in ours if not equal(ours[place], theirs[place])] == []


@pytest.mark.parametrize("design", DESIGNS)
def test_the_loss_curve_is_the_golden_one(reports, design):
    """ORA_WRITE_GOLDEN=1 writes the file anew; look at the difference before committing it."""
    if os.environ.get("ORA_WRITE_GOLDEN"):
        curves = {design: reports[design, SINGLE, False]["loss"] for design in DESIGNS}
        GOLDEN.write_text(json.dumps(curves, indent=1) + "\n")
    golden = json.loads(GOLDEN.read_text())
    assert reports[design, SINGLE, False]["loss"] == pytest.approx(golden[design], rel=1e-4)


def test_the_designs_differ(reports):
    """Guards the tests above: no two designs train alike."""
    curves = [tuple(reports[design, SINGLE, False]["loss"]) for design in DESIGNS]
    assert len(set(curves)) == len(curves)
