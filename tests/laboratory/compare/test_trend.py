"""How gaps change with a numeric subject: against numpy and scipy used directly, and what is said
of it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from laboratory.compare.compare_runs import compare_runs
from laboratory.compare.comparison import Comparison
from laboratory.compare.report import comparison_document
from laboratory.compare.trend import Trend, fit_trends, subject_numbers, trend_sentence
from laboratory.study.gaps import NATS, PairedGap, holm, paired_gap
from laboratory.study.report import write
from pretrain.errors import UserError
from tests.fabricated_runs import write_run

COMMAND = [("python", "-m", "pretrain", "compare")]
DEPTHS = (2, 4, 16)  # 1, 2 and 4 doublings above one
GAPS = {  # {variant: gaps at each depth, one row for each seed from 1}
    "orthogonal": ((0.01, 0.03, 0.08), (0.02, 0.05, 0.07), (0.00, 0.02, 0.09), (0.03, 0.03, 0.10),
                   (0.01, 0.04, 0.06)),
    "gaussian": ((0.05, 0.04, 0.06), (0.06, 0.05, 0.04), (0.04, 0.06, 0.05), (0.05, 0.05, 0.05),
                 (0.03, 0.06, 0.07)),
}  # fmt: skip


def sweep(
    root: Path,
    gaps: Mapping[str, Sequence[Sequence[float | None]]],
    values: Sequence[Any] = DEPTHS,
    keys: Sequence[str] = ("config.model.num_layers",),
) -> list[Path]:
    """Runs of vanilla and of each variant at each value of `keys`; None: that run was not made.

    Runs of one variant and seed have one name, in a directory for each value.
    """
    paths = []
    seeds = range(1, 1 + max(map(len, gaps.values())))
    every = {"vanilla": [[0.0] * len(values) for _ in seeds], **gaps}
    for index, value in enumerate(values):
        folder = root / str(value)
        changes = dict.fromkeys(keys, value)
        for variant, rows in every.items():
            for seed, row in zip(seeds, rows, strict=False):
                if (gap := row[index]) is not None:
                    name = f"{variant}-{seed}"
                    loss = 4.5 - 0.1 * index + 0.02 * seed + gap
                    run = write_run(folder, name, variant, seed=seed, loss=loss, changes=changes)
                    paths.append(run)
    return paths


def lines_over(
    gaps: Mapping[str, Sequence[Sequence[float | None]]], values: Sequence[float] = DEPTHS
) -> tuple[tuple[Trend, ...], list[str]]:
    """The same without runs: the gaps themselves at each of `values`."""
    by_value: dict[str, dict[float, PairedGap]] = {}
    for variant, rows in gaps.items():
        for index, value in enumerate(values):
            gap_by_seed = {seed: row[index] for seed, row in enumerate(rows, start=1)}
            there = {
                seed: 4.0 + difference
                for seed, difference in gap_by_seed.items()
                if difference is not None
            }
            gap = paired_gap("vanilla", there, dict.fromkeys(there, 4.0), NATS)
            if gap is not None:
                by_value.setdefault(variant, {})[value] = gap
    return fit_trends("model.num_layers", by_value)


def trend_of(comparison: Comparison, label: str) -> Trend:
    return next(trend for trend in comparison.trends if trend.label == label)


def test_slopes_against_numpy_and_scipy_directly(tmp_path: Path) -> None:
    comparison = compare_runs(sweep(tmp_path, GAPS), "vanilla", ["model.num_layers"])
    doublings = np.array([1.0, 2.0, 4.0])
    p_values = {}
    assert [trend.label for trend in comparison.trends] == list(GAPS)
    for label, rows in GAPS.items():
        trend = trend_of(comparison, label)
        lines = [stats.linregress(doublings, row) for row in rows]
        test = stats.ttest_1samp([line.slope for line in lines], 0.0)
        span = test.confidence_interval(0.95)
        assert trend.slope.differences == pytest.approx([line.slope for line in lines])
        assert trend.slope.mean == pytest.approx(np.mean([line.slope for line in lines]))
        assert (trend.slope.low, trend.slope.high) == pytest.approx((span.low, span.high))
        assert trend.intercept == pytest.approx(np.mean([line.intercept for line in lines]))
        p_values[label] = test.pvalue
        means = np.mean(rows, axis=0)
        line = np.polyval(np.polyfit(doublings, means, 1), doublings)
        assert trend.residual == pytest.approx(np.abs(means - line).max())
        assert list(trend.gaps) == list(DEPTHS)
        for gap, column in zip(trend.gaps.values(), np.transpose(rows), strict=True):
            interval = stats.ttest_1samp(column, 0.0).confidence_interval(0.95)
            assert (gap.n, gap.mean) == (5, pytest.approx(column.mean()))
            assert (gap.low, gap.high) == pytest.approx((interval.low, interval.high))
    adjusted = holm(list(p_values.values()))
    assert [trend.slope.t_p_holm for trend in comparison.trends] == pytest.approx(adjusted)


def test_only_seeds_with_a_gap_at_every_value_have_a_line() -> None:
    """Seeds 2 and 3 do; gaussian was never made at 16, so two values make its line; of monarch one
    does."""
    gaps = {
        "orthogonal": ((0.01, None, 0.05), (0.01, 0.02, 0.03), (0.01, 0.03, 0.05)),
        "gaussian": ((0.01, 0.02, None), (0.01, 0.04, None)),
        "monarch": ((0.01, None, 0.02), (None, 0.01, 0.02), (0.01, 0.01, 0.01)),
        "hadamard": ((0.01, None, None), (0.02, None, None)),
    }
    trends, lost = lines_over(gaps)
    assert [trend.label for trend in trends] == ["orthogonal", "gaussian"]
    first, second = trends
    assert first.slope.seeds == (2, 3) and [gap.n for gap in first.gaps.values()] == [3, 2, 3]
    assert second.slope.differences == pytest.approx((0.01, 0.03)) and second.residual is None
    assert "two values cannot show whether a line fits" in trend_sentence(second)
    assert lost == [
        "No line over model.num_layers for monarch: fewer than two seeds have a gap at each of its "
        "3 values."
    ]


@pytest.mark.parametrize(("seeds", "claimed"), [(4, False), (5, True)])
def test_a_slope_is_claimed_from_five_seeds_on(seeds: int, claimed: bool) -> None:
    gaps = {"orthogonal": [(0.01, 0.03 + seed / 1000, 0.07) for seed in range(seeds)]}
    ((trend,), _) = lines_over(gaps, (2, 4, 8))
    assert trend.slope.differences == pytest.approx([0.03] * seeds)
    assert "all slopes are equal" in trend_sentence(trend) or not claimed
    gaps = {"orthogonal": [(0.01, 0.03, 0.07 + seed / 1000) for seed in range(seeds)]}
    ((trend,), _) = lines_over(gaps, (2, 4, 8))
    assert trend.slope.t_p is not None and trend.slope.t_p < 1e-4
    assert trend.slope.significance_claimed == claimed
    assert ("the gap rises significantly at 5 %" in trend_sentence(trend)) == claimed


def test_a_line_over_tokens_names_what_changes_with_them(tmp_path: Path) -> None:
    """Runs of different length, named alike: also their steps and warm-up differ, which is only
    told."""
    tokens = (204_800, 409_600, 819_200)
    paths = sweep(tmp_path, {"orthogonal": GAPS["orthogonal"]}, tokens, ("summary.tokens",))
    for path in paths:
        config = path / "config.yaml"
        steps = int(path.parent.name) // 2048
        text = config.read_text().replace(
            "  steps: 100\n  tokens: null\n", f"  steps: null\n  tokens: {steps * 2048}\n", 1
        )
        config.write_text(text.replace("warmup_steps: 5\n", f"warmup_steps: {steps // 20}\n", 1))
    comparison = compare_runs(paths, "vanilla", ["tokens"])
    (trend,) = comparison.trends
    document = comparison_document(comparison, COMMAND)
    write(replace(document, figures={}), tmp_path / "out")
    report = (tmp_path / "out" / "report.md").read_text()
    summary = report.partition("## Validation")[0]
    assert "The runs also differ in schedule.warmup_steps: 5 in" in summary
    assert "## How the gap changes with tokens\n\nIn nats per token:\n\n| variant |" in report
    assert "| variant | gap at tokens=204,800 |" in report
    assert "Change per doubling: for each seed" in report
    content = json.loads((tmp_path / "out" / "comparison.json").read_text())
    (written,) = content["trends"]
    assert written["slope"]["by_seed"] == dict(zip("12345", trend.slope.differences, strict=True))
    assert written["slope"]["significance_claimed"]
    assert [point["value"] for point in written["points"]] == list(tokens)


def test_without_one_numeric_subject_and_a_baseline_at_each_value_there_is_no_trend(
    tmp_path: Path,
) -> None:
    assert subject_numbers({"a": [1, 2.5, 1]}) == [1, 2.5, 1]
    for values in ([0, 1], [-1, 2], [True, False], ["a", "b"], [None, 1], [3, 3], [math.inf, 1]):
        assert subject_numbers({"a": values}) is None
    assert subject_numbers({}) is None and subject_numbers({"a": [1, 2], "b": [1, 2]}) is None
    paths = sweep(tmp_path, {"orthogonal": ((0.01, 0.02), (0.01, 0.03))}, values=(2, 4))
    assert compare_runs(paths, "vanilla num_layers=2", ["model.num_layers"]).trends == ()


def lengths(root: Path, samples: Mapping[int, int]) -> list[Path]:
    """Two seeds of two variants at each length, with so many validation samples."""
    paths = []
    for length, count in samples.items():
        changes = dict.fromkeys(("config.data.sequence_length", "data.sequence_length"), length)
        changes["config.data.validation_samples"] = count
        for variant, loss in (("vanilla", 4.0), ("orthogonal", 4.1)):
            for seed in (1, 2):
                name = f"{variant}-{length}-{seed}"
                seed_loss = loss + seed / length
                run = write_run(root, name, variant, seed=seed, loss=seed_loss, changes=changes)
                paths.append(run)
    return paths


def test_lengths_of_samples_as_the_subject(tmp_path: Path) -> None:
    """The number of validation samples follows where it keeps the held-out text the same."""
    subject = ["data.sequence_length"]
    same = compare_runs(lengths(tmp_path / "same", {64: 128, 128: 64}), "vanilla", subject)
    assert [gap.mean for gap in same.trends[0].gaps.values()] == pytest.approx([0.1, 0.1])
    notes = [note for note in same.notes if note.startswith("Losses of different")]
    assert notes == [
        "Losses of different data.sequence_length are not of the same tokens (samples of another "
        "length cut the held-out text otherwise); gaps within one length are."
    ]
    part = compare_runs(lengths(tmp_path / "part", {64: 64, 128: 64}), "vanilla", subject)
    assert "data.validation_samples of them are another part of it" in " ".join(part.notes)
    said = r"data\.validation_samples is 64 in .* say --subject data\.valid"
    with pytest.raises(UserError, match=said):
        compare_runs(lengths(tmp_path / "other", {64: 64, 128: 128}), "vanilla", subject)
