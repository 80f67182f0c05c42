"""Equal compute: what a variant costs to the baseline's loss, and its gap at the same cost.

For each seed that variant and baseline share, by the definitions of docs/comparison.md; c is the
cost of a token of the variant over one of the baseline. Ratios are geometric means over seeds, with
Student's interval of their logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from laboratory.compare.comparability import common_flops
from laboratory.runs.finished import FinishedRun
from laboratory.study.gaps import FEWEST_SEEDS, NATS, PairedGap, mean_over_seeds, paired_gap
from laboratory.study.seeds import Group, Groups
from pretrain.errors import UserError
from pretrain.reporting.text import perplexity, setting_text
from pretrain.runs.curves import Floats
from pretrain.runs.environment import STARTED
from pretrain.runs.tags import STEP_SECONDS, VALIDATION_LOSS

LENGTHS, BASELINE_LENGTHS, VALIDATIONS = "lengths", "lengths of the baseline", "validations"
"""Points of learning curves: runs of several lengths (of both, of the baseline) or a run's own."""
_FAR = 64.0
"""Doublings by which a curve is continued past its ends."""
Lengths = Mapping[Path, Mapping[int, float]]
"""{path of a run: {tokens: validation loss} of the runs that differ from it in length alone}"""


@dataclass(frozen=True)
class Curve:
    """Validation loss over log2 of the tokens, straight between its points.

    Attributes:
        doublings: log2 of the tokens, [points]; the outermost are far beyond the data.
        losses: Losses in nats per token, [points].
    """

    doublings: Floats
    losses: Floats

    @staticmethod
    def through(points: Mapping[int, float], slope: float | None = None) -> Curve:
        """Return the curve through points.

        Args:
            points: {tokens: loss}.
            slope: Fall of the loss per doubling past the ends; None: that of the doubling next to
                each end.
        """
        x = np.log2(sorted(points))
        y = np.array([points[tokens] for tokens in sorted(points)])
        slope_before = slope_after = slope
        if slope_before is None or slope_after is None:
            # Of a whole doubling, not of the last two points alone, where a decayed learning rate
            # leaves little to learn.
            width = min(1.0, x[-1] - x[0])
            inner = np.interp([x[0] + width, x[-1] - width], x, y)
            slope_before = (y[0] - inner[0]) / width
            slope_after = (inner[1] - y[-1]) / width
        return Curve(
            np.array([x[0] - _FAR, *x, x[-1] + _FAR]),
            np.array([y[0] + _FAR * slope_before, *y, y[-1] - _FAR * slope_after]),
        )

    @property
    def slope(self) -> float:
        """Return the fall of the loss per doubling, by least squares over the points."""
        return -float(np.polyfit(self.doublings[1:-1], self.losses[1:-1], 1)[0])

    def loss(self, tokens: float) -> float:
        """Return the loss after `tokens`."""
        return float(np.interp(math.log2(tokens), self.doublings, self.losses))

    def tokens_to(self, loss: float) -> float | None:
        """Return the tokens after which the curve first falls to `loss`; None if it never does."""
        below = np.flatnonzero(self.losses <= loss)
        if not len(below) or below[0] == 0:
            return None
        segment = slice(below[0] - 1, below[0] + 1)
        # np.interp needs ascending x values, and losses fall.
        return float(2 ** np.interp(-loss, -self.losses[segment], self.doublings[segment]))

    def covers(self, loss: float) -> bool:
        """Return whether `loss` lies between the losses of the points themselves."""
        return bool(self.losses[1:-1].min() <= loss <= self.losses[1:-1].max())

    def reaches(self, tokens: float) -> bool:
        """Return whether `tokens` lie between the tokens of the points themselves."""
        return bool(self.doublings[1] <= math.log2(tokens) <= self.doublings[-2])


@dataclass(frozen=True)
class Ratio:
    """Geometric mean of the seeds' ratios and its 95 % interval; None of a single seed."""

    mean: float
    low: float | None
    high: float | None

    @staticmethod
    def of(ratios: Mapping[int, float]) -> Ratio | None:
        """Summarise {seed: ratio}; None for no seeds."""
        logs = {seed: math.log(ratio) for seed, ratio in ratios.items()}
        gap = mean_over_seeds(logs)
        if gap is None:
            return None
        low, high = (None if end is None else perplexity(end) for end in (gap.low, gap.high))
        return Ratio(perplexity(gap.mean), low, high)


@dataclass(frozen=True)
class EqualCompute:
    """A variant against its baseline at equal compute; what the runs do not tell is None.

    Attributes:
        cost: Cost of a token over the baseline's.
        learned: nats per token that context has taught the baseline, unigram loss - its loss.
        curve: Origin of the learning curves: LENGTHS, BASELINE_LENGTHS or VALIDATIONS.
        beyond: Number of seeds whose target loss lies past the end of the learning curve.
        gap_beyond: Number of seeds whose equal compute lies past the end of the baseline's curve.
        token_ratio: Tokens to the baseline's loss over the baseline's tokens.
        effective_compute: Compute to the baseline's loss over the baseline's compute.
        gap: The gap at equal compute.
        break_even: Gap at equal tokens below which the variant is cheaper, in nats per token.
        slope: Fall of the baseline's loss over its last doubling of tokens.
    """

    cost: float | None
    learned: float | None = None
    curve: str | None = None
    beyond: int = 0
    gap_beyond: int = 0
    token_ratio: Ratio | None = None
    effective_compute: Ratio | None = None
    gap: PairedGap | None = None
    break_even: float | None = None
    slope: float | None = None


def equal_compute(
    group: Group[FinishedRun],
    baseline: Group[FinishedRun],
    *,
    match: str,
    lengths: Lengths,
    flops_ratio: float | None,
) -> EqualCompute:
    """Return a variant at its baseline's compute.

    Args:
        group: Runs of the variant.
        baseline: Runs of its baseline.
        match: Measure of compute: seconds if it says so, else executed FLOPs by formula.
        lengths: Learning curves over runs of several lengths, of `runs_by_length`.
        flops_ratio: Executed FLOPs of a token over the baseline's; None where not known.

    Raises:
        UserError: the runs do not tell the gap that `match` asks for.
    """
    variant_runs, base = (
        {run.seed: run for run in side.runs if run.result.validation_loss is not None}
        for side in (group, baseline)
    )
    seeds = sorted(variant_runs.keys() & base.keys())
    costs = {}
    if match == "seconds":
        costs = {seed: seconds_ratio(variant_runs[seed], base[seed]) for seed in seeds}
    elif flops_ratio:
        costs = dict.fromkeys(seeds, flops_ratio)
    cost = Ratio.of(costs)
    compute = EqualCompute(cost.mean if cost else None)
    if curves := _curves([variant_runs[s] for s in seeds], [base[s] for s in seeds], lengths):
        tokens = {
            seed: (variant_runs[seed].result.tokens, base[seed].result.tokens) for seed in seeds
        }
        compute = price(baseline.name, *curves, tokens=tokens, costs=costs)
    if match == "flops" and seeds and common_flops([*variant_runs.values(), *base.values()]):
        # Both end at these FLOPs.
        ends, base_ends = (
            {seed: _end(runs[seed]) for seed in seeds} for runs in (variant_runs, base)
        )
        gap = paired_gap(baseline.name, ends, base_ends, NATS)
        compute = replace(compute, gap=gap, gap_beyond=0)
    if match != "tokens" and seeds and compute.gap is None:
        missing = (
            "its learning curve has one point" if costs else "the formulas do not know its FLOPs"
        )
        raise UserError(
            f"--match {match} cannot be had for {group.name}: {missing}; validate more often "
            "(data.validate_every), give runs of several lengths with --subject tokens, or leave "
            "--match out"
        )
    learned = [math.log(base[s].result.unigram_perplexity) - _end(base[s]) for s in seeds]
    return replace(compute, learned=float(np.mean(learned)) if learned else None)


def _end(run: FinishedRun) -> float:
    """Return the validation loss of a run that has a finite one."""
    return run.result.validation_loss or 0.0


def price(
    baseline: str,
    curve: str,
    variant: Mapping[int, Curve],
    base: Mapping[int, Curve],
    tokens: Mapping[int, tuple[int, int]],
    costs: Mapping[int, float],
) -> EqualCompute:
    """Return the costs and gap of a variant at equal compute, from learning curves.

    Args:
        curve: Origin of the learning curves.
        variant: {seed: learning curve} of the variant.
        base: {seed: learning curve} of the baseline.
        tokens: {seed: tokens of the variant's run and of the baseline's}.
        costs: {seed: cost of a token over the baseline's}; {} where not known.
    """
    targets = {seed: base[seed].loss(tokens[seed][1]) for seed in variant}
    reached = {seed: variant[seed].tokens_to(targets[seed]) for seed in variant}
    ratios = {
        seed: tokens_needed / tokens[seed][1]
        for seed, tokens_needed in reached.items()
        if tokens_needed is not None
    }
    if len(ratios) < len(variant):
        ratios = {}  # a mean over the lucky ones would mislead
    ends = {seed: variant[seed].loss(tokens[seed][0]) for seed in variant}
    same = {seed: base[seed].loss(cost * tokens[seed][0]) for seed, cost in costs.items()}
    even = [base[seed].loss(cost * tokens[seed][1]) - targets[seed] for seed, cost in costs.items()]
    # The fall of the loss over the last doubling, for the slope of the baseline.
    halves = [base[seed].loss(tokens[seed][1] / 2) - targets[seed] for seed in variant]
    cost = Ratio.of(costs)
    effective = {seed: costs[seed] * ratios[seed] for seed in ratios if seed in costs}
    return EqualCompute(
        cost=cost.mean if cost else None,
        curve=curve,
        beyond=sum(not variant[seed].covers(targets[seed]) for seed in variant),
        gap_beyond=sum(
            not base[seed].reaches(cost * tokens[seed][0]) for seed, cost in costs.items()
        ),
        token_ratio=Ratio.of(ratios),
        effective_compute=Ratio.of(effective),
        gap=paired_gap(baseline, ends, same, NATS),
        break_even=float(np.mean(even)) if even else None,
        slope=float(np.mean(halves)),
    )


def runs_by_length(
    groups: Groups[FinishedRun], runs: Sequence[FinishedRun], subjects: Mapping[str, Sequence[Any]]
) -> Lengths:
    """Return the points of the curves over lengths; {} unless `tokens` is a subject.

    Args:
        groups: The runs by label.
        runs: The same runs in the order of `subjects`.
        subjects: {subject: its value in each run}.
    """
    if "tokens" not in subjects:
        return {}
    labels = {run.path: group.label for group in groups.groups for run in group.runs}
    other_subjects = [values for name, values in subjects.items() if name != "tokens"]
    keys = {
        run.path: (
            labels[run.path],
            run.seed,
            *(setting_text(values[i]) for values in other_subjects),
        )
        for i, run in enumerate(runs)
    }
    curves: dict[Any, dict[int, float]] = {key: {} for key in keys.values()}
    for run in runs:
        if run.result.validation_loss is not None:
            curves[keys[run.path]][run.result.tokens] = run.result.validation_loss
    return {path: curves[key] for path, key in keys.items()}


def _curves(
    variant_runs: Sequence[FinishedRun], base: Sequence[FinishedRun], lengths: Lengths
) -> tuple[str, dict[int, Curve], dict[int, Curve]] | None:
    """Return the origin of the learning curves and both curves; None where a run has one point."""
    mine, theirs = (
        _curves_by_seed(runs, lambda run: lengths.get(run.path, {}))
        for runs in (variant_runs, base)
    )
    if theirs and mine:
        return LENGTHS, mine, theirs
    if theirs:
        # Of one length: the variant is taken to learn with the baseline's slope.
        mine = {
            run.seed: Curve.through({run.result.tokens: _end(run)}, theirs[run.seed].slope)
            for run in variant_runs
        }
        return BASELINE_LENGTHS, mine, theirs
    mine, theirs = (_curves_by_seed(runs, _validations) for runs in (variant_runs, base))
    return (VALIDATIONS, mine, theirs) if mine and theirs else None


def _curves_by_seed(
    runs: Sequence[FinishedRun], points_of: Callable[[FinishedRun], Mapping[int, float]]
) -> dict[int, Curve]:
    """Return {seed: curve}; {} where any run has a single point."""
    points = {run.seed: points_of(run) for run in runs}
    if any(len(run_points) < 2 for run_points in points.values()):
        return {}
    return {seed: Curve.through(run_points) for seed, run_points in points.items()}


def _validations(run: FinishedRun) -> dict[int, float]:
    losses = run.curves[VALIDATION_LOSS]
    finite = np.isfinite(losses)
    points = dict(zip(run.curves.tokens[finite].tolist(), losses[finite].tolist(), strict=True))
    return points | {run.result.tokens: _end(run)}


def paired_seconds(group: Group[FinishedRun], baseline: Group[FinishedRun]) -> Ratio | None:
    """Return the seconds of a token over the baseline's, a ratio of each pair of seeds.

    None where not all runs are in pairs that were measured side by side, or the pairs are too few.

    Args:
        group: Runs of a variant.
        baseline: Runs of its baseline.
    """
    base = {run.seed: run for run in baseline.runs}
    if len(group.runs) < FEWEST_SEEDS or not {run.seed for run in group.runs} <= base.keys():
        return None
    try:
        return Ratio.of({run.seed: seconds_ratio(run, base[run.seed]) for run in group.runs})
    except UserError:
        return None


def seconds_ratio(variant_run: FinishedRun, base: FinishedRun) -> float:
    """Return the seconds of a token over those of the baseline's run.

    Args:
        variant_run: Run of the variant.
        base: Run of the baseline, of the same seed.

    Raises:
        UserError: the runs were not measured side by side: on one host, device and number of ranks,
            whole and without a resume, and with no longer pause between both trainings than the
            shorter took.
    """
    machines = []
    spans = []
    costs = []
    for run in (variant_run, base):
        facts = run.environment
        seconds = run.curves[STEP_SECONDS]
        machines.append((facts.get("host"), run.device, facts.get("world_size")))
        segments = facts.get("segments", [{}])
        whole = len(segments) == 1 and "branched_from" not in segments[0]
        if "started" in facts and whole and np.isfinite(seconds).any():
            start = datetime.strptime(facts["started"], STARTED).timestamp()
            spans.append((start, start + float(np.nanmean(seconds)) * run.result.steps))
            costs.append(float(np.nanmedian(seconds)) * run.result.steps / run.result.tokens)
    why = ""
    if None in machines[0] or len(spans) < 2:
        why = "host, start or step times are not recorded, or one was resumed or is a branch"
    elif machines[0] != machines[1]:
        why = "host, device or number of ranks differ"
    elif max(s for s, _ in spans) - min(e for _, e in spans) > min(e - s for s, e in spans):
        why = "the pause between both is longer than the shorter one"
    if why:
        raise UserError(
            f"--match seconds needs runs measured side by side, but of {base.name} and "
            f"{variant_run.name} {why}; train both in one sweep on one machine, or give "
            "--match flops"
        )
    return costs[0] / costs[1]


def bytes_per_token(run: FinishedRun) -> float | None:
    """Return the bytes of text per held-out token, with sources weighted as in the loss.

    None where the run does not know them.
    """
    data = run.config["data"]
    text = run.validation_bytes
    most = data["validation_samples"] * data["sequence_length"]
    weights = {source: min(tokens, most) for source, tokens in run.validation_tokens.items()}
    if not weights or text.keys() != weights.keys():
        return None
    shares = [weights[source] * text[source] / run.validation_tokens[source] for source in weights]
    return sum(shares) / sum(weights.values())
