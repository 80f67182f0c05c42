"""The site of the pages, from the repository to build/site-pages/html: `make site`.

Pages lie on the site as they lie in the repository, so that a link is right in both. The notebook
becomes a page. At the end every link and picture of the HTML is looked up; a dead one makes the
exit code 1. Only the build itself needs Zensical (the extra `site`).
"""

from __future__ import annotations

import argparse
import base64
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
OUT = ROOT / "build/site-pages"
PAGES = ("*.md", "docs/**/*.md", "ds_configs/*.md", "tests/*.md")
BESIDE = ("docs/figures/*", "docs/results/**/*.svg")
NOTEBOOKS = ("docs/*.ipynb",)
CODE = r"(^```.*?^```|`[^`\n]+`|^    [^\n]*$|\]\([^)\s]*\))"
"""Text that stays as it is: blocks of code, code in a line, targets of links."""
FORMULA = re.compile(
    r"(?<![\w/.*])(?P<letter>[A-Za-zα-ωΑ-Ω])(?P<sign>[_^])"
    r"(\((?P<inside>[^()\n]+)\)|(?P<bare>[A-Za-z0-9]+(\.\d+)?))(?![\w_/*.]*[_/*])"
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=OUT, help="a directory of its own, which is replaced"
    )
    out = parser.parse_args().out
    gather(out)
    command = [
        sys.executable,
        "-m",
        "zensical",
        "build",
        "--clean",
        "--config-file",
        str(out / "zensical.toml"),
    ]
    done = subprocess.run(command, cwd=out, check=False)
    if done.returncode:
        return done.returncode
    dead = [f"{page.relative_to(out)}: {link}" for page, link in dead_links(out / "html")]
    print(*dead, sep="\n", end="\n" if dead else "")
    print(f"{len(dead)} dead links; open {out / 'html/index.html'}")
    return 1 if dead else 0


def gather(out: Path) -> None:
    """Copy the pages, the files they show and link to, and the settings into OUT."""
    shutil.rmtree(out, ignore_errors=True)
    pages = out / "pages"
    for path in sources(PAGES):
        target = pages / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(page_text(path))
        for linked in sorted(files_linked(path)):
            copied = pages / linked.relative_to(ROOT)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(linked, copied)
    for path in sources(NOTEBOOKS):
        (pages / path.relative_to(ROOT).with_suffix(".md")).write_text(notebook_text(path))
    for path in sources(BESIDE):
        copied = pages / path.relative_to(ROOT)
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copied)
    for name in ("site.css", "iframe-worker.js"):
        shutil.copyfile(HERE / name, pages / name)
    shutil.copyfile(HERE / "zensical.toml", out / "zensical.toml")


def sources(patterns: tuple[str, ...]) -> list[Path]:
    return sorted(path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file())


def page_text(path: Path) -> str:
    """Return a page with links to notebooks turned into links to their pages, and formulas set."""
    text = re.sub(r"(\]\([^)\s]+)\.ipynb\)", r"\1.md)", path.read_text())
    return "".join(
        part if number % 2 else set_formulas(part)
        for number, part in enumerate(re.split(CODE, text, flags=re.MULTILINE | re.DOTALL))
    )


def set_formulas(text: str) -> str:
    """Set indices and powers of a letter outside of code: W_Q, k_(t−j), n^1.25."""

    def set_one(match: re.Match[str]) -> str:
        tag = "sub" if match["sign"] == "_" else "sup"
        return f"{match['letter']}<{tag}>{match['inside'] or match['bare']}</{tag}>"

    return FORMULA.sub(set_one, text)


def files_linked(path: Path) -> Iterator[Path]:
    """Yield the files of the repository, other than pages, that a page links to."""
    for target in re.findall(r"\]\(([^)\s#]+)\)", path.read_text()):
        linked = (path.parent / target).resolve()
        away = re.match(r"https?:|mailto:", target)
        if not away and linked.suffix not in (".md", ".ipynb") and linked.is_file():
            yield linked


def notebook_text(path: Path) -> str:
    """Return a notebook as a page: its texts, its code, and what the code printed and drew."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            if "text" in output:
                parts.append(f"```\n{''.join(output['text']).rstrip()}\n```")
            elif picture := output.get("data", {}).get("image/png"):
                picture = base64.b64encode(base64.b64decode("".join(picture))).decode()
                parts.append(
                    f'<img alt="drawn by the code above" src="data:image/png;base64,{picture}">'
                )
    return "\n\n".join(parts) + "\n"


class _Page(HTMLParser):
    """Ids of an HTML page, and the addresses that it links to or shows."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.ids.add(value)
            elif name in ("href", "src") and value:
                self.links.add(value)


def dead_links(html: Path) -> Iterator[tuple[Path, str]]:
    """Yield (page, address) of every link and picture without a target file or anchor."""
    pages = {
        path.resolve(): _Page(path) for path in html.rglob("*.html") if path.name != "404.html"
    }
    for path, page in sorted(pages.items()):
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            exists = target.is_file() or (target / "index.html").is_file()
            anchor = unquote(parts.fragment)
            if not exists or (anchor and target in pages and anchor not in pages[target].ids):
                yield path, link


if __name__ == "__main__":
    sys.exit(main())
