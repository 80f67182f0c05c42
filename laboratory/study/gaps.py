"""Gaps paired by seed: mean, interval, tests, effect size, Holm's correction.

Of d_i = value of the variant - value of the baseline at seed i, by the formulas of
docs/comparison.md; for losses, positive is worse. Holm (1979) adjusts p values for the comparisons
of one report: sorted ascending, the i-th of m becomes max over j ≤ i of min(1, (m - j + 1) p_j).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

import laboratory.study.packages  # noqa: F401
from pretrain.errors import UserError
from pretrain.reporting.text import interval, perplexity, signed

if TYPE_CHECKING:
    from laboratory.study.hypothesis import Hypothesis

CONFIDENCE = 0.95
LEVEL = 0.05
FEWEST_SEEDS = 5
"""Below this many pairs no significance is claimed, whatever the p values are."""


@dataclass(frozen=True)
class Scale:
    """Unit of the values that a gap compares, and how their differences are shown.

    Attributes:
        unit: Text after a number; "" for none.
        factor: Multiplier of a value when it is shown.
        digits: Digits after the point.
        of_losses: Values are in nats per token, so exp(gap) is a ratio of perplexities.
    """

    unit: str = ""
    factor: float = 1.0
    digits: int = 4
    of_losses: bool = False

    def signed(self, value: float | None) -> str:
        """Return a difference as text, without the unit; a dash for None."""
        return signed(None if value is None else self.factor * value, self.digits)

    def interval(self, gap: PairedGap) -> str:
        """Return the gap's interval as text, without the unit; a dash where there is none."""
        if gap.low is None or gap.high is None:
            return interval(None, None)
        return interval(self.factor * gap.low, self.factor * gap.high, self.digits)


NATS = Scale("nats per token", of_losses=True)
BITS = Scale("bits per byte", factor=1 / math.log(2), of_losses=True)
"""Losses in nats per byte, shown in bits."""
SCORES = Scale()
"""Any other number, shown as it is."""
POINTS = Scale("points", factor=100, digits=2)
"""Scores from 0 to 1, shown in hundredths."""


@dataclass(frozen=True)
class PairedGap:
    """Differences of a variant's values to the baseline's, over the seeds that both have.

    What n or equal differences leave undefined is None.

    Attributes:
        baseline: Name of the baseline.
        seeds: Seeds in ascending order.
        differences: Differences `[pairs]`, in the order of the seeds.
        scale: Unit of the values.
        mean: Mean difference.
        sd: Standard deviation of the differences.
        low: Lower end of the 95 % interval of the mean.
        high: Upper end of the interval.
        cohens_dz: Mean over standard deviation.
        t: Statistic of the paired t-test.
        t_p: Two-sided p value of the t-test.
        t_p_holm: P value adjusted over all comparisons of the report.
        wilcoxon: Statistic of the signed-rank test.
        wilcoxon_p: Two-sided p value of the signed-rank test: exact to 50 pairs, 13 with ties.
        wilcoxon_p_holm: P value adjusted over all comparisons of the report.
    """

    baseline: str
    seeds: tuple[int, ...]
    differences: tuple[float, ...]
    scale: Scale
    mean: float
    sd: float | None = None
    low: float | None = None
    high: float | None = None
    cohens_dz: float | None = None
    t: float | None = None
    t_p: float | None = None
    t_p_holm: float | None = None
    wilcoxon: float | None = None
    wilcoxon_p: float | None = None
    wilcoxon_p_holm: float | None = None

    @property
    def n(self) -> int:
        """Return the number of pairs."""
        return len(self.seeds)

    @property
    def significance_claimed(self) -> bool:
        """Return whether there are enough pairs and the adjusted t-test is significant."""
        return self.n >= FEWEST_SEEDS and self.t_p_holm is not None and self.t_p_holm < LEVEL

    @property
    def perplexity_ratio(self) -> float | None:
        """Return exp(gap); None unless the values are losses."""
        return self._perplexity(self.mean)

    @property
    def perplexity_ratio_low(self) -> float | None:
        """Return exp(low)."""
        return self._perplexity(self.low)

    @property
    def perplexity_ratio_high(self) -> float | None:
        """Return exp(high)."""
        return self._perplexity(self.high)

    @property
    def equivalent_within(self) -> float | None:
        """Return the smallest m with the interval inside perplexity ratios of 1 - m to 1 + m.

        By two one-sided t-tests at (1 - CONFIDENCE) / 2 each, equivalence within m or more would be
        claimed. None below FEWEST_SEEDS pairs and for values that are not losses.
        """
        low, high = self.perplexity_ratio_low, self.perplexity_ratio_high
        if self.n < FEWEST_SEEDS or low is None or high is None:
            return None
        return max(high - 1, 1 - low)

    def answer(self, claim: Hypothesis) -> str | None:
        """Return the answer of runs whose number was fixed beforehand: "yes", "no", or None.

        By the interval, from FEWEST_SEEDS pairs on; a one-sided "yes" also needs the test, which,
        unlike the interval, is adjusted for the number of comparisons.
        """
        if self.n < FEWEST_SEEDS or self.low is None or self.high is None:
            return None
        answer = claim.answer((self.low, self.high), (self.low, self.high))
        one_sided = claim.question != "within"
        return None if answer == "yes" and one_sided and not self.significance_claimed else answer

    def _perplexity(self, difference: float | None) -> float | None:
        return perplexity(difference) if self.scale.of_losses and difference is not None else None


_PERPLEXITIES = ("perplexity_ratio", "perplexity_ratio_low", "perplexity_ratio_high")
TEST_KEYS = ("cohens_dz", "t", "t_p", "t_p_holm", "wilcoxon", "wilcoxon_p", "wilcoxon_p_holm")


def gap_content(gap: PairedGap) -> dict[str, Any]:
    """Return the gap as JSON; ratios of perplexities only where the values are losses."""
    perplexities = _PERPLEXITIES if gap.scale.of_losses else ()
    first = ("baseline", "seeds", "differences", "mean", "sd", "low", "high")
    return {key: getattr(gap, key) for key in (*first, *perplexities, *TEST_KEYS)}


def paired_gap(
    baseline: str, values: Mapping[int, float], base: Mapping[int, float], scale: Scale
) -> PairedGap | None:
    """Return the gap between two sets of runs; None if they have no seed in common.

    Args:
        baseline: Name of the baseline.
        values: {seed: value} of the variant.
        base: {seed: value} of the baseline.
        scale: Unit of the values.
    """
    seeds = tuple(sorted(values.keys() & base.keys()))
    if not seeds:
        return None
    pairs = np.array([[values[seed], base[seed]] for seed in seeds])
    differences = pairs[:, 0] - pairs[:, 1]
    mean = float(differences.mean())
    gap = PairedGap(baseline, seeds, tuple(differences.tolist()), scale, mean=mean)
    if len(seeds) < 2:
        return gap
    from scipy import stats  # a second, which refusals do not wait for

    sd = float(differences.std(ddof=1))
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(seeds) - 1)) * sd / math.sqrt(len(seeds))
    gap = replace(gap, sd=sd, low=mean - half, high=mean + half)
    # Equal differences (a rounding error apart) have no spread to test against.
    if sd <= 1e-12 * float(np.abs(pairs).max()):
        return gap
    t_test = stats.ttest_rel(pairs[:, 0], pairs[:, 1])
    signed_rank = stats.wilcoxon(gap.differences)
    return replace(
        gap,
        cohens_dz=mean / sd,
        t=float(t_test.statistic),
        t_p=float(t_test.pvalue),
        wilcoxon=float(signed_rank.statistic),
        wilcoxon_p=float(signed_rank.pvalue),
    )


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Return p values after Holm's step-down adjustment; None stays None and does not count."""
    ranked = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for position, (p, index) in enumerate(ranked):
        largest = max(largest, min(1.0, (len(ranked) - position) * p))
        adjusted[index] = largest
    return adjusted


def adjust(gaps: Sequence[PairedGap | None]) -> list[PairedGap | None]:
    """Return the gaps with Holm's correction over all of them, for each of the two tests."""
    by_t = holm([gap.t_p if gap else None for gap in gaps])
    by_wilcoxon = holm([gap.wilcoxon_p if gap else None for gap in gaps])
    return [
        replace(gap, t_p_holm=t, wilcoxon_p_holm=w) if gap else None
        for gap, t, w in zip(gaps, by_t, by_wilcoxon, strict=True)
    ]


class HasGap(Protocol):
    """Record with a gap, which is None without a seed in common with the baseline."""

    @property
    def gap(self) -> PairedGap | None: ...


Record = TypeVar("Record", bound=HasGap)


def adjusted(records: Sequence[Record]) -> list[Record]:
    """Return dataclass records with Holm's correction over all their gaps."""
    gaps = adjust([record.gap for record in records])
    return [
        replace(record, gap=gap)  # type: ignore[type-var]
        for record, gap in zip(records, gaps, strict=True)
    ]


def with_gap(record: HasGap) -> dict[str, Any]:
    """Return a dataclass record as JSON, with what reports say of its gap."""
    gap = record.gap and gap_content(record.gap)
    return asdict(record) | {"gap": gap}  # type: ignore[call-overload, no-any-return]


def mean_over_seeds(values: Mapping[int, float]) -> PairedGap | None:
    """Return the mean of values with its interval, as the gap to 0; None without any.

    Args:
        values: {seed: value}, a score, a slope or a logarithm.
    """
    return paired_gap("0", values, dict.fromkeys(values, 0.0), SCORES)


def paired_gaps(
    values: Mapping[str, Mapping[int, float]], baseline: str, scale: Scale
) -> dict[str, PairedGap]:
    """Return the gaps of all models to one, over the seeds in common, with Holm's correction.

    Args:
        values: {model: {seed: value}}.
        baseline: One of the models.
        scale: Unit of the values.

    Raises:
        UserError: the baseline is unknown, a model has no seed in common with it, or a value is
            not finite.
    """
    for name, by_seed in values.items():
        for seed, value in by_seed.items():
            if not math.isfinite(value):
                raise UserError(
                    f"'{name}' has {value} at seed {seed}, which is not a finite number; leave "
                    "the seed out of all models, or the model out"
                )
    if baseline not in values:
        raise UserError(
            f"there is no model '{baseline}' to compare with; there are {', '.join(values)}"
        )
    compared = [name for name in values if name != baseline]
    gaps = adjust(
        [paired_gap(baseline, values[name], values[baseline], scale) for name in compared]
    )
    if None in gaps:
        name = compared[gaps.index(None)]
        raise UserError(
            f"'{name}' and '{baseline}' have no seed in common; train both with the same seeds"
        )
    return {name: gap for name, gap in zip(compared, gaps, strict=True) if gap is not None}


def p_value(claim: Hypothesis, gap: PairedGap) -> float:
    """Return the two-sided p value of the nearest gap that is not claimed; 1 without a spread.

    Args:
        gap: Gap of two pairs or more; of fewer the p value is 1.
    """
    from scipy import stats  # a second, which refusals do not wait for

    low, high = claim.claimed
    if gap.sd is None or gap.t is None:
        # Equal differences have nothing to be tested against, but lie within a margin or do not.
        return 0.0 if claim.question == "within" and low < gap.mean < high else 1.0
    error = gap.sd / math.sqrt(gap.n)
    below = float(stats.t.sf((gap.mean - low) / error, gap.n - 1))
    above = float(stats.t.cdf((gap.mean - high) / error, gap.n - 1))
    return min(1.0, 2 * max(below, above))


def answers(
    gaps: Mapping[str, PairedGap], claims: Mapping[str, Hypothesis]
) -> dict[str, str | None]:
    """Return {name: answer of its claim}, with Holm's correction over the tests of the claims."""
    adjusted = holm([p_value(claim, gaps[name]) for name, claim in claims.items()])
    return {
        name: replace(gaps[name], t_p_holm=p).answer(claim)
        for (name, claim), p in zip(claims.items(), adjusted, strict=True)
    }
