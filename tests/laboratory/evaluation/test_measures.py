"""The numbers behind `evaluate`, against what can be worked out by hand."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from laboratory.evaluation.heads.approximation import (
    BANDWIDTH,
    Grid,
    Trial,
    approximation_report,
    kernel_regression,
)
from laboratory.evaluation.heads.diversity import (
    LayerDiversity,
    Limits,
    RunDiversity,
    WeightDiversity,
    diversity_report,
    entropy,
    flat_cosines,
    pairwise_divergence,
    principal_angles,
    row_cosines,
    weight_diversity,
)
from laboratory.evaluation.heads.length import LengthLoss, RunLengths, cut, length_report
from laboratory.evaluation.verbs import _ascending, approximation
from pretrain.errors import UserError


def test_principal_angles_of_known_planes() -> None:
    """Of span(e1, e2), span(cos a e1 + sin a e3, e2) and span(e3, e4)."""
    a = math.radians(30)
    planes = torch.tensor(
        [
            [[1, 0, 0, 0], [0, 1, 0, 0]],
            [[math.cos(a), 0, math.sin(a), 0], [0, 1, 0, 0]],
            [[0, 0, 1, 0], [0, 0, 0, 1]],
        ],
        dtype=torch.float64,
    )
    mixed = torch.tensor([[2.0, 1.0], [-1.0, 3.0]]).double() @ planes  # the same row spaces
    for weights in (planes, mixed):
        angles = principal_angles(weights)
        assert angles[0, 1].tolist() == pytest.approx([0, 30], abs=1e-5)
        assert angles[0, 2].tolist() == pytest.approx([90, 90])
        assert angles[1, 2].tolist() == pytest.approx([60, 90])


def test_cosines_of_weights_and_rows() -> None:
    weights = torch.tensor(
        [[[1.0, 0.0], [0.0, 1.0]], [[0.0, 2.0], [2.0, 0.0]], [[-3.0, 0.0], [0.0, 3.0]]]
    )
    assert torch.allclose(flat_cosines(weights), torch.eye(3))
    assert row_cosines(weights)[0, 1].tolist() == [[0, 1], [1, 0]]
    diversity = weight_diversity(weights.double())
    assert (diversity.cosine_max, diversity.row_cosine_max, diversity.row_cosine_mean) == (
        0,
        1,
        0.5,
    )
    # All span the plane.
    assert (diversity.angle_mean, diversity.overlap) == pytest.approx((0, 1), abs=1e-4)
    assert weight_diversity(weights[:1].double()) is None


def test_divergence_and_entropy_of_known_distributions() -> None:
    p, q = [0.5, 0.5, 0.0], [0.25, 0.25, 0.5]
    divergence = pairwise_divergence(torch.tensor([[p], [q]], dtype=torch.float64))
    assert divergence.shape == (1, 2, 2)
    assert divergence[0, 0, 1].item() == pytest.approx(math.log(2))
    bounded = 0.5 * math.log(0.5) + 0.5 * (
        math.log(0.5) - math.log(torch.finfo(torch.float64).tiny)
    )
    assert divergence[0, 1, 0].item() == pytest.approx(bounded)
    assert divergence.diagonal(dim1=1, dim2=2).abs().max() < 1e-15
    uniform = torch.ones(5, 5).tril() / torch.arange(1, 6)[:, None]
    assert entropy(uniform).tolist() == pytest.approx([math.log(t) for t in range(1, 6)])
    assert entropy(torch.eye(3)).tolist() == [0, 0, 0]


def test_blocks_of_every_length_predict_the_same_ids_once() -> None:
    spans = np.arange(2 * 13).reshape(2, 13)  # T = 4
    for length in (2, 4, 6):
        blocks = cut(spans, length)
        assert blocks.shape == (2 * 12 // length, length + 1)
        assert blocks[:, 1:].reshape(2, 12).tolist() == spans[:, 1:].tolist()
        assert (blocks[:, :-1] == blocks[:, 1:] - 1).all()


def run_lengths(
    group: str, losses: dict[float, float], not_longer: str | None = None
) -> RunLengths:
    """Of trained length 2: the same loss at every place of the span of 6."""
    entries = {
        factor: LengthLoss(round(2 * factor), np.full(6, loss), np.ones(6))
        for factor, loss in losses.items()
    }
    return RunLengths(group, group, 1, 2, losses=entries, not_longer=not_longer)


def test_length_verdicts() -> None:
    stable = run_lengths("stable", {0.5: math.log(1.1), 1.0: math.log(1.05), 1.5: math.log(1.0)})
    grows = run_lengths("grows", {0.5: 1.0, 1.0: 1.0, 1.5: 1.2})
    bound = run_lengths("bound", {0.5: 1.0, 1.0: 1.0}, "no such position")
    fails = run_lengths("fails", {0.5: 1.5, 1.0: 1.0}, "no such position")
    report = length_report([stable, grows, bound, fails], tolerance=0.1)
    answers = ["yes (1 of 1)", "no (0 of 1)", "not testable", "no (0 of 1)"]
    assert [v.answer for v in report.verdicts] == answers
    assert grows.change(1.5) == pytest.approx(math.exp(0.2) - 1)
    assert grows.gain().tolist() == pytest.approx([0.2] * 3)
    assert any("no such position" in note for note in report.notes)


def test_diversity_verdicts() -> None:
    weights = weight_diversity(torch.eye(4, dtype=torch.float64).view(2, 2, 4))
    alike = weight_diversity(torch.ones(2, 1, 4, dtype=torch.float64))

    def run(
        group: str, seed: int, role: WeightDiversity | None, divergence: float | None
    ) -> RunDiversity:
        attention = {"divergence": divergence, "entropy": 1.0, "relative_entropy": 0.5}
        layers = [LayerDiversity(role, role, **attention)]
        return RunDiversity(f"{group}-{seed}", group, seed, trained=layers, untrained=layers)

    runs = [
        run("good", 1, weights, 1.5),
        run("good", 2, weights, 0.5),
        run("alike", 1, alike, 1.5),
        run("scores only", 1, None, 1.5),
        run("one head", 1, None, None),
    ]
    report = diversity_report(runs, Limits(), 1)
    answers = {verdict.group: verdict.answer for verdict in report.verdicts}
    assert answers == {
        "good": "in part (1 of 2)",
        "alike": "no (0 of 1)",
        "scores only": "yes (1 of 1)",
        "one head": "not testable",
    }
    assert "not applicable" in next(v.numbers for v in report.verdicts if v.group == "scores only")


def test_kernel_regression_is_the_kernel_mean_of_the_past() -> None:
    features, targets = kernel_regression(3, sequences=2)
    row = features[1].double().numpy()
    for t in (0, 1, 31):
        kernel = np.exp(-((row[: t + 1, :2] - row[t, :2]) ** 2).sum(1) / (2 * BANDWIDTH**2))
        assert float(targets[1, t]) == pytest.approx(
            (kernel * row[: t + 1, 2]).sum() / kernel.sum(), rel=1e-4
        )
    assert float(targets[1, 0]) == pytest.approx(float(features[1, 0, 2]))
    assert not torch.equal(features, kernel_regression(4, sequences=2)[0])


def test_a_variant_named_twice_is_refused_before_the_training() -> None:
    with pytest.raises(UserError, match="--variants vanilla, vanilla names a variant twice"):
        approximation(Path("unused"), "vanilla, vanilla")


def test_approximation_verdicts() -> None:
    grid = Grid(("a", "b"), (8, 16), (1,), seeds=2, steps=1, learning_rate=1e-3)
    grid_errors = {
        ("a", 8): (0.5, 0.5),
        ("a", 16): (0.10, 0.10),
        ("b", 8): (0.5, 0.5),
        ("b", 16): (0.109, 0.12),
    }
    trials = [
        Trial(variant=variant, width=width, depth=1, seed=seed, error=error, trainable_parameters=0)
        for (variant, width), errors in grid_errors.items()
        for seed, error in enumerate(errors, start=1)
    ]
    report = approximation_report(grid, trials, tolerance=0.1)
    assert [v.answer for v in report.verdicts] == ["yes (2 of 2)", "in part (1 of 2)"]
    assert "14.5 ± 7.8 % above the baseline" in report.verdicts[1].numbers
    equal, large = report.tables[1].rows
    assert equal == ("8", "1", "2", "1.00 [1.00, 1.00]")
    # ± t(0.975, 1) sd / √2; of two, sd / √2 is half their distance.
    logarithms = np.log([1.09, 1.2])
    mean = logarithms.mean()
    half = 12.7062 * (logarithms[1] - logarithms[0]) / 2
    assert large[-1] == f"{np.exp(mean):.2f} [{np.exp(mean - half):.2f}, {np.exp(mean + half):.2f}]"


@pytest.mark.parametrize(
    ("variant", "width", "reason"),
    [
        ("unfreeze", 8, "schedule belongs to the training loop"),
        ("orthogonal_penalty", 8, "schedule belongs to the training loop"),
        ("nobody", 8, "attention.variant is 'nobody'"),
        ("vanilla", 10, "hidden_size=10 is not divisible"),
    ],
)
def test_what_cannot_be_regressed_is_refused(variant: str, width: int, reason: str) -> None:
    grid = Grid((variant,), (width,), (2,), seeds=1, steps=10, learning_rate=1e-3)
    with pytest.raises(UserError, match=reason):
        grid.config(variant, width, depth=2, seed=1)


@pytest.mark.parametrize("text", ["", "16,8", "8,8", "0,4", "a"])
def test_sizes_must_ascend(text: str) -> None:
    with pytest.raises(UserError, match="--widths is"):
        _ascending("--widths", text)
