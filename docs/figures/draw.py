"""The drawing of README, docs/figures/block.svg, light and dark: `python docs/figures/draw.py`."""

from __future__ import annotations

from pathlib import Path

STYLE = """
  text { font: 15px system-ui, sans-serif; fill: #1f2328 }
  .title { font-weight: 600 } .small { font-size: 13px } .box text { text-anchor: middle }
  .frame { fill: none; stroke-width: 1.5 } .box rect { stroke-width: 1.5 }
  .frozen .frame, .frozen rect { stroke: #0969da } .frozen rect { fill: #ddf4ff }
  .frozen .frame { stroke-dasharray: 6 4 }
  .trained .frame, .trained rect { stroke: #bc4c00 } .trained rect { fill: #fff1e5 }
  .plain rect { fill: #f6f8fa; stroke: #59636e }
  path { stroke: #59636e; stroke-width: 1.5; fill: none } marker path { fill: #59636e; stroke: none }
  g > rect.frame { fill: none }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc } .plain rect { fill: #212830; stroke: #9198a1 }
    .frozen .frame, .frozen rect { stroke: #4493f8 } .frozen rect { fill: #0d2d55 }
    .trained .frame, .trained rect { stroke: #f0883e } .trained rect { fill: #4a2a12 }
    path { stroke: #9198a1 } marker path { fill: #9198a1 }
    g > rect.frame { fill: none }
  }
"""
TITLE = "An attention layer: what is drawn from a seed, what DeepSpeed sees, what a checkpoint holds"


def box(x: int, y: int, width: int, label: str, below: str = "", height: int = 52) -> str:
    """A box with one or two lines of text in its middle."""
    middle, first = x + width // 2, y + height // 2 + (-3 if below else 5)
    second = f'<text class="small" x="{middle}" y="{first + 18}">{below}</text>' if below else ""
    shape = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>'
    return f'<g class="box">{shape}<text x="{middle}" y="{first}">{label}</text>{second}</g>'


def frame(y: int, height: int) -> str:
    return f'<rect class="frame" x="10" y="{y}" width="840" height="{height}" rx="10"/>'


def lines(x: int, y: int, title: str, *texts: str) -> str:
    """A title, and small lines below it."""
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
        lines(520, 42, "Drawn from a seed, frozen", "buffers, the same bits on any layout;",
              "no gradient, no optimizer state, not in ZeRO;", "a checkpoint holds their recipe and SHA-256"),
    ]  # fmt: skip
    between = [
        box(26, 156, 190, "hidden states x"),
        box(290, 156, 200, "softmax(q·k / √d) v"),
    ]
    trained = [
        frame(242, 112),
        lines(26, 274, "Trained", "all that DeepSpeed sees: gradients,", "optimizer state, ZeRO partitions;",
              "a checkpoint holds these weights"),
        box(290, 272, 90, sub("V")),
        box(400, 272, 90, sub("O")),
        box(530, 272, 110, "MLP"),
        box(680, 272, 154, "norms,", "embeddings, output"),
    ]  # fmt: skip
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
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 364" role="img" aria-label="{TITLE}">'
    marker = f'<defs>{tip}<path d="M0 0 L10 5 L0 10 z"/></marker></defs>'
    return "\n".join(
        [head, f"<title>{TITLE}</title>", f"<style>{STYLE}</style>", marker, *parts, "</svg>", ""]
    )


if __name__ == "__main__":
    Path(__file__).with_name("block.svg").write_text(block())
