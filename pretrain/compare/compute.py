"""Equal compute: what a variant costs to the baseline's loss, and its gap where both have cost the same.

For each seed that variant and baseline share, by the definitions of docs/comparison.md; c is the cost of a
token of the variant over one of the baseline. Ratios are geometric means over seeds, with Student's interval
of their logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.compare.comparability import common_flops
from pretrain.compare.theory import expected_cost
from pretrain.errors import UserError
from pretrain.reporting.text import perplexity, setting_text
from pretrain.runs.curves import Floats
from pretrain.runs.environment import STARTED
from pretrain.runs.finished import FinishedRun
from pretrain.runs.tags import STEP_SECONDS, VALIDATION_LOSS
from pretrain.study.gaps import NATS, SCORES, PairedGap, paired_gap
from pretrain.study.seeds import Group, Groups

LENGTHS, BASELINE_LENGTHS, VALIDATIONS = "lengths", "lengths of the baseline", "validations"
"""Points of the learning curves: runs of several lengths (of both, of the baseline alone) or a run's own."""
_FAR = 64.0
"""Doublings by which a curve is continued past its ends."""
Lengths = Mapping[Path, Mapping[int, float]]
"""{path of a run: {tokens: validation loss} of the runs that differ from it in length alone}"""


@dataclass(frozen=True)
class Curve:
    """Validation loss over log2 of the tokens, straight between [points]; the outermost are far beyond."""

    doublings: Floats
    losses: Floats

    @staticmethod
    def through(points: Mapping[int, float], slope: float | None = None) -> Curve:
        """Return the curve through {tokens: loss}.

        Past an end goes on the fall per doubling of the doubling next to that end, or `slope` where given.
        """
        x = np.log2(sorted(points))
        y = np.array([points[tokens] for tokens in sorted(points)])
        width = min(1.0, x[-1] - x[0])
        inner = np.interp([x[0] + width, x[-1] - width], x, y)
        before, after = (
            ((y[0] - inner[0]) / width, (inner[1] - y[-1]) / width)
            if slope is None
            else [slope] * 2
        )
        return Curve(
            np.array([x[0] - _FAR, *x, x[-1] + _FAR]),
            np.array([y[0] + _FAR * before, *y, y[-1] - _FAR * after]),
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
        place = slice(below[0] - 1, below[0] + 1)
        return float(2 ** np.interp(-loss, -self.losses[place], self.doublings[place]))

    def covers(self, loss: float) -> bool:
        """Return whether the points themselves reach from above `loss` to below."""
        return bool(self.losses[1:-1].min() <= loss <= self.losses[1:-1].max())


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
        gap = paired_gap("", logs, dict.fromkeys(logs, 0.0), SCORES)
        ends = [None if e is None else perplexity(e) for e in (gap.low, gap.high)] if gap else []
        return Ratio(perplexity(gap.mean), *ends) if gap else None


@dataclass(frozen=True)
class EqualCompute:
    """A variant against its baseline at equal compute; what the runs do not tell is None.

    `cost` is that of a token over the baseline's; `learned` the nats that context has taught the baseline:
    unigram loss - its loss. For `beyond` seeds the loss sought lies past the end of the learning curve.
    `slope` is the fall of the baseline's loss over its last doubling of tokens.
    """

    cost: float | None
    learned: float | None = None
    curve: str | None = None
    beyond: int = 0
    token_ratio: Ratio | None = None
    effective_compute: Ratio | None = None
    gap: PairedGap | None = None
    break_even: float | None = None
    slope: float | None = None


def equal_compute(
    group: Group[FinishedRun], baseline: Group[FinishedRun], match: str, lengths: Lengths
) -> EqualCompute:
    """Return a variant at its baseline's compute: seconds if `match` says so, else executed FLOPs by formula.

    Raises UserError: the runs do not tell the gap that `match` asks for.
    """
    own, base = (
        {r.seed: r for r in of.runs if r.result.validation_loss is not None}
        for of in (group, baseline)
    )
    seeds = sorted(own.keys() & base.keys())
    theory, base_theory = expected_cost(group.runs[0]), expected_cost(baseline.runs[0])
    costs = {}
    if match == "seconds":
        costs = {seed: seconds_ratio(own[seed], base[seed]) for seed in seeds}
    elif theory and base_theory:
        costs = dict.fromkeys(
            seeds, theory.executed_flops_per_token / base_theory.executed_flops_per_token
        )
    cost, curves = (
        Ratio.of(costs),
        _curves([own[s] for s in seeds], [base[s] for s in seeds], lengths),
    )
    results = [base[seed].result for seed in seeds]
    learned = [math.log(one.unigram_perplexity) - (one.validation_loss or 0.0) for one in results]
    compute = EqualCompute(cost.mean if cost else None)
    if curves:
        tokens = {seed: (own[seed].result.tokens, base[seed].result.tokens) for seed in seeds}
        compute = price(baseline.name, *curves, tokens, costs)
    if match == "flops" and seeds and common_flops([*own.values(), *base.values()]):
        # Both end at these FLOPs.
        last, base_last = (
            {s: of[s].result.validation_loss or 0.0 for s in seeds} for of in (own, base)
        )
        compute = replace(compute, gap=paired_gap(baseline.name, last, base_last, NATS))
    if match != "tokens" and seeds and compute.gap is None:
        missing = (
            "its learning curve has one point" if costs else "the formulas do not know its FLOPs"
        )
        raise UserError(
            f"--match {match} cannot be had for {group.name}: {missing}; validate more often "
            "(data.validate_every), give runs of several lengths with --subject tokens, or leave --match out"
        )
    return replace(compute, learned=float(np.mean(learned)) if learned else None)


def price(
    baseline: str,
    curve: str,
    own: Mapping[int, Curve],
    base: Mapping[int, Curve],
    tokens: Mapping[int, tuple[int, int]],
    costs: Mapping[int, float],
) -> EqualCompute:
    """Return what learning curves {seed: curve} say; `tokens` are the variant's and the baseline's."""
    targets = {seed: base[seed].loss(tokens[seed][1]) for seed in own}
    reached = {seed: own[seed].tokens_to(targets[seed]) for seed in own}
    ratios = {seed: there / tokens[seed][1] for seed, there in reached.items() if there is not None}
    if len(ratios) < len(own):
        ratios = {}  # a mean over the lucky ones would mislead
    ends = {seed: own[seed].loss(tokens[seed][0]) for seed in own}
    same = {seed: base[seed].loss(cost * tokens[seed][0]) for seed, cost in costs.items()}
    even = [base[seed].loss(cost * tokens[seed][1]) - targets[seed] for seed, cost in costs.items()]
    cost = Ratio.of(costs)
    return EqualCompute(
        cost=cost.mean if cost else None,
        curve=curve,
        beyond=sum(not own[seed].covers(targets[seed]) for seed in own),
        token_ratio=Ratio.of(ratios),
        effective_compute=Ratio.of(
            {seed: costs[seed] * ratios[seed] for seed in ratios if seed in costs}
        ),
        gap=paired_gap(baseline, ends, same, NATS),
        break_even=float(np.mean(even)) if even else None,
        slope=float(
            np.mean([base[seed].loss(tokens[seed][1] / 2) - targets[seed] for seed in own])
        ),
    )


def runs_by_length(
    groups: Groups[FinishedRun], runs: Sequence[FinishedRun], subjects: Mapping[str, Sequence[Any]]
) -> Lengths:
    """Return the points of the curves over lengths; {} unless `tokens` is a subject."""
    curves: dict[Any, dict[int, float]] = {}
    keys = {}
    for place, run in enumerate(runs if "tokens" in subjects else ()):
        label = next(group.label for group in groups.groups if run in group.runs)
        others = [
            setting_text(values[place]) for name, values in subjects.items() if name != "tokens"
        ]
        keys[run.path] = (label, run.seed, *others)
        if run.result.validation_loss is not None:
            curves.setdefault(keys[run.path], {})[run.result.tokens] = run.result.validation_loss
    return {path: curves.get(key, {}) for path, key in keys.items()}


def _curves(
    own: Sequence[FinishedRun], base: Sequence[FinishedRun], lengths: Lengths
) -> tuple[str, dict[int, Curve], dict[int, Curve]] | None:
    """Return where both learning curves come from, and them; None where a run has one point alone."""

    def through(
        runs: Sequence[FinishedRun], points: Callable[[FinishedRun], Any]
    ) -> dict[int, Curve]:
        known = {run.seed: points(run) for run in runs}
        whole = known and min(map(len, known.values())) > 1
        return {seed: Curve.through(curve) for seed, curve in known.items()} if whole else {}

    mine, theirs = (through(runs, lambda run: lengths.get(run.path, {})) for runs in (own, base))
    if theirs and not mine:
        ends = {run.seed: {run.result.tokens: run.result.validation_loss or 0.0} for run in own}
        return (
            BASELINE_LENGTHS,
            {s: Curve.through(end, theirs[s].slope) for s, end in ends.items()},
            theirs,
        )
    if theirs:
        return LENGTHS, mine, theirs
    mine, theirs = through(own, _validations), through(base, _validations)
    return (VALIDATIONS, mine, theirs) if mine and theirs else None


def _validations(run: FinishedRun) -> dict[int, float]:
    finite = np.isfinite(losses := run.curves[VALIDATION_LOSS])
    points = dict(zip(run.curves.tokens[finite].tolist(), losses[finite].tolist(), strict=True))
    return points | {run.result.tokens: run.result.validation_loss or 0.0}


def seconds_ratio(own: FinishedRun, base: FinishedRun) -> float:
    """Return the seconds of a token over those of the baseline's run.

    Raises UserError: they were not measured side by side: on one host, device and number of ranks, without a
    resume, and with no longer pause between both trainings than the shorter one took.
    """
    places, spans, costs = [], [], []
    for run in (own, base):
        facts, seconds = run.environment, run.curves[STEP_SECONDS]
        places.append((facts.get("host"), run.device, facts.get("world_size")))
        if "started" in facts and len(facts.get("segments", [])) < 2 and np.isfinite(seconds).any():
            start = datetime.strptime(facts["started"], STARTED).timestamp()
            spans.append((start, start + float(np.nanmean(seconds)) * run.result.steps))
            costs.append(float(np.nanmedian(seconds)) * run.result.steps / run.result.tokens)
    why = ""
    if None in places[0] or len(spans) < 2:
        why = "host, start or step times are not recorded, or one was resumed"
    elif places[0] != places[1]:
        why = "host, device or number of ranks differ"
    elif max(s for s, _ in spans) - min(e for _, e in spans) > min(e - s for s, e in spans):
        why = "the pause between both is longer than the shorter one"
    if why:
        raise UserError(
            f"--match seconds needs runs measured side by side, but of {base.name} and {own.name} {why}; "
            "train both in one sweep on one machine, or give --match flops"
        )
    return costs[0] / costs[1]


def bytes_per_token(run: FinishedRun) -> float | None:
    """Return the bytes of text of a held-out token, sources weighing as in the loss; None where unknown."""
    data, text = run.config["data"], run.validation_bytes
    most = data["validation_samples"] * data["sequence_length"]
    weights = {source: min(tokens, most) for source, tokens in run.validation_tokens.items()}
    if not weights or text.keys() != weights.keys():
        return None
    shares = [weights[source] * text[source] / run.validation_tokens[source] for source in weights]
    return sum(shares) / sum(weights.values())
