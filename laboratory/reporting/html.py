"""Page of HTML in one file: style, script and drawings are inside, and nothing is downloaded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from pretrain.reporting.tables import REMARKS, Table

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
_LONG_PART = 19
"""Letters of a part of a name from which on it may be broken at an underscore, too."""


def html_page(title: str, body: str) -> str:
    """Return the page, with links to its parts below the first heading.

    Args:
        title: Title of the window, as text.
        body: HTML; its second headings begin the parts.
    """
    titles = re.findall("<h2>(.*?)</h2>", body)
    for number, text in enumerate(titles):
        body = body.replace(f"<h2>{text}</h2>", f'<h2 id="part-{number}">{text}</h2>', 1)
    links = " · ".join(f'<a href="#part-{number}">{text}</a>' for number, text in enumerate(titles))
    style, script = (
        (files("laboratory.reporting") / f"page.{kind}").read_text(encoding="utf-8")
        for kind in ("css", "js")
    )
    body = body.replace("</h1>", f"</h1><nav>{links}</nav>", 1)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        f"{body}\n<script>\n{script}</script>\n</body>\n</html>\n"
    )


def _words(text: str) -> str:
    """Return text as HTML, with break opportunities in long names."""

    def parts(name: re.Match[str]) -> str:
        whole = re.sub("([+/=])", r"\1<wbr>", name[0])
        return re.sub(f"[^<>]{{{_LONG_PART},}}", lambda p: p[0].replace("_", "_<wbr>"), whole)

    return re.sub(r"[\w+/=.]{20,}|[\w.]+[+/=][\w+/=.]+", parts, escape(text))


def html_text(text: str) -> str:
    """Return a heading (`## …`), a fenced text (``` … ```) or a paragraph of a page."""
    if heading := re.fullmatch(r"(#{1,6}) (.*)", text):
        return f"<h{len(heading[1])}>{_words(heading[2])}</h{len(heading[1])}>"
    if text.startswith("```"):
        return f"<pre>{escape(text.split(chr(10), 1)[1].rpartition(chr(10))[0])}</pre>"
    return f"<p>{_words(text)}</p>" if text else ""


def html_list(sentences: Sequence[str]) -> str:
    """Return sentences as a list."""
    return "<ul>" + "".join(f"<li>{_words(sentence)}</li>" for sentence in sentences) + "</ul>"


def html_table(table: Table) -> str:
    """Return the table without its title; remarks, which must not scroll away, are a list below.

    A click on a column's title sorts the rows, unless the first column has no title: then the rows
    are measures, and their order has a meaning.
    """

    def cell(tag: str, index: int, text: str) -> str:
        kind = ' class="words"' if index in table.text_columns else ""
        inner = _words(text).replace("\n", "<br>")
        inner = f"<button>{inner}</button>" if tag == "th" and table.header[0] else inner
        return f"<{tag}{kind}>{inner}</{tag}>"

    lines = [table.header, *table.rows]
    remarks = ""
    if table.header[-1] == REMARKS:
        remarks = _remarks(table)
        lines = [line[:-1] for line in lines]
    head, *rows = (
        "".join(cell("td" if number else "th", index, text) for index, text in enumerate(line))
        for number, line in enumerate(lines)
    )
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    head = f"<thead><tr>{head}</tr></thead>"
    return f'<div class="wide"><table>{head}<tbody>\n{body}\n</tbody></table></div>{remarks}'


def _remarks(table: Table) -> str:
    """Return each row's last cell as a sentence after the cells that identify the row."""
    rows = [tuple(cell.replace("\n", " ") for cell in row) for row in table.rows]
    counts = range(1, len(table.header) - 1)
    most = next((n for n in counts if len({row[:n] for row in rows}) == len(rows)), 1)
    return html_list([f"{', '.join(row[:most])}: {row[-1]}." for row in rows])


def inline_svg(svg: str, name: str, narrow: str = "") -> str:
    """Return a drawing of matplotlib as a part of a page.

    Args:
        svg: The drawing.
        name: Label for screen readers, and prefix of the ids, which makes them unique in the page.
        narrow: The drawing for a phone; "": the same, scaled.
    """
    wide = _svg(svg, name, name)
    if not narrow:
        return f'<div class="figure">{wide}</div>'
    slim = _svg(narrow, name, f"{name}-narrow")
    return f'<div class="figure broad">{wide}</div><div class="figure narrow">{slim}</div>'


def _svg(svg: str, label: str, name: str) -> str:
    """Return the drawing with its ids prefixed by `name`.

    A colour #RRGGBB becomes the page's variable `--c-RRGGBB`, which page.css sets for dark pages.
    """
    drawing = re.sub(
        r"<metadata>.*?</metadata>|<!--.*?-->", "", svg[svg.index("<svg") :], flags=re.DOTALL
    )
    drawing = drawing.replace("xlink:href", "href").replace("\n", " ")
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', drawing))

    def with_prefix(match: re.Match[str]) -> str:
        return f' id="{name}-{match[1]}"' if match[1] in used else ""

    drawing = re.sub(r' id="([^"]*)"', with_prefix, drawing)
    drawing = re.sub(r'(href="|url\()#', rf"\1#{name}-", drawing)
    drawing = re.sub(
        r"#([0-9a-fA-F]{6})\b(?=[;\"])", lambda c: f"var(--c-{c[1].lower()},{c[0]})", drawing
    )
    drawing = re.sub(
        r'^<svg [^>]*?(viewBox="[^"]*")[^>]*>',
        rf'<svg \1 role="img" aria-label="{label}">',
        drawing,
    )
    return re.sub(r" +", " ", drawing).strip()
