"""compare at equal compute: learning curves, prices to the baseline's loss, numbers of the
committed runs."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Collection
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from laboratory.compare.compare_runs import compare_runs
from laboratory.compare.comparison import Comparison
from laboratory.compare.compute import (
    BASELINE_LENGTHS,
    LENGTHS,
    VALIDATIONS,
    Curve,
    EqualCompute,
    Ratio,
)
from laboratory.compare.figures import loss_figure
from laboratory.compare.report import as_json, report_page
from laboratory.compare.summary import in_short
from laboratory.compare.tables import cost_table
from laboratory.study.report import page_text
from pretrain.errors import UserError
from pretrain.runs import tags
from tests.fabricated_runs import LENGTH, write_run
from tests.ranks import ROOT

RESUMED = [{"first_step": 1, "changes": {}}, {"first_step": 50, "changes": {}}]
CURVE = Curve.through({100: 5.0, 200: 4.6, 400: 4.0})


def committed(root: Path, page: str, labels: Collection[str], without: int = 0) -> list[Path]:
    """Runs with the losses of docs/results/PAGE; those of so many tokens are left out."""
    paths = []
    for row in csv.DictReader((ROOT / "docs/results" / page / "runs.csv").open()):
        label = row["variant"].split()[0]
        tokens = int(row["tokens"])
        variant, *adapters = label.split("+")
        if label in labels and tokens != without:
            changes: dict[str, Any] = {"summary.tokens": tokens}
            changes["data.unigram_perplexity"] = float(row["unigram_perplexity"])
            if adapters:
                changes |= {"config.attention.adapters": adapters, "config.attention.low_rank": 8}
            seed = int(row["seed"])
            loss = float(row["validation_loss"])
            name = f"{page}-{label}-{tokens}-{seed}"
            paths.append(write_run(root, name, variant, seed=seed, loss=loss, changes=changes))
    return paths


def learnt(root: Path, name: str, last: float, slope: float = 0.4, **options: Any) -> Path:
    """A run that was validated after each quarter, with a loss that falls by `slope` nats a
    doubling."""
    losses = [None if step % 25 else last - slope * math.log2(step / 100) for step in range(1, 101)]
    return write_run(root, name, loss=last, columns={tags.VALIDATION_LOSS.tag: losses}, **options)


def pairs(root: Path, gap: float = 0.1, **options: Any) -> list[Path]:
    last = {"vanilla": 4.0, "orthogonal": 4.0 + gap}
    return [
        learnt(root, f"{name}-{seed}", loss + seed / 100, seed=seed, variant=name, **options)
        for name, loss in last.items()
        for seed in (1, 2, 3)
    ]


def priced(comparison: Comparison) -> EqualCompute:
    """The second variant at equal compute."""
    compute = comparison.variants[1].compute
    assert compute is not None
    return compute


def shown(comparison: Comparison) -> str:
    return page_text(report_page(comparison, [("compare",)]))


def rounded(ratio: Ratio | None) -> tuple[float, ...]:
    assert ratio is not None and ratio.low is not None and ratio.high is not None
    return round(ratio.mean, 2), round(ratio.low, 2), round(ratio.high, 2)


def test_a_curve_is_straight_in_the_logarithm_of_the_tokens() -> None:
    for tokens, loss in ((200, 4.6), (math.sqrt(2) * 200, 4.3), (50, 5.4), (800, 3.4)):
        assert CURVE.loss(tokens) == pytest.approx(loss)
    for tokens in (50, 120, 200, 300, 800):
        assert CURVE.tokens_to(CURVE.loss(tokens)) == pytest.approx(tokens)
    assert CURVE.covers(4.0) and CURVE.covers(4.9) and not CURVE.covers(3.9)
    assert CURVE.slope == pytest.approx(0.5)


def test_past_an_end_counts_the_whole_doubling_there() -> None:
    """Not the last two points alone, where a decayed learning rate leaves little to learn."""
    curve = Curve.through({100: 5.0, 200: 4.5, 300: 4.1, 400: 4.0})
    assert curve.loss(800) == pytest.approx(3.5)
    curve = Curve.through({100: 5.0, 200: 4.6, 400: 4.0, 800: 3.0})
    assert curve.loss(50) == pytest.approx(5.4) and curve.loss(1600) == pytest.approx(2.0)
    assert Curve.through({100: 5.0, 200: 4.5, 400: 4.6}).tokens_to(4.4) is None
    assert Curve.through({100: 4.0, 200: 4.5}).tokens_to(3.9) is None  # as far back as it goes
    for points in ({1: 4.0, 2: 5.0, 4: 4.5}, {1: 4.5, 2: 4.2, 4: 5.0}):
        curve = Curve.through(points)
        assert all(curve.covers(loss) for loss in points.values())
        assert not curve.covers(min(points.values()) - 0.01) and not curve.covers(5.01)
    point = Curve.through({100: 5.0}, slope=0.25)
    assert point.tokens_to(4.75) == pytest.approx(200) and not point.covers(4.75)


def test_a_ratio_is_a_geometric_mean() -> None:
    ratio = Ratio.of({1: 0.5, 2: 2.0})
    assert ratio is not None and ratio.mean == pytest.approx(1.0)
    assert ratio.low is not None and ratio.high == pytest.approx(1 / ratio.low)
    assert Ratio.of({1: 1.0, 2: 1.0}) == Ratio(1.0, 1.0, 1.0)
    assert Ratio.of({1: 3.0}) == Ratio(pytest.approx(3.0), None, None) and Ratio.of({}) is None


def test_the_price_of_a_gap_read_off_the_runs_own_validations(tmp_path: Path) -> None:
    comparison = compare_runs(pairs(tmp_path), "vanilla")
    assert comparison.variants[0].compute is None
    compute = priced(comparison)
    assert compute.token_ratio is not None and compute.effective_compute is not None
    cost = 7_995_392 / 8_257_536
    assert compute.cost == pytest.approx(cost)
    assert (compute.curve, compute.beyond, compute.gap_beyond) == (VALIDATIONS, 3, 0)
    assert compute.token_ratio.mean == pytest.approx(2 ** (0.1 / 0.4))
    assert compute.effective_compute.mean == pytest.approx(2 ** (0.1 / 0.4) * cost)
    even = -0.4 * math.log2(cost)
    assert compute.break_even == pytest.approx(even) and compute.slope == pytest.approx(0.4)
    assert compute.gap is not None and compute.gap.mean == pytest.approx(0.1 - even)
    learned = math.log(200) - 4.02
    assert comparison.variants[1].gap_of_context == pytest.approx(0.1 / learned)


def test_the_headline_is_the_gap_at_what_is_matched(tmp_path: Path) -> None:
    paths = pairs(tmp_path)
    tokens, flops = (compare_runs(paths, "vanilla", (), match) for match in ("tokens", "flops"))
    gaps = [comparison.variants[1].gap for comparison in (tokens, flops)]
    assert gaps[0] is not None and gaps[1] is not None and gaps[0].mean == pytest.approx(0.1)
    assert gaps[1].mean == pytest.approx(0.1 + 0.4 * math.log2(7_995_392 / 8_257_536))
    report, other = map(shown, (tokens, flops))
    assert "Gaps are at equal FLOPs" in other and "Gaps are" not in report
    assert "## Equal compute\n\n| variant | FLOPs a token |" in report
    assert "| orthogonal | -3.2 % | × 1.19 [1.19, 1.19]* | × 1.15 [1.15, 1.15]* |" in report
    assert "before its learning rate had fallen" in report
    assert as_json(flops)["match"] == "flops"


def test_runs_of_one_length_in_flops_are_compared_at_their_ends(tmp_path: Path) -> None:
    """A cheaper variant has then seen more tokens, and no learning curve is needed."""
    paths = []
    schedule = {"config.schedule.flops": 10**12, "config.schedule.steps": None}
    for seed in range(1, 6):
        ends = {"vanilla": (4.0, 200_000), "orthogonal": (4.1 + seed / 1000, 206_000)}
        for variant, (loss, tokens) in ends.items():
            changes = {**schedule, "summary.tokens": tokens}
            name = f"{variant}-{seed}"
            paths.append(write_run(tmp_path, name, variant, seed=seed, loss=loss, changes=changes))
    comparison = compare_runs(paths, "vanilla", (), "flops")
    gap = comparison.variants[1].gap
    assert gap is not None and gap.n == 5 and gap.mean == pytest.approx(0.103)
    assert "each run ended after 1e+12 executed ones" in shown(comparison)
    losses, distances = loss_figure(comparison).axes[:2]
    ends = [max(line.get_xdata()) for line in (*losses.lines, distances.lines[0])]
    assert ends[:2] == pytest.approx([200_000, 206_000], rel=0.01)
    assert ends[0] * 0.99 < ends[2] <= ends[0]  # a distance ends where the baseline does
    with pytest.raises(UserError, match="or say --match flops if that is what is compared"):
        compare_runs(paths, "vanilla")
    longer = {**schedule, "config.schedule.flops": 2 * 10**12}
    other = write_run(tmp_path, "other", seed=9, changes=longer)
    with pytest.raises(UserError, match=r"tokens is .* or say --subject tokens"):
        compare_runs([*paths, other], "vanilla", (), "flops")


def test_without_a_curve_there_is_no_price_and_no_match(tmp_path: Path) -> None:
    paths = [write_run(tmp_path, name, name) for name in ("vanilla", "orthogonal")]
    comparison = compare_runs(paths, "vanilla")
    compute = priced(comparison)
    assert {compute.curve, compute.token_ratio, compute.gap} == {None}
    assert "No learning curve for orthogonal: " in shown(comparison)
    said = "--match flops cannot be had for orthogonal: its learning curve has one"
    with pytest.raises(UserError, match=said):
        compare_runs(paths, "vanilla", (), "flops")


def timed(
    root: Path,
    name: str,
    seconds: float,
    started: str = "12:00:00",
    host: str = "a",
    *,
    seed: int = 1,
    **more: Any,
) -> Path:
    facts = {"started": f"2026-11-22T{started}+0000", "host": host, **more}
    changes = {f"environment.{key}": value for key, value in facts.items()}
    columns = {
        tags.STEP_SECONDS.tag: [seconds] * 100,
        tags.TOKENS_PER_SECOND.tag: [2048 / seconds] * 100,
    }
    losses = {
        tags.VALIDATION_LOSS.tag: [None if step % 50 else 5 - step / 100 for step in range(1, 101)]
    }
    variant = name.partition("-")[0]
    return write_run(root, name, variant, seed=seed, columns=columns | losses, changes=changes)


def test_seconds_of_runs_side_by_side(tmp_path: Path) -> None:
    paths = [timed(tmp_path, "vanilla", 2.0), timed(tmp_path, "orthogonal", 1.5, "12:04:00")]
    comparison = compare_runs(paths, "vanilla", (), "seconds")
    gap = comparison.variants[1].gap
    assert priced(comparison).cost == pytest.approx(0.75)
    assert gap is not None and gap.mean == pytest.approx(0.5 * math.log2(0.75))  # a doubling: 0.5
    assert "| seconds a token |" in shown(comparison)


def test_a_pause_as_long_as_the_shorter_run_is_still_side_by_side(tmp_path: Path) -> None:
    """Start the later run, of 200 and 150 seconds, 350 seconds after the earlier one, or the other
    way."""
    for folder, first, second in (("a", "12:00:00", "12:05:50"), ("b", "12:05:50", "12:02:30")):
        paths = [timed(tmp_path / folder, "vanilla", 2.0, first)]
        paths += [timed(tmp_path / folder, "orthogonal", 1.5, second)]
        assert compare_runs(paths, "vanilla", (), "seconds").variants[1].gap is not None
    late = timed(tmp_path, "orthogonal", 1.5, "12:05:51")
    with pytest.raises(UserError, match="the pause between both is longer"):
        compare_runs([timed(tmp_path, "vanilla", 2.0), late], "vanilla", (), "seconds")


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"host": "b"}, "host, device or number of ranks differ"),
        ({"started": "12:09:00"}, "the pause between both is longer"),
        ({"segments": RESUMED}, "host, start or step times are"),
        ({"segments": [{**RESUMED[0], "branched_from": {}}]}, ".* was resumed or is a branch"),
    ],
)
def test_seconds_of_other_runs_are_refused(tmp_path: Path, other: dict[str, Any], why: str) -> None:
    paths = [timed(tmp_path, "vanilla", 2.0), timed(tmp_path, "orthogonal", 1.5, **other)]
    with pytest.raises(UserError, match=f"of vanilla and orthogonal {why}"):
        compare_runs(paths, "vanilla", (), "seconds")


def test_bits_per_byte_where_the_runs_know_the_bytes(tmp_path: Path) -> None:
    """64 samples hold all of both sources: (24,000 + 7,000) bytes in 8,000 tokens."""
    comparison = compare_runs(pairs(tmp_path / "a"), "vanilla")
    assert 64 * LENGTH > 6000
    variant = comparison.variants[1]
    assert variant.bytes_per_token == pytest.approx(31 / 8)
    assert variant.loss_bits == pytest.approx(4.12 * 8 / 31 / math.log(2))
    assert as_json(comparison)["variants"][1]["gap_bits_per_byte"] == pytest.approx(
        0.1 * 8 / 31 / math.log(2)
    )
    assert "loss, bits/byte" in shown(comparison)
    few = {"config.data.validation_samples": 16}
    capped = compare_runs(pairs(tmp_path / "b", changes=few), "vanilla")
    assert capped.variants[0].bytes_per_token == pytest.approx((2048 * 4 + 2000 * 3.5) / 4048)
    unknown = compare_runs(pairs(tmp_path / "c", changes={"data.validation_bytes": {}}), "vanilla")
    report = shown(unknown)
    assert "No bits per byte: the runs' data.json does not have" in report
    assert "bits/byte" not in report


def test_a_gap_past_the_end_of_the_baselines_curve_is_marked(tmp_path: Path) -> None:
    comparison = compare_runs(pairs(tmp_path), "orthogonal")
    (compute,) = prices(comparison, "vanilla")
    assert compute.cost > 1 and compute.gap_beyond == 3
    row = next(line for line in shown(comparison).splitlines() if "| × " in line)
    assert [cell.endswith("*") for cell in row.strip("| ").split(" | ")[-2:]] == [True, True]


def prices(comparison: Comparison, label: str) -> list[Any]:
    return [variant.compute for variant in comparison.variants if variant.label == label]


def test_orthogonal_as_the_committed_runs_have_it(tmp_path: Path) -> None:
    """Tokens to vanilla's loss at 0.3, 0.6 and 1.2 million tokens, and the share of what context
    taught."""
    paths = committed(tmp_path, "tokens", ["vanilla", "orthogonal"])
    comparison = compare_runs(paths, "vanilla", ["tokens"])
    computes = prices(comparison, "orthogonal")
    expected = [(1.14, 1.10, 1.18), (1.18, 1.14, 1.23), (1.23, 1.20, 1.27)]
    for compute, numbers in zip(computes, expected, strict=True):
        assert astuple(compute.token_ratio) == pytest.approx(numbers, abs=0.006)
    assert {compute.curve for compute in computes} == {LENGTHS}
    assert [compute.beyond for compute in computes] == [0, 0, 5]
    shares = [variant.gap_of_context for variant in comparison.others]
    assert shares == pytest.approx([0.064, 0.070, 0.067], abs=5e-4)


def test_monarch_with_low_rank_as_the_committed_runs_have_it(tmp_path: Path) -> None:
    """Its runs have one length; vanilla's of the other lengths say what the gap is worth in
    tokens."""
    paths = committed(tmp_path, "structured", ["vanilla", "monarch+low_rank"])
    paths += committed(tmp_path, "tokens", ["vanilla"], without=614_400)
    (compute,) = prices(compare_runs(paths, "vanilla", ["tokens"]), "monarch+low_rank")
    assert compute.curve == BASELINE_LENGTHS
    assert compute.cost == pytest.approx(7_667_712 / 8_257_536)
    assert rounded(compute.token_ratio) == (1.08, 1.02, 1.15)
    assert rounded(compute.effective_compute) == (1.00, 0.94, 1.07)
    at_large = [(1 - 0.137) * end for end in (compute.token_ratio.mean, compute.token_ratio.low)]
    assert [round(end, 2) for end in at_large] == [0.93, 0.88]


# What is said first


def timed_pairs(root: Path, pairs: int) -> list[Path]:
    """Pairs of runs of 200 and 150 seconds, one a quarter of an hour, noisy by 2 %."""
    paths = []
    for seed in range(pairs):
        for variant, seconds, minute in (("vanilla", 2.0, 0), ("orthogonal", 1.5, 4)):
            noisy = seconds * (1 + 0.02 * (seed % 2) * (variant == "vanilla"))
            started = f"{12 + seed // 4}:{15 * (seed % 4) + minute:02}:00"
            paths.append(timed(root, f"{variant}-{seed}", noisy, started, seed=seed))
    return paths


def test_in_short_says_quality_then_speed_then_equal_flops(tmp_path: Path) -> None:
    """A ratio of speeds, which noise decides in few pairs, takes five of them side by side."""
    paths = timed_pairs(tmp_path, 5)
    quality, speed, cost, *_ = in_short(compare_runs(paths, "vanilla"))
    assert quality.startswith("orthogonal: +0.0000 nats per token (95 % interval ")
    ratio, low, high = map(float, re.findall(r"0\.\d{3}", speed))
    assert low < ratio < high < 0.76 and "5 pairs of runs side by side" in speed
    assert cost.startswith("orthogonal: at equal FLOPs ") and "FLOPs of a token -3.2 %" in cost
    for few in (paths[:8], [*paths[:9], timed(tmp_path, "orthogonal", 1.5, host="b", seed=4)]):
        comparison = compare_runs(few, "vanilla")
        assert comparison.variants[1].speed is None
        said = in_short(comparison)
        assert [line for line in said if "side by side" in line] == [said[1]]
        assert "Speed and peak memory were not measured side by side" in said[1]


def test_no_table_shows_a_distance_of_what_a_clock_reads(tmp_path: Path) -> None:
    table = cost_table(compare_runs(timed_pairs(tmp_path, 1), "vanilla"), "")
    rows = {row[0]: row[2] for row in table.rows}
    assert "%" not in rows["step time, s"] + rows["tokens/s"]
    assert "(-10.0 %)" in rows["gradients"]
