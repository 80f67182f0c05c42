"""The drawings of README and the results: `python -m docs.figures.draw`.

block.svg      an attention layer: what is frozen, what DeepSpeed sees
layouts.svg    one curve under eight layouts, from layouts.json, which layouts.py measures
induction.svg  which designs learn induction, from docs/results/retrieval/induction.csv

contrasts.py has the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from math import floor, log10
from pathlib import Path

from docs.figures import contrasts
from docs.figures.svg import circle, drawing, line, scale, text
from laboratory.results.tables import RESULTS, table

HERE = Path(__file__).resolve().parent
LAYOUTS = HERE / "layouts.json"
RETRIEVAL = RESULTS / "retrieval" / "induction.csv"

DRAWN = (
    "buffers, the same bits on any layout;",
    "no gradient, no optimizer state, not in ZeRO;",
    "a checkpoint holds their recipe and SHA-256",
)
TRAINED = (
    "all that DeepSpeed sees: gradients,",
    "optimizer state, ZeRO partitions;",
    "a checkpoint holds these weights",
)
TITLE = (
    "An attention layer: what is drawn from a seed, what DeepSpeed sees, what a checkpoint holds"
)


def box(x: int, y: int, width: int, label: str, below: str = "", height: int = 52) -> str:
    """Draw a box with one or two lines of text in its middle."""
    middle = x + width // 2
    first = y + height // 2 + (-3 if below else 5)
    second = f'<text class="small" x="{middle}" y="{first + 18}">{below}</text>' if below else ""
    shape = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>'
    return f'<g class="box">{shape}<text x="{middle}" y="{first}">{label}</text>{second}</g>'


def frame(y: int, height: int) -> str:
    return f'<rect class="frame" x="10" y="{y}" width="840" height="{height}" rx="10"/>'


def lines(x: int, y: int, title: str, texts: Sequence[str]) -> str:
    """Draw a title, and `texts` small below it, one per line."""
    small = "".join(
        f'<text class="small" x="{x}" y="{y + 20 * row}">{text}</text>'
        for row, text in enumerate(texts, start=1)
    )
    return f'<text class="title" x="{x}" y="{y}">{title}</text>{small}'


def arrow(path: str) -> str:
    return f'<path d="{path}" marker-end="url(#tip)"/>'


def sub(letter: str) -> str:
    return f'W<tspan baseline-shift="sub" font-size="11">{letter}</tspan>'


def block() -> str:
    """Draw the frozen rows above, the scores between, the trained weights below."""
    frozen = [
        frame(10, 112),
        box(26, 46, 190, "(seed, layer, role, head)"),
        box(290, 46, 90, sub("Q")),
        box(400, 46, 90, sub("K")),
        lines(520, 42, "Drawn from a seed, frozen", DRAWN),
    ]
    between = [
        box(26, 156, 190, "hidden states x"),
        box(290, 156, 200, "softmax(q·k / √d) v"),
    ]
    trained = [
        frame(242, 112),
        lines(26, 274, "Trained", TRAINED),
        box(290, 272, 90, sub("V")),
        box(400, 272, 90, sub("O")),
        box(530, 272, 110, "MLP"),
        box(680, 272, 154, "norms,", below="embeddings, output"),
    ]
    paths = ["M216 72 H284", "M216 182 H284", "M335 98 V150", "M445 98 V150", "M335 272 V214"]
    paths += ["M445 208 V266", "M490 298 H524"]
    parts = [
        f'<g class="frozen">{"".join(frozen)}</g>',
        f'<g class="trained">{"".join(trained)}</g>',
        f'<g class="plain">{"".join(between)}</g>',
        *map(arrow, paths),
        '<text class="small" x="506" y="187">q = '
        + sub("Q")
        + "x,  k = "
        + sub("K")
        + "x,  v = "
        + sub("V")
        + "x</text>",
    ]
    size = 'viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8"'
    tip = f'<marker id="tip" {size} orient="auto">'
    marker = f'<defs>{tip}<path d="M0 0 L10 5 L0 10 z"/></marker></defs>'
    return drawing(TITLE, 860, 364, [marker, '<g class="block">', *parts, "</g>"])


CURVE = (
    "One training under eight layouts, one of them killed and resumed: eight curves, seen as one"
)


def layouts() -> str:
    """Draw the eight losses over the steps, and below them their largest difference."""
    measured = json.loads(LAYOUTS.read_text())
    curves = measured["losses"]
    steps = len(next(iter(curves.values())))
    apart = spreads(list(curves.values()))
    low = min(map(min, curves.values()))
    high = max(map(max, curves.values()))
    x = scale(1, steps, 70, 560)
    y = scale(low - 0.2, high + 0.1, 250, 44)
    parts = [text(70, 22, "training loss, eight layouts drawn one over the other", "title")]
    for loss in (half / 2 for half in range(int(2 * low) + 1, int(2 * high) + 1)):
        parts += [
            line(70, y(loss), 560, y(loss), kind="grid"),
            text(62, y(loss) + 5, str(loss), "small end"),
        ]
    parts += [
        curve([(x(step), y(loss)) for step, loss in enumerate(losses, 1)])
        for losses in curves.values()
    ]
    killed = measured["killed_after"]
    parts += [
        line(x(killed), top, x(killed), end, kind="axis dashed")
        for top, end in ((44, 250), (296, 380))
    ]
    parts.append(text(x(killed) + 6, 60, "kill −9, resumed"))
    for row, name in enumerate(curves):
        parts.append(text(584, 60 + 24 * row, name))
    decades = scale(floor(log10(min(filter(None, apart)))), floor(log10(max(apart))) + 1, 380, 296)
    parts.append(text(70, 282, "largest difference of two of them at a step, nats", "title"))
    exponents = range(floor(log10(min(filter(None, apart)))), floor(log10(max(apart))) + 2)
    for exponent in exponents:
        parts.append(line(70, decades(exponent), 560, decades(exponent), kind="grid"))
        power = f"10{super_script(exponent)}"
        parts.append(
            f'<text class="small end" x="62" y="{decades(exponent) + 5:.1f}">{power}</text>'
        )
    places = [(x(step), decades(log10(spread))) for step, spread in enumerate(apart, 1) if spread]
    parts.append(f'<g class="trained">{"".join(circle(*point, 2.5) for point in places)}</g>')
    parts += [
        text(x(step), 400, str(step), "small middle") for step in (1, *range(20, steps + 1, 20))
    ]
    most = f"at most {max(apart):.1e} nats".replace("e-0", "e−")
    parts += [text(584, 332, most), text(584, 352, "(no point: equal to the last bit)")]
    parts.append(text(315, 420, "step", "small middle"))
    return drawing(CURVE, 860, 430, parts)


LEARNED = (
    "Induction after 1,500 steps of the modern recipe, without a short convolution: accuracy of "
    "five seeds"
)
DESIGNS = {
    "vanilla": "trained",
    "early_vanilla": "frozen after a quarter",
    "multi_query": "trained, one key and value head",
    "fixed_output": "trained, output projection frozen",
    "orthogonal": "frozen from the start",
}


def induction() -> str:
    """Draw a point for each seed, a row for each design."""
    right: dict[str, list[float]] = {}
    for row in table(RETRIEVAL):
        right.setdefault(row["design"], []).append(float(row["accuracy"]))
    x = scale(0, 100, 280, 660)
    bottom = 40 + 30 * len(DESIGNS)
    parts = [line(x(percent), 30, x(percent), bottom, kind="grid") for percent in range(0, 101, 20)]
    parts.append(text(x(100) + 30, 20, "learned", "small"))
    for row, (design, words) in enumerate(DESIGNS.items()):
        height = 50 + 30 * row
        parts.append(text(20, height + 5, words, "small"))
        points = "".join(circle(x(percent), height) for percent in right[design])
        parts.append(f'<g class="frozen" fill-opacity="0.6">{points}</g>')
        learned = sum(percent > 95 for percent in right[design])
        parts.append(text(x(100) + 30, height + 5, f"{learned} of {len(right[design])}", "small"))
    parts += [
        text(x(percent), bottom + 20, f"{percent} %", "small middle")
        for percent in range(0, 101, 20)
    ]
    parts.append(text(x(50), bottom + 42, "right answers", "small middle"))
    return drawing(LEARNED, 760, bottom + 56, parts)


def spreads(curves: Sequence[Sequence[float]]) -> list[float]:
    """Return the largest difference of two curves at each step."""
    return [max(losses) - min(losses) for losses in zip(*curves, strict=True)]


def curve(places: Sequence[tuple[float, float]]) -> str:
    return f'<path class="curve" d="M{" L".join(f"{x:.1f} {y:.1f}" for x, y in places)}"/>'


def super_script(number: int) -> str:
    words = str(number).replace("-", "−")
    return f'<tspan baseline-shift="super" font-size="10">{words}</tspan>'


DRAWINGS: dict[str, Callable[[], str]] = {
    "block.svg": block,
    "induction.svg": induction,
    "layouts.svg": layouts,
    **contrasts.DRAWINGS,
}

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (HERE / name).write_text(draw())
