"""Numbers as text, the same in the report and on the console."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pretrain.compare.cost import Quartiles
from pretrain.compare.significance import CONFIDENCE, FEWEST_SEEDS, LEVEL, PairedGap, Spread

NOTHING = "–"


@dataclass(frozen=True)
class Grid:
    """A table as text: `rows` have as many cells as `header`; a line break in a cell is for the console."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def number(value: float | None, digits: int = 4) -> str:
    """With thousands separated; a dash for None."""
    return NOTHING if value is None else f"{value:,.{digits}f}"


def signed(value: float | None, digits: int = 4) -> str:
    return NOTHING if value is None else f"{value:+,.{digits}f}"


def share(value: float) -> str:
    """A fraction as whole percent."""
    return f"{100 * value:.0f} %"


def percent(ratio: float | None) -> str:
    """A ratio's distance from 1, signed."""
    return NOTHING if ratio is None else f"{100 * (ratio - 1):+.1f} %"


def mean_sd(value: Spread | None, digits: int = 4, separator: str = " ") -> str:
    """mean ± sd."""
    if value is None:
        return "not finite"
    text = number(value.mean, digits)
    return text if value.sd is None else f"{text}{separator}± {number(value.sd, digits)}"


def interval(low: float | None, high: float | None, digits: int = 4) -> str:
    return NOTHING if low is None or high is None else f"[{signed(low, digits)}, {signed(high, digits)}]"


def quartile_text(value: Quartiles | None, digits: int) -> str:
    """median [first quartile, third quartile]"""
    if value is None:
        return NOTHING
    low, high = number(value.low, digits), number(value.high, digits)
    return f"{number(value.median, digits)} [{low}, {high}]"


def p_value(p: float | None, n: int = FEWEST_SEEDS) -> str:
    """Not shown for fewer pairs than a claim takes, where it would only be mistaken for one."""
    if n < FEWEST_SEEDS:
        return f"n < {FEWEST_SEEDS}"
    if p is None:
        return NOTHING
    return "< 0.0001" if p < 0.0001 else f"{p:.4f}"


def byte_count(count: float | None) -> str:
    """In the binary unit that leaves one to four digits before the point."""
    if count is None:
        return NOTHING
    size, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"


def verdict(gap: PairedGap | None) -> str:
    """What may be said of a gap, as a clause."""
    if gap is None:
        return "no seed in common with the baseline, so no gap"
    if gap.n < FEWEST_SEEDS:
        return f"n = {gap.n} < {FEWEST_SEEDS}: significance is not claimed"
    if gap.t_p_holm is None:
        return "all differences are equal, so there is nothing to test"
    p = p_value(gap.t_p_holm)
    p = f"p {p}" if p.startswith("<") else f"p = {p}"
    if not gap.significance_claimed:
        return f"no significant difference at {share(LEVEL)} ({p} after Holm, n = {gap.n})"
    direction = "higher" if gap.mean > 0 else "lower"
    return f"loss significantly {direction} at {share(LEVEL)} ({p} after Holm, n = {gap.n})"


def gap_sentence(name: str, gap: PairedGap | None) -> str:
    """One line for the summary."""
    if gap is None:
        return f"{name}: {verdict(gap)}."
    size = f"{signed(gap.mean)} nats per token"
    if gap.low is not None:
        size += f" ({share(CONFIDENCE)} interval {signed(gap.low)} to {signed(gap.high)})"
    return (
        f"{name}: {size} against {gap.baseline}, perplexity {percent(gap.perplexity_ratio)}; {verdict(gap)}."
    )


def markdown(grid: Grid, text_columns: Sequence[int] = (0,)) -> list[str]:
    """The table's lines in Markdown; columns other than `text_columns` are set flush right."""
    rule = ["---" if index in text_columns else "---:" for index in range(len(grid.header))]
    rows = [grid.header, tuple(rule), *grid.rows]
    return ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
