"""Statistics over seeds: mean and spread, the gap to the baseline paired by seed, tests, Holm's correction.

With d_i = loss of the variant - loss of the baseline at seed i, over the n seeds that both have:

    gap         mean(d); positive is worse
    interval    mean(d) ± t(0.975, n - 1) sd(d) / √n, sd with n - 1 in the denominator
    t-test      paired, two-sided: t = mean(d) √n / sd(d)
    Wilcoxon    signed-rank test of the d_i, two-sided, exact for small n
    Cohen's d   d_z = mean(d) / sd(d), the formula for paired samples

Holm (1979) adjusts p values for the number of comparisons made in one report: sorted ascending, the i-th of m
becomes max over j ≤ i of min(1, (m - j + 1) p_j).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
LEVEL = 0.05
FEWEST_SEEDS = 5
"""Below this many pairs no significance is claimed, whatever the p values are."""


@dataclass(frozen=True)
class PairedGap:
    """A variant's values minus the baseline's, over the seeds that both have: losses in nats, or scores.

    The perplexity ratio is exp(gap), with the interval's ends transformed alike; scores have none. What n or
    equal differences leave undefined is None. `*_holm` are adjusted over all comparisons of the report.
    """

    baseline: str
    seeds: tuple[int, ...]
    differences: tuple[float, ...]
    mean: float
    sd: float | None = None
    low: float | None = None
    high: float | None = None
    perplexity_ratio: float | None = None
    perplexity_ratio_low: float | None = None
    perplexity_ratio_high: float | None = None
    cohens_dz: float | None = None
    t: float | None = None
    t_p: float | None = None
    t_p_holm: float | None = None
    wilcoxon: float | None = None
    wilcoxon_p: float | None = None
    wilcoxon_p_holm: float | None = None

    @property
    def n(self) -> int:
        """Pairs of runs."""
        return len(self.seeds)

    @property
    def significance_claimed(self) -> bool:
        """Whether n allows a claim at all and the adjusted t-test makes it."""
        return self.n >= FEWEST_SEEDS and self.t_p_holm is not None and self.t_p_holm < LEVEL

    @property
    def equivalent_within(self) -> float | None:
        """The smallest m for which perplexity ratios of 1 - m to 1 + m contain the whole interval.

        By two one-sided t-tests at (1 - CONFIDENCE) / 2 each, equivalence within m or more would be claimed.
        None below FEWEST_SEEDS pairs and for scores.
        """
        low, high = self.perplexity_ratio_low, self.perplexity_ratio_high
        if self.n < FEWEST_SEEDS or low is None or high is None:
            return None
        return max(high - 1, 1 - low)


def paired_gap(
    baseline: str, values: Mapping[int, float], base: Mapping[int, float], *, nats: bool = True
) -> PairedGap | None:
    """The gap of `values` to `base`, both {seed: value}; None if they have no seed in common.

    Args:
        nats: they are losses in nats per token, whose exponential is a perplexity.
    """
    seeds = tuple(sorted(values.keys() & base.keys()))
    if not seeds:
        return None
    pairs = np.array([[values[seed], base[seed]] for seed in seeds])
    differences = pairs[:, 0] - pairs[:, 1]
    mean = float(differences.mean())
    gap = PairedGap(
        baseline=baseline,
        seeds=seeds,
        differences=tuple(differences.tolist()),
        mean=mean,
        perplexity_ratio=math.exp(mean) if nats else None,
    )
    if len(seeds) < 2:
        return gap
    sd = float(differences.std(ddof=1))
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(seeds) - 1)) * sd / math.sqrt(len(seeds))
    gap = replace(
        gap,
        sd=sd,
        low=mean - half,
        high=mean + half,
        perplexity_ratio_low=math.exp(mean - half) if nats else None,
        perplexity_ratio_high=math.exp(mean + half) if nats else None,
    )
    # Equal differences (a rounding error apart) have no spread to test against.
    return gap if sd <= 1e-12 * float(np.abs(pairs).max()) else _tested(gap, pairs, sd)


def _tested(gap: PairedGap, pairs: np.ndarray, sd: float) -> PairedGap:
    t_test = stats.ttest_rel(pairs[:, 0], pairs[:, 1])
    signed_rank = stats.wilcoxon(gap.differences)
    return replace(
        gap,
        cohens_dz=gap.mean / sd,
        t=float(t_test.statistic),
        t_p=float(t_test.pvalue),
        wilcoxon=float(signed_rank.statistic),
        wilcoxon_p=float(signed_rank.pvalue),
    )


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down adjustment of the p values that are there; None stays None and does not count."""
    ranked = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for position, (p, index) in enumerate(ranked):
        largest = max(largest, min(1.0, (len(ranked) - position) * p))
        adjusted[index] = largest
    return adjusted


def adjust(gaps: Sequence[PairedGap | None]) -> list[PairedGap | None]:
    """The same gaps with Holm's correction over all of them, for each of the two tests."""
    by_t = holm([gap.t_p if gap else None for gap in gaps])
    by_wilcoxon = holm([gap.wilcoxon_p if gap else None for gap in gaps])
    return [
        replace(gap, t_p_holm=t, wilcoxon_p_holm=w) if gap else None
        for gap, t, w in zip(gaps, by_t, by_wilcoxon, strict=True)
    ]
