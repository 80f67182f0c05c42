"""The drawings of README, light and dark in one SVG each: `python -m docs.figures.draw`.

block.svg        an attention layer: what is frozen, what DeepSpeed sees
findings.svg     what freezing costs in the GPT-2-like recipe, from the runs.csv that FINDINGS names
modern.svg       the same in the modern recipe, from those that MODERN names
equal_cost.svg   the modern recipe at equal tokens, FLOPs, hours and seconds
layouts.svg      one curve under eight layouts, from layouts.json, which layouts.py measures
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from math import exp, floor, log10
from pathlib import Path

from benchmarks.results import equal_cost
from benchmarks.results.equal_cost import DENSE, MULTI_QUERY
from benchmarks.results.figures import table
from pretrain.api import paired_gaps

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results"
LAYOUTS = HERE / "layouts.json"

STYLE = """
  text { font: 15px system-ui, sans-serif; fill: #1f2328 }
  .title { font-weight: 600 } .small { font-size: 13px } .box text { text-anchor: middle }
  .frame { fill: none; stroke-width: 1.5 } .box rect { stroke-width: 1.5 }
  .frozen .frame, .frozen rect { stroke: #0969da } .frozen rect { fill: #ddf4ff }
  .frozen .frame { stroke-dasharray: 6 4 }
  .trained .frame, .trained rect { stroke: #bc4c00 } .trained rect { fill: #fff1e5 }
  .plain rect { fill: #f6f8fa; stroke: #59636e }
  path { stroke: #59636e; stroke-width: 1.5; fill: none }
  marker path { fill: #59636e; stroke: none }
  g > rect.frame { fill: none }
  .grid { stroke: #d1d9e0; stroke-width: 1 } .axis { stroke: #59636e; stroke-width: 1.5 }
  .curve { stroke: #0969da; stroke-width: 2 } .trained circle { fill: #bc4c00 }
  .dashed { stroke-dasharray: 5 4 } .middle { text-anchor: middle } .end { text-anchor: end }
  .frozen line { stroke: #0969da } .frozen circle { fill: #0969da } .frozen text { fill: #0550ae }
  .trained line { stroke: #bc4c00 }
  .trained text { fill: #953800 } .block text { fill: #1f2328 }
  .frozen circle.open { fill: #ffffff; stroke: #0969da; stroke-width: 1.8 }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc } .plain rect { fill: #212830; stroke: #9198a1 }
    .frozen .frame, .frozen rect { stroke: #4493f8 } .frozen rect { fill: #0d2d55 }
    .trained .frame, .trained rect { stroke: #f0883e } .trained rect { fill: #4a2a12 }
    path { stroke: #9198a1 } marker path { fill: #9198a1 }
    g > rect.frame { fill: none }
    .curve { stroke: #4493f8 } .trained circle { fill: #f0883e }
    .grid { stroke: #3d444d } .axis { stroke: #9198a1 }
    .frozen line { stroke: #4493f8 } .frozen circle { fill: #4493f8 } .frozen text { fill: #79b8ff }
    .trained line { stroke: #f0883e }
    .trained text { fill: #ffa657 } .block text { fill: #f0f6fc }
    .frozen circle.open { fill: #0d1117; stroke: #4493f8 }
  }
"""
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
    """A box with one or two lines of text in its middle."""
    middle = x + width // 2
    first = y + height // 2 + (-3 if below else 5)
    second = f'<text class="small" x="{middle}" y="{first + 18}">{below}</text>' if below else ""
    shape = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>'
    return f'<g class="box">{shape}<text x="{middle}" y="{first}">{label}</text>{second}</g>'


def frame(y: int, height: int) -> str:
    return f'<rect class="frame" x="10" y="{y}" width="840" height="{height}" rx="10"/>'


def lines(x: int, y: int, title: str, texts: Sequence[str]) -> str:
    """A title, and `texts` small below it, a line each."""
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
    """Frozen rows above, the scores between, what trains below."""
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


def drawing(title: str, width: int, height: int, parts: Sequence[str]) -> str:
    """The whole SVG, its title for those who cannot see it."""
    size = f'viewBox="0 0 {width} {height}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(title)}">'
    )
    style = f"<style>{STYLE}</style>"
    return "\n".join([head, f"<title>{escape(title)}</title>", style, *parts, "</svg>", ""])


def text(x: float, y: float, words: str, kind: str = "small") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return (
        f'<line{named} x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke-width="1.6"/>'
    )


Scale = Callable[[float], float]


def scale(low: float, high: float, start: float, end: float) -> Scale:
    """A number of the data to a place in the drawing."""
    return lambda value: start + (value - low) / (high - low) * (end - start)


@dataclass(frozen=True)
class Finding:
    """A contrast of two designs, paired by seed.

    Attributes:
        text: what its row says of length and text.
        page: folder of docs/results with runs.csv, or with a trial's trial.json.
        design: name of the design's runs without their seeds; `baseline` that of the other's.
        seeds: the first so many seeds, in case not all were planned.
    """

    text: str
    page: str
    design: str
    baseline: str
    seeds: int | None = None


Groups = dict[str, list[Finding]]
"""The contrasts of a figure under the headings of their groups."""


@dataclass(frozen=True)
class Gap:
    """A mean of paired differences in nats, the ends of its 95 % interval, the number of pairs."""

    mean: float
    low: float
    high: float
    n: int


Rows = dict[str, list[tuple[str, Gap]]]
"""Rows of a figure, each with its words and its gap, under the headings of their groups."""

ALONE, SAME = "demo/sweeps/{}/orthogonal", "demo/sweeps/{}/vanilla"
FROZEN, RIVAL = "monarch_shared_conv4", "vanilla_conv4"
FINDINGS: Groups = {
    "1. Freezing alone, to trained attention, equal tokens": [
        Finding("0.3 M tokens", "tokens", ALONE.format("ablations"), SAME.format("ablations")),
        Finding("0.3 M, nine other seeds", "trials/freezing", "orthogonal", "vanilla"),
        Finding("0.6 M", "tokens", ALONE.format("structured"), SAME.format("structured")),
        Finding("1.2 M", "tokens", ALONE.format("tokens"), SAME.format("tokens")),
    ],
    "2. A frozen design, to trained attention with the same convolution, equal FLOPs": [
        Finding("0.5 M tokens, demo's text", "thin_demo/to_slow", FROZEN, f"{RIVAL}_slow"),
        Finding("0.5 M, documentation", "headline", FROZEN, RIVAL),
        Finding("0.5 M, articles", "wiki", FROZEN, RIVAL),
        *(
            Finding(
                f"{length} M, documentation",
                f"widths/w128-{run}",
                f"{FROZEN}-w128-{run}",
                f"{RIVAL}-w128-{run}",
            )
            for length, run in ((1, "warm"), (2, "t2000"), (4, "t4000"), (8, "t8000"))
        ),
    ],
    "3. The same design frozen, to it trained, equal FLOPs": [
        Finding("0.5 M tokens, documentation", "thin", FROZEN, f"trained_{FROZEN}"),
        Finding("0.5 M, demo's text", "thin_demo", FROZEN, f"trained_{FROZEN}", seeds=6),
    ],
}
FOUND = (
    "What freezing queries and keys costs: per cent of perplexity in three contrasts, "
    "with 95 % intervals"
)
PRICE = "modern/price"
LENGTHS = {500: "0.5 M tokens", 1000: "1 M", 2000: "2 M", 4000: "4 M"}


def over_length(design: str, baseline: str, page: str = "modern") -> list[Finding]:
    """A contrast of the modern study after each number of steps."""
    return [
        Finding(length, page, f"{design}-t{steps}", f"{baseline}-t{steps}")
        for steps, length in LENGTHS.items()
    ]


MODERN: Groups = {
    "Rows frozen from the start, to trained attention": [
        Finding("Muon, 0.5 M tokens", PRICE, "orthogonal", "vanilla"),
        Finding("AdamW, 0.5 M", f"{PRICE}/adamw", "orthogonal_adamw", "vanilla_adamw"),
    ],
    "Structured rows frozen from the start, to the same rows trained": over_length(
        FROZEN, f"trained_{FROZEN}"
    ),
    "Structured rows frozen after a quarter of the steps, to the same rows trained": over_length(
        f"early_{FROZEN}", f"trained_{FROZEN}"
    ),
    "Dense rows frozen after a quarter of the steps, to the same rows trained": over_length(
        f"early_{RIVAL}", RIVAL, "modern/dense"
    ),
    "Structured rows trained, to dense rows trained": over_length(f"trained_{FROZEN}", RIVAL),
    "Structured rows frozen after a quarter of the steps, to multi-query attention": over_length(
        f"early_{FROZEN}", "multi_query_conv4"
    ),
    "Dense rows trained without the short convolution, to with it": over_length(
        "vanilla", RIVAL, "modern/dense"
    ),
}
MODERN_TITLE = (
    "The modern recipe: per cent of perplexity at equal tokens in seven contrasts, with 95 "
    "% intervals"
)


COSTS_TITLE = (
    "The modern recipe at equal tokens, FLOPs, GPU-hours and seconds: per cent of perplexity after "
    "4 M tokens, with 95 % intervals"
)
COMPARED = {
    "Structured rows frozen from the start, to dense rows trained": (FROZEN, DENSE),
    "Structured rows frozen after a quarter of the steps, to dense rows trained": (
        f"early_{FROZEN}",
        DENSE,
    ),
    "Structured rows trained, to dense rows trained": (f"trained_{FROZEN}", DENSE),
    "Structured rows frozen from the start, to multi-query attention": (FROZEN, MULTI_QUERY),
}


def findings() -> str:
    """The GPT-2-like recipe."""
    rows = of_findings(FINDINGS)
    return contrasts(FOUND, rows, ends=(-15, 19), sides="frozen", ratio="frozen to trained")


def modern() -> str:
    """The modern recipe."""
    rows = of_findings(MODERN)
    ratio = "the first to the second"
    return contrasts(MODERN_TITLE, rows, ends=(-10, 35), sides="the first", ratio=ratio)


def equal_costs() -> str:
    """The modern recipe after 4 M tokens, where what is saved buys tokens."""
    losses = equal_cost.read_losses([equal_cost.RUNS])
    tokens = max(losses[DENSE])

    rows: Rows = {}
    for heading, pair in COMPARED.items():
        for cost in equal_cost.COSTS:
            spent = [equal_cost.at_equal_cost(losses, name, tokens, cost) for name in pair]
            rows.setdefault(heading, []).append((f"equal {cost}", paired(*spent)))
    ratio = "the first to the second"
    return contrasts(COSTS_TITLE, rows, ends=(-10, 10), sides="the first", ratio=ratio)


def of_findings(groups: Groups) -> Rows:
    return {
        heading: [(finding.text, gap(finding)) for finding in own]
        for heading, own in groups.items()
    }


def contrasts(
    title: str, groups: Rows, *, ends: tuple[float, float], sides: str, ratio: str
) -> str:
    """Each contrast a row with its interval, hollow where the interval holds 0.

    Args:
        title: of the drawing.
        groups: what it shows.
        ends: of the axis, per cent of perplexity.
        sides: what is better left of 0 and worse right of it.
        ratio: what is compared to what.
    """
    rows = sum(len(own) + 1.4 for own in groups.values())
    bottom = 34 + 25 * rows
    x = scale(*ends, 270, 690)
    apart = 10 if ends[1] - ends[0] > 40 else 5
    marks = [percent for percent in range(-100, 100, apart) if ends[0] <= percent <= ends[1]]
    parts = [text(270, 20, f"{sides} is better", "small")]
    parts.append(text(690, 20, f"{sides} is worse", "small end"))
    height = 30.0
    for heading, own in groups.items():
        height += 29
        parts.append(text(20, height, heading, "title"))
        for percent in marks:
            kind = "grid" if percent else "axis dashed"
            parts.append(
                line(x(percent), height + 8, x(percent), height + 25 * len(own) + 6, kind=kind)
            )
        for words, found in own:
            height += 25
            parts.append(contrast(words, found, height, x))
        height += 6
    for percent in marks:
        words = f"{percent:+d} %".replace("-", "−") if percent else "0"
        parts.append(text(x(percent), bottom + 20, words, "small middle"))
    parts.append(text(480, bottom + 42, f"perplexity, {ratio}", "small middle"))
    return drawing(title, 860, int(bottom) + 56, parts)


def contrast(words: str, found: Gap, height: float, x: Scale) -> str:
    """A row: what was compared, the interval, the number."""
    mean, low, high = (100 * (exp(value) - 1) for value in (found.mean, found.low, found.high))
    held = low <= 0 <= high
    mark = f'<circle class="{"open" if held else ""}" cx="{x(mean):.1f}" cy="{height - 5}" r="5"/>'
    bar = line(x(low), height - 5, x(high), height - 5)
    value = f"{mean:+.1f} %, n = {found.n}".replace("-", "−")
    words = text(36, height, words, "small") + text(845, height, value, "small end")
    return f'<g class="frozen">{bar}{mark}</g>{words}'


def gap(finding: Finding) -> Gap:
    """The gap of a contrast, from its page."""
    place = RESULTS / finding.page
    if (place / "trial.json").is_file():
        trial = json.loads((place / "trial.json").read_text())
        return Gap(trial["mean"], trial["low"], trial["high"], trial["n"])
    losses: dict[str, dict[int, float]] = {}
    for run in table(place / "runs.csv"):
        own = losses.setdefault(run["name"].rpartition("-")[0], {})
        own[int(run["seed"])] = float(run["validation_loss"])
    chosen = sorted(losses[finding.design])[: finding.seeds]
    design = {seed: losses[finding.design][seed] for seed in chosen}
    return paired(design, losses[finding.baseline])


def paired(losses: dict[int, float], baseline: dict[int, float]) -> Gap:
    """The gap of two models' losses over the seeds that both have."""
    found = paired_gaps({"own": losses, "baseline": baseline}, "baseline")["own"]
    assert found.low is not None and found.high is not None, found
    return Gap(found.mean, found.low, found.high, found.n)


def circle(x: float, y: float, radius: float = 5) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>'


CURVE = (
    "One training under eight layouts, one of them killed and resumed: eight curves, seen as one"
)


def layouts() -> str:
    """The eight losses over the steps, above how far they are apart."""
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
        curve([(x(step), y(loss)) for step, loss in enumerate(own, 1)]) for own in curves.values()
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
    places = [(x(step), decades(log10(own))) for step, own in enumerate(apart, 1) if own]
    parts.append(f'<g class="trained">{"".join(circle(*place, 2.5) for place in places)}</g>')
    parts += [
        text(x(step), 400, str(step), "small middle") for step in (1, *range(20, steps + 1, 20))
    ]
    most = f"at most {max(apart):.1e} nats".replace("e-0", "e−")
    parts += [text(584, 332, most), text(584, 352, "(no point: equal to the last bit)")]
    parts.append(text(315, 420, "step", "small middle"))
    return drawing(CURVE, 860, 430, parts)


def spreads(curves: Sequence[Sequence[float]]) -> list[float]:
    """Largest difference of two curves, step by step."""
    return [max(losses) - min(losses) for losses in zip(*curves, strict=True)]


def curve(places: Sequence[tuple[float, float]]) -> str:
    return f'<path class="curve" d="M{" L".join(f"{x:.1f} {y:.1f}" for x, y in places)}"/>'


def super_script(number: int) -> str:
    words = str(number).replace("-", "−")
    return f'<tspan baseline-shift="super" font-size="10">{words}</tspan>'


DRAWINGS: dict[str, Callable[[], str]] = {
    "block.svg": block,
    "equal_cost.svg": equal_costs,
    "findings.svg": findings,
    "layouts.svg": layouts,
    "modern.svg": modern,
}

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (HERE / name).write_text(draw())
