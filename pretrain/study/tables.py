"""Tables and sentences of gaps, with one policy for p values.

A p value is not shown below FEWEST_SEEDS pairs, where a reader would mistake it for a claim, and is shown as
"< 0.0001" below that.

    rows = [GapRow(("orthogonal",), gap), GapRow(("gaussian",), None)]
    gap_table(("variant",), rows, (PAIRS, GAP, INTERVAL, T_HOLM, CLAIM))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pretrain.reporting.tables import Table
from pretrain.reporting.text import NOTHING, percent, share, signed
from pretrain.study.gaps import CONFIDENCE, FEWEST_SEEDS, LEVEL, PairedGap


@dataclass(frozen=True)
class GapRow:
    """Row of a table of gaps.

    `names` are the cells before the columns of the gap, which is None without a seed in common with the
    baseline; `of` is the quantity of the gap, as sentences call it.
    """

    names: Sequence[str]
    gap: PairedGap | None
    of: str = "loss"


@dataclass(frozen=True)
class GapColumn:
    """Column of a table of gaps.

    `cell` makes the text of a row with a gap, `missing` is that of a row without one; `in_words`: set flush
    left.
    """

    title: str
    cell: Callable[[PairedGap], str]
    missing: str = NOTHING
    in_words: bool = False


def gap_table(
    names: Sequence[str],
    rows: Sequence[GapRow],
    columns: Sequence[GapColumn],
    *,
    claims: bool = False,
    title: str = "",
    flush_left: bool = False,
) -> Table:
    """Return the table of gaps in `rows`; `names` are the titles of the columns of `GapRow.names`.

    `claims`: add a last column with what may be said of each gap. `flush_left`: set all columns flush left,
    not only words.
    """
    header = (
        *names,
        *(column.title for column in columns),
        *(["what may be said"] if claims else []),
    )
    cells = [
        (
            *row.names,
            *(column.missing if row.gap is None else column.cell(row.gap) for column in columns),
            *([verdict(row.gap, row.of)] if claims else []),
        )
        for row in rows
    ]
    words = {
        *range(len(names)),
        *(len(names) + i for i, column in enumerate(columns) if column.in_words),
    }
    if claims:
        words.add(len(header) - 1)
    return Table(header, cells, range(len(header)) if flush_left else words, title)


def p_value(p: float | None, n: int = FEWEST_SEEDS) -> str:
    """Return a p value of n pairs as text; a dash for None."""
    if n < FEWEST_SEEDS:
        return f"n < {FEWEST_SEEDS}"
    if p is None:
        return NOTHING
    return "< 0.0001" if p < 0.0001 else f"{p:.4f}"


PAIRS = GapColumn("pairs", lambda gap: str(gap.n), missing="0")
GAP = GapColumn("gap", lambda gap: gap.scale.signed(gap.mean))
INTERVAL = GapColumn(f"{share(CONFIDENCE)} interval", lambda gap: gap.scale.interval(gap))
PERPLEXITY = GapColumn("perplexity", lambda gap: percent(gap.perplexity_ratio))
LIES_WITHIN = GapColumn(
    "lies within", lambda gap: NOTHING if gap.equivalent_within is None else f"±{margin(gap)}"
)
EFFECT = GapColumn("d_z", lambda gap: signed(gap.cohens_dz, 2))
T_P = GapColumn("t-test p", lambda gap: p_value(gap.t_p, gap.n))
T_HOLM = GapColumn("by Holm", lambda gap: p_value(gap.t_p_holm, gap.n))
WILCOXON_P = GapColumn("Wilcoxon p", lambda gap: p_value(gap.wilcoxon_p, gap.n))
WILCOXON_HOLM = GapColumn("by Holm", lambda gap: p_value(gap.wilcoxon_p_holm, gap.n))
TESTS = (T_P, T_HOLM, WILCOXON_P, WILCOXON_HOLM)


def verdict(gap: PairedGap | None, of: str = "loss") -> str:
    """Return what may be said of a gap, as a clause; `of` is the quantity that the gap is of."""
    if gap is None:
        return "no seed in common with the baseline, so no gap"
    direction = "higher" if gap.mean > 0 else "lower"
    return judged(
        gap, "differences", f"{of} significantly {direction}", "no significant difference"
    )


def judged(gap: PairedGap, values: str, claimed: str, not_claimed: str) -> str:
    """Return `claimed` or `not_claimed` with level, p value and n, or why there is no test of `values`."""
    if gap.n < FEWEST_SEEDS:
        return f"n = {gap.n} < {FEWEST_SEEDS}: significance is not claimed"
    if gap.t_p_holm is None:
        return f"all {values} are equal, so there is nothing to test"
    p = p_value(gap.t_p_holm)
    p = f"p {p}" if p.startswith("<") else f"p = {p}"
    clause = claimed if gap.significance_claimed else not_claimed
    return f"{clause} at {share(LEVEL)} ({p} after Holm, n = {gap.n})"


def margin(gap: PairedGap) -> str:
    """Return `equivalent_within` as percent of perplexity, rounded up so as to contain the interval."""
    within = gap.equivalent_within
    return NOTHING if within is None else f"{math.ceil(round(1000 * within, 6)) / 10:.1f} %"


def gap_sentence(name: str, gap: PairedGap | None, of: str = "loss") -> str:
    """Return the gap of `name` in one sentence.

    `of`: the quantity that the gap is of; stands before the number unless the scale has a unit.
    """
    if gap is None:
        return f"{name}: {verdict(gap)}."
    scale = gap.scale
    size = (
        f"{scale.signed(gap.mean)} {scale.unit}" if scale.unit else f"{of} {scale.signed(gap.mean)}"
    )
    if gap.low is not None:
        size += (
            f" ({share(CONFIDENCE)} interval {scale.signed(gap.low)} to {scale.signed(gap.high)})"
        )
    size += f" against {gap.baseline}"
    clause = verdict(gap, of)
    if gap.perplexity_ratio is not None:
        size += f", perplexity {percent(gap.perplexity_ratio)}"
    if (
        gap.equivalent_within is not None
        and gap.t_p_holm is not None
        and not gap.significance_claimed
    ):
        # A missing star is not equality.
        clause += f"; the data allow a difference up to {margin(gap)} of perplexity"
    return f"{name}: {size}; {clause}."
