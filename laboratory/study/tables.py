"""Tables and sentences of gaps, with one policy for p values.

A p value is not shown below FEWEST_SEEDS pairs, where a reader would mistake it for a claim, and is
shown as "< 0.0001" below that.

    rows = [GapRow(("orthogonal",), gap), GapRow(("gaussian",), None)]
    gap_table(("variant",), rows, (PAIRS, GAP, INTERVAL, T_HOLM), claims=True)

The columns also take any other record that has a `gap`, by `reporting.tables.table_of`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TypeAlias

from laboratory.study.gaps import CONFIDENCE, FEWEST_SEEDS, LEVEL, NATS, HasGap, PairedGap
from pretrain.reporting.tables import REMARKS, Column, Table, table_of
from pretrain.reporting.text import NOTHING, percent, share, signed

GapColumn: TypeAlias = Column[HasGap]


@dataclass(frozen=True)
class GapRow:
    """Row of a table of gaps.

    Attributes:
        names: Cells before the columns of the gap.
        gap: None without a seed in common with the baseline.
        of: Quantity that the gap is of, as sentences call it.
    """

    names: Sequence[str]
    gap: PairedGap | None
    of: str = "loss"


def gap_table(
    names: Sequence[str],
    rows: Sequence[GapRow],
    columns: Sequence[Column[GapRow]],
    title: str = "",
) -> Table:
    """Return a table of gaps.

    Args:
        names: Titles of the columns of `GapRow.names`.
        columns: Columns of each gap.
    """
    first = [Column(name, _nth_name(i), in_words=True) for i, name in enumerate(names)]
    return table_of(rows, [*first, *columns], title)


def _nth_name(index: int) -> Callable[[GapRow], str]:
    return lambda row: row.names[index]


def p_value(p: float | None, n: int = FEWEST_SEEDS) -> str:
    """Return a p value as text; a dash for None.

    Args:
        n: Pairs that it was computed from.
    """
    if n < FEWEST_SEEDS:
        return f"n < {FEWEST_SEEDS}"
    if p is None:
        return NOTHING
    return "< 0.0001" if p < 0.0001 else f"{p:.4f}"


def gap_column(title: str, show: Callable[[PairedGap], str], missing: str = NOTHING) -> GapColumn:
    """Return a column of a table of gaps.

    Args:
        title: Title of the column.
        show: Function that returns the text of a gap.
        missing: Text of a record without a gap.
    """
    return Column(title, lambda row: missing if row.gap is None else show(row.gap))


CLAIM: GapColumn = Column(REMARKS, lambda row: verdict(row.gap), in_words=True)
ROW_CLAIM: Column[GapRow] = Column(REMARKS, lambda row: verdict(row.gap, row.of), in_words=True)


def _tested(title: str, key: str) -> GapColumn:
    p_of: Callable[[PairedGap], float | None] = attrgetter(key)
    return gap_column(title, lambda gap: p_value(p_of(gap), gap.n))


PAIRS = gap_column("pairs", lambda gap: str(gap.n), missing="0")
GAP = gap_column("gap", lambda gap: gap.scale.signed(gap.mean))
INTERVAL = gap_column(f"{share(CONFIDENCE)} interval", lambda gap: gap.scale.interval(gap))
PERPLEXITY = gap_column("perplexity", lambda gap: percent(gap.perplexity_ratio))
LIES_WITHIN = gap_column(
    "lies within", lambda gap: NOTHING if gap.equivalent_within is None else f"±{margin(gap)}"
)
EFFECT = gap_column("d_z", lambda gap: signed(gap.cohens_dz, 2))
T_P = _tested("t-test p", "t_p")
T_HOLM = _tested("by Holm", "t_p_holm")
WILCOXON_P = _tested("Wilcoxon p", "wilcoxon_p")
WILCOXON_HOLM = _tested("by Holm", "wilcoxon_p_holm")
TESTS = (T_P, T_HOLM, WILCOXON_P, WILCOXON_HOLM)


def verdict(gap: PairedGap | None, of: str = "loss") -> str:
    """Return the claim that a gap allows, as a clause.

    Args:
        gap: None without a seed in common with the baseline.
        of: Quantity that the gap is of.
    """
    if gap is None:
        return "no seed in common with the baseline, so no gap"
    direction = "higher" if gap.mean > 0 else "lower"
    return judged(
        gap, "differences", f"{of} significantly {direction}", "no significant difference"
    )


def judged(gap: PairedGap, values: str, claimed: str, not_claimed: str) -> str:
    """Return a claim with level, p value and n, or the reason for no test.

    Args:
        gap: Differences and their test.
        values: Plural noun for the differences.
        claimed: Clause where significance is claimed.
        not_claimed: Clause where it is not.
    """
    if gap.n < FEWEST_SEEDS:
        return f"n = {gap.n} < {FEWEST_SEEDS}: significance is not claimed"
    if gap.t_p_holm is None:
        return f"all {values} are equal, so there is nothing to test"
    p = p_value(gap.t_p_holm)
    p = f"p {p}" if p.startswith("<") else f"p = {p}"
    clause = claimed if gap.significance_claimed else not_claimed
    return f"{clause} at {share(LEVEL)} ({p} after Holm, n = {gap.n})"


def margin(gap: PairedGap) -> str:
    """Return `equivalent_within` as percent of perplexity, rounded up to contain the interval."""
    within = gap.equivalent_within
    if within is not None and math.isinf(within):
        return "inf %"
    return NOTHING if within is None else f"{math.ceil(round(1000 * within, 6)) / 10:.1f} %"


def gap_text(gap: PairedGap | None) -> str:
    """Return mean and interval of a gap of losses, in one cell; a dash for None."""
    if gap is None:
        return NOTHING
    return NATS.signed(gap.mean) + ("" if gap.low is None else f" {NATS.interval(gap)}")


def gap_sentence(name: str, gap: PairedGap | None, of: str = "loss") -> str:
    """Return a gap in one sentence.

    Args:
        name: Owner of the gap, such as a variant.
        gap: None without a seed in common with the baseline.
        of: Quantity that the gap is of; it stands before the number unless the scale has a unit.
    """
    if gap is None:
        return f"{name}: {verdict(gap)}."
    scale = gap.scale
    mean = scale.signed(gap.mean)
    size = f"{mean} {scale.unit}" if scale.unit else f"{of} {mean}"
    if gap.low is not None:
        ends = f"{scale.signed(gap.low)} to {scale.signed(gap.high)}"
        size += f" ({share(CONFIDENCE)} interval {ends})"
    size += f" against {gap.baseline}"
    clause = verdict(gap, of)
    if gap.perplexity_ratio is not None:
        size += f", perplexity {percent(gap.perplexity_ratio)}"
    tested = gap.t_p_holm is not None and not gap.significance_claimed
    if gap.equivalent_within is not None and tested:
        # A missing star is not equality.
        clause += f"; the data allow a difference up to {margin(gap)} of perplexity"
    return f"{name}: {size}; {clause}."
