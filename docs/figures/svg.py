"""Parts of SVG drawings, light and dark in one file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

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


def drawing(title: str, width: int, height: int, parts: Sequence[str]) -> str:
    """Return the whole SVG; its title is for readers who cannot see it."""
    size = f'viewBox="0 0 {width} {height}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(title)}">'
    )
    style = f"<style>{STYLE}</style>"
    return "\n".join([head, f"<title>{escape(title)}</title>", style, *parts, "</svg>", ""])


def text(x: float, y: float, words: str, kind: str = "small") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str = "") -> str:
    style = f' class="{kind}"' if kind else ""
    return (
        f'<line{style} x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke-width="1.6"/>'
    )


Scale = Callable[[float], float]


def scale(low: float, high: float, start: float, end: float) -> Scale:
    """Return a function from a number of the data to a place in the drawing."""
    return lambda value: start + (value - low) / (high - low) * (end - start)


def circle(x: float, y: float, radius: float = 5) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>'
