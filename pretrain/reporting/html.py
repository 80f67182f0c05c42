"""Page of HTML in one file: style, script and drawings are inside, and nothing is downloaded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from pretrain.reporting.tables import Table

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def html_page(title: str, body: str) -> str:
    """Return the page, with links to its parts below the first heading.

    Args:
        title: title of the window, as text.
        body: HTML; its second headings begin the parts.
    """
    titles = re.findall("<h2>(.*?)</h2>", body)
    for number, text in enumerate(titles):
        body = body.replace(f"<h2>{text}</h2>", f'<h2 id="part-{number}">{text}</h2>', 1)
    links = " · ".join(f'<a href="#part-{number}">{text}</a>' for number, text in enumerate(titles))
    style, script = (
        (files("pretrain.reporting") / f"page.{kind}").read_text(encoding="utf-8")
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


def html_text(text: str) -> str:
    """Return a heading (`## …`), a fenced text (``` … ```) or a paragraph of a page."""
    if heading := re.fullmatch(r"(#{1,6}) (.*)", text):
        return f"<h{len(heading[1])}>{escape(heading[2])}</h{len(heading[1])}>"
    if text.startswith("```"):
        return f"<pre>{escape(text.split(chr(10), 1)[1].rpartition(chr(10))[0])}</pre>"
    return f"<p>{escape(text)}</p>" if text else ""


def html_list(sentences: Sequence[str]) -> str:
    """Return sentences as a list."""
    return "<ul>" + "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences) + "</ul>"


def html_table(table: Table) -> str:
    """Return the table without its title.

    A click on a column's title sorts the rows, unless the first column has no title: then the rows
    are measures, and their order has a meaning.
    """

    def cell(tag: str, index: int, text: str) -> str:
        kind = ' class="words"' if index in table.text_columns else ""
        inner = escape(text).replace("\n", "<br>")
        inner = f"<button>{inner}</button>" if tag == "th" and table.header[0] else inner
        return f"<{tag}{kind}>{inner}</{tag}>"

    head, *rows = (
        "".join(cell(tag, index, text) for index, text in enumerate(row))
        for tag, row in (("th", table.header), *(("td", row) for row in table.rows))
    )
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    head = f"<thead><tr>{head}</tr></thead>"
    return f'<div class="wide"><table>{head}<tbody>\n{body}\n</tbody></table></div>'


def inline_svg(svg: str, name: str) -> str:
    """Return a drawing of matplotlib as a part of a page.

    A colour #RRGGBB becomes the page's variable `--c-RRGGBB`, which page.css sets for dark pages.

    Args:
        svg: the drawing.
        name: said to who cannot see it, and before its ids, which are unique in the page then.
    """
    drawing = re.sub(
        r"<metadata>.*?</metadata>|<!--.*?-->", "", svg[svg.index("<svg") :], flags=re.DOTALL
    )
    drawing = drawing.replace("xlink:href", "href").replace("\n", " ")
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', drawing))

    def own(found: re.Match[str]) -> str:
        return f' id="{name}-{found[1]}"' if found[1] in used else ""

    drawing = re.sub(r' id="([^"]*)"', own, drawing)
    drawing = re.sub(r'(href="|url\()#', rf"\1#{name}-", drawing)
    drawing = re.sub(
        r"#([0-9a-fA-F]{6})\b(?=[;\"])", lambda c: f"var(--c-{c[1].lower()},{c[0]})", drawing
    )
    drawing = re.sub(
        r'^<svg [^>]*?(viewBox="[^"]*")[^>]*>', rf'<svg \1 role="img" aria-label="{name}">', drawing
    )
    return f'<div class="wide figure">{re.sub(r" +", " ", drawing).strip()}</div>'
