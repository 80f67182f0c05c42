"""What is said of trends, in words and as a table."""

from __future__ import annotations

from collections.abc import Sequence

from pretrain.compare.text import slope_verdict
from pretrain.compare.trend import Point, Trend
from pretrain.reporting.tables import Table
from pretrain.reporting.text import NOTHING, interval, number, share, signed
from pretrain.study.gaps import CONFIDENCE
from pretrain.study.tables import p_value


def value_text(value: float) -> str:
    """A value of the subject: 614,400 or 0.003."""
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def trend_sentences(trends: Sequence[Trend]) -> list[str]:
    """One for each variant, and what to know of an extrapolation if there is any."""
    return [*map(_sentence, trends), *_caution(trends)]


def _sentence(trend: Trend) -> str:
    slope, first, last = trend.slope, trend.points[0].value, trend.points[-1].value
    parts = [
        f"{trend.label}, {trend.subject} {value_text(first)} to {value_text(last)}: with each doubling the "
        f"gap changes by {signed(slope.mean)} nats per token{_interval(slope.low, slope.high)}, by one line "
        f"for each of {slope.n} seeds that have a gap at all {len(trend.points)} values",
        slope_verdict(slope),
    ]
    if trend.residual is None:
        parts.append("two values cannot show whether a line fits")
    else:
        parts.append(f"the mean gaps are at most {number(trend.residual)} off the mean line")
    there = trend.extrapolation
    if there is not None:
        parts.append(
            f"at {there.value:,.0f} tokens the line gives {signed(there.mean)}"
            f"{_interval(there.low, there.high)}, extrapolated over {there.doublings:.1f} doublings"
        )
    return "; ".join(parts) + "."


def _interval(low: float | None, high: float | None) -> str:
    return f" ({share(CONFIDENCE)} interval {signed(low)} to {signed(high)})"


def _caution(trends: Sequence[Trend]) -> list[str]:
    beyond = sorted({trend.extrapolation.doublings for trend in trends if trend.extrapolation})
    if not beyond:
        return []
    span = " or ".join(dict.fromkeys(f"{doublings:.1f}" for doublings in beyond))
    return [
        f"What a line gives there is an extrapolation over {span} doublings beyond the longest runs. Runs of "
        "different length each have their own warm-up and decay of the learning rate, and the interval holds "
        "only if the line does, which these runs cannot show."
    ]


def trend_table(trends: Sequence[Trend]) -> Table:
    """The gaps at each value and the line through them, variant by variant."""
    short = trends[0].subject.rpartition(".")[2]
    values = sorted({point.value for trend in trends for point in trend.points})
    far = next((trend.extrapolation for trend in trends if trend.extrapolation), None)
    rows = []
    for trend in trends:
        points = {point.value: point for point in trend.points}
        slope, there = trend.slope, trend.extrapolation
        beyond = NOTHING if there is None else f"{signed(there.mean)} {interval(there.low, there.high)}"
        rows.append(
            (
                trend.label,
                *(_cell(points.get(value)) for value in values),
                str(slope.n),
                signed(slope.mean),
                interval(slope.low, slope.high),
                p_value(slope.t_p, slope.n),
                p_value(slope.t_p_holm, slope.n),
                number(trend.residual),
                *([beyond] if far else []),
                slope_verdict(slope),
            )
        )
    header = (
        "variant",
        *(f"gap at {short}={value_text(value)}" for value in values),
        "seeds of the line",
        "change per doubling",
        f"{share(CONFIDENCE)} interval",
        "t-test p",
        "by Holm",
        "off the line, at most",
        *([f"extrapolated to {far.value:,.0f} tokens"] if far else []),
        "what may be said",
    )
    return Table(header, rows, text_columns=(0, len(header) - 1))


def _cell(point: Point | None) -> str:
    if point is None:
        return NOTHING
    return signed(point.mean) + ("" if point.low is None else f" {interval(point.low, point.high)}")
