"""The drawings of README, light and dark in one SVG each: `python docs/figures/draw.py`.

block.svg     an attention layer: what is frozen, what DeepSpeed sees
price.svg     what freezing costs against what it saves, from the tables of three docs/results
layouts.svg   one curve under eight layouts, from layouts.json, which layouts.py measures
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from math import exp, floor, log10
from pathlib import Path

HERE = Path(__file__).resolve().parent
DESIGNS = HERE.parent / "results/frozen_designs"
DOCUMENTATION = HERE.parent / "results/equal_flops/documentation/to_vanilla"
DEMO = HERE.parent / "results/equal_flops/demo/to_vanilla"
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
  .trained line { stroke: #bc4c00 } .trained rect.point { fill: #bc4c00 }
  .trained text { fill: #953800 } .block text { fill: #1f2328 }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc } .plain rect { fill: #212830; stroke: #9198a1 }
    .frozen .frame, .frozen rect { stroke: #4493f8 } .frozen rect { fill: #0d2d55 }
    .trained .frame, .trained rect { stroke: #f0883e } .trained rect { fill: #4a2a12 }
    path { stroke: #9198a1 } marker path { fill: #9198a1 }
    g > rect.frame { fill: none }
    .curve { stroke: #4493f8 } .trained circle { fill: #f0883e }
    .grid { stroke: #3d444d } .axis { stroke: #9198a1 }
    .frozen line { stroke: #4493f8 } .frozen circle { fill: #4493f8 } .frozen text { fill: #79b8ff }
    .trained line { stroke: #f0883e } .trained rect.point { fill: #f0883e }
    .trained text { fill: #ffa657 } .block text { fill: #f0f6fc }
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


LABELS: dict[str, tuple[float, float, str]] = {
    "vanilla_conv4": (8, 4, ""),
    "orthogonal": (0, -8, "middle"),
    "orthogonal_conv4": (-8, -4, "end"),
    "shared": (-8, 12, "end"),
    "shared_conv4": (8, 6, ""),
    "shared_conv4_low_rank_8": (8, 0, ""),
    "monarch_shared_conv4": (9, 5, ""),
    "low_rank_8": (8, 8, ""),
    "low_rank_8_conv4": (4, 15, "end"),
    "trained_shared_conv4": (0, 16, "middle"),
    "monarch_trainable": (0, -8, "middle"),
}
"""Where a design's name stands, from its point or its interval's end: right, down, alignment."""
AT_HIGH = ("orthogonal", "shared", "low_rank_8", "monarch_trainable")
AT_LOW = ("shared_conv4_low_rank_8", "trained_shared_conv4", "low_rank_8_conv4")
PRICE = (
    "What freezing costs against what it saves: "
    "perplexity to vanilla's over FLOPs saved, three studies"
)
ONE_RATE = "perplexity to vanilla's, one learning rate for all (0.3 M tokens, n = 5)"
ON_DEMO = "the same text at equal FLOPs, another rate and warm-up for all (0.5 M tokens, n = 12)"
ON_DOCUMENTATION = "documentation, likewise (0.5 M tokens, n = 12)"


def price() -> str:
    """Three studies over one axis of FLOPs saved, each with all its designs."""
    parts = [
        *panel(DESIGNS, ONE_RATE, (44, 340), (-13, 32)),
        *panel(DEMO, ON_DEMO, (410, 560), (-19, 4)),
        *panel(DOCUMENTATION, ON_DOCUMENTATION, (630, 780), (-33, 4)),
        text(
            455,
            824,
            "FLOPs of a training token saved (models of 1.3 M parameters, 95 % intervals)",
            "small middle",
        ),
        f'<g class="frozen">{circle(560, 64)}{text(572, 69, "Q and K frozen (or in part)")}</g>',
        f'<g class="trained">{square(560, 88)}{text(572, 93, "everything trained")}</g>',
    ]
    return drawing(PRICE, 860, 836, parts)


def panel(study: Path, title: str, places: tuple[int, int], percents: tuple[int, int]) -> list[str]:
    """A study between two heights of the drawing, which show these per cent of perplexity."""
    designs, runs = (table(study / name) for name in ("variants.csv", "runs.csv"))
    names = {run["variant"]: run["name"].rpartition("-")[0] for run in runs}
    (vanilla,) = (design for design in designs if not design["gap.mean"])
    top, bottom = places
    x = scale(-0.8, 11.4, 70, 840)
    y = scale(*percents, bottom, top)
    parts = [text(70, top - 22, title, "title")]
    for percent in range(0, 12, 2):
        parts.append(line(x(percent), top, x(percent), bottom, kind="grid"))
        parts.append(text(x(percent), bottom + 20, f"{percent} %", "small middle"))
    for percent in range(-(-percents[0] // 10) * 10, percents[1] + 1, 10):
        parts.append(
            text(
                62,
                y(percent) + 5,
                f"{percent:+d} %".replace("-", "−") if percent else "0 %",
                "small end",
            )
        )
        parts.append(
            line(70, y(percent), 840, y(percent), kind="grid" if percent else "axis dashed")
        )
    parts.append(text(836, y(0) + 18, "vanilla", "small end"))
    for design in designs:
        if design is not vanilla:
            flops = [float(own["theory.executed_flops_per_token"]) for own in (design, vanilla)]
            place = x(100 * (1 - flops[0] / flops[1]))
            parts.append(point(design, names[design["variant"]], place, y))
    return parts


def table(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def point(design: Mapping[str, str], name: str, place: float, y: Scale) -> str:
    """A design's gap, its interval and its name."""
    frozen = int(design["theory.frozen_parameters"]) > 0
    middle, low, high = (
        y(100 * (exp(float(design[f"gap.{key}"])) - 1)) for key in ("mean", "low", "high")
    )
    right, down, alignment = LABELS[name]
    at = high if name in AT_HIGH else low if name in AT_LOW else middle
    mark = circle(place, middle) if frozen else square(place, middle)
    bar = line(place, low, place, high)
    label = text(place + right, at + down, name, f"small {alignment}".strip())
    return f'<g class="{"frozen" if frozen else "trained"}">{bar}{mark}{label}</g>'


def circle(x: float, y: float, radius: float = 5) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>'


def square(x: float, y: float) -> str:
    return f'<rect class="point" x="{x - 4.5:.1f}" y="{y - 4.5:.1f}" width="9" height="9"/>'


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
    "price.svg": price,
    "layouts.svg": layouts,
}

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (HERE / name).write_text(draw())
