"""report.html of a comparison, read back as a browser's parser does: one file, the numbers of the
JSON."""

from __future__ import annotations

import io
import itertools
import json
import math
import random
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console

from laboratory.compare.compare_runs import compare_runs
from laboratory.compare.comparison import Comparison
from laboratory.compare.figures import figures, loss_figure
from laboratory.compare.report import (
    ModelText,
    comparison_document,
    print_comparison,
    report_page,
    write_comparison,
)
from laboratory.reporting.html import html_list
from laboratory.reporting.plots import COLOURS, DASHES, MARKERS, style_of, write_figures
from laboratory.study.report import page_html, write
from pretrain.reporting.tables import REMARKS, Table
from pretrain.runs import tags
from tests.fabricated_runs import STEPS, write_run
from tests.ranks import ROOT

HOSTILE = "</pre><script>alert('x')</script> & ```` \n\tit’s <b>"
COMMAND = [("python", "-m", "pretrain", "compare", "<run>&")]


class Page(HTMLParser):
    """What the tests ask of a page: attributes, tables as text, preformatted texts, open
    elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str]] = []
        self.tables: list[list[list[str]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(key, value or "") for key, value in attributes]
        if tag not in ("meta", "br", "wbr"):
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif tag == "pre":
            self.texts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        self.handle_endtag(tag)

    def handle_data(self, text: str) -> None:
        if "td" in self.open or "th" in self.open:
            self.tables[-1][-1][-1] += text
        elif "pre" in self.open:
            self.texts[-1] += text

    def column(self, table: int, title: str) -> list[str]:
        head, *rows = self.tables[table]
        return [row[head.index(title)] for row in rows]


def curves(index: int, seed: int) -> dict[str, list[float]]:
    draw = random.Random(100 * index + seed)
    noise = [draw.gauss(0, 0.05) for _ in range(STEPS)]
    falls = [4 + 4 * math.exp(-step / 25) + 0.02 * index for step in range(STEPS)]
    return {
        tags.LOSS.tag: [loss + deviation for loss, deviation in zip(falls, noise, strict=True)],
        tags.TOKENS_PER_SECOND.tag: [1000 - 20 * index + 100 * deviation for deviation in noise],
    }


def comparison_of(root: Path, variants: int, seeds: int) -> Comparison:
    """Vanilla, orthogonal, and orthogonal with adapters of as many ranks as are wanted."""
    paths = []
    for index, seed in itertools.product(range(variants), range(seeds)):
        low_rank = {"config.attention.adapters": ["low_rank"], "config.attention.low_rank": index}
        run = write_run(
            root,
            f"run-{index}-{seed}",
            "orthogonal" if index else "vanilla",
            seed=seed,
            loss=4 + 0.02 * index + random.Random(seed + 10 * index).gauss(0, 0.01),
            columns=curves(index, seed),
            changes=low_rank if index > 1 else {},
        )
        paths.append(run)
    return compare_runs(paths, "vanilla")


def written(
    comparison: Comparison, out: Path, texts: tuple[ModelText, ...] = ()
) -> tuple[Page, str, Any]:
    """The page, its text, and the JSON, without the figures, which take a second each."""
    write(replace(comparison_document(comparison, COMMAND, texts), figures={}), out)
    text = (out / "report.html").read_text(encoding="utf-8")
    return Page(text), text, json.loads((out / "comparison.json").read_text())


def first_number(text: str) -> float:
    match = re.match(r"[×±]?\s*([-+]?[\d,]+(\.\d+)?)", text)
    assert match, text
    return float(match[1].replace(",", ""))


def test_the_page_has_the_numbers_of_the_json(tmp_path: Path) -> None:
    page, _, content = written(comparison_of(tmp_path / "runs", 3, 5), tmp_path / "out")
    variants, others = content["variants"], content["variants"][1:]
    assert page.column(0, "variant") == [variant["name"] for variant in variants]
    columns = {
        "validation loss": ("validation_loss", 4),
        "perplexity": ("validation_perplexity", 2),
    }
    for title, (key, digits) in columns.items():
        shown = [first_number(cell) for cell in page.column(0, title)]
        assert shown == [round(variant[key]["mean"], digits) for variant in variants]
    gaps = [variant["gap"] for variant in others]
    shown = [first_number(cell) for cell in page.column(1, "gap, nats/token")]
    assert shown == [round(gap["mean"], 4) for gap in gaps]
    tested = [f"{gap['t_p']:.4f}" if gap["t_p"] >= 1e-4 else "< 0.0001" for gap in gaps]
    assert page.column(1, "t-test p") == tested
    cost = next(table for table in page.tables if table[1][0] == "trainable parameters")
    shown = [first_number(cell) for cell in cost[1][1:]]
    assert shown == [variant["cost"]["trainable_parameters"] for variant in variants]
    runs = [run for variant in variants for run in variant["runs"]]
    assert len(runs) == 15 and page.column(-1, "run") == [run["path"] for run in runs]
    shown = [first_number(cell) for cell in page.column(-1, "validation loss")]
    assert shown == [round(run["validation_loss"], 4) for run in runs]


def test_markdown_and_page_have_the_same_tables(tmp_path: Path) -> None:
    comparison = comparison_of(tmp_path / "runs", 2, 5)
    blocks = report_page(comparison, COMMAND)
    tables = [
        [list(row) for row in (table.header, *table.rows)]
        for table in blocks
        if isinstance(table, Table)
    ]
    (claims,) = (table for table in tables if table[0][-1] == REMARKS)
    sentence = claims[1].pop()
    claims[0].pop()
    page = page_html(blocks, {})
    assert len(tables) > 6 and Page(page).tables == tables
    assert f"</table></div><ul><li>orthogonal: {sentence}.</li></ul>" in page


@pytest.mark.distributed
def test_the_page_is_one_file_that_asks_nobody_and_stays_small(tmp_path: Path) -> None:
    """Of eleven variants with five seeds; of few the page has some 100 kB."""
    write_comparison(comparison_of(tmp_path / "runs", 11, 5), tmp_path / "out", COMMAND)
    page = Page(text := (tmp_path / "out/report.html").read_text(encoding="utf-8"))
    assert len(text.encode()) <= 500_000
    assert page.open == [] and page.tags["svg"] == 4 and page.tags["table"] == len(page.tables) >= 7
    for key, value in page.attributes:
        assert key not in ("src", "srcset", "action", "data"), (key, value)
        assert key not in ("href", "xlink:href") or value.startswith("#"), (key, value)
    assert not re.search(r"url\((?!#)|@import", text)
    ids = [value for key, value in page.attributes if key == "id"]
    assert len(ids) == len(set(ids)) > 40
    used = {value[1:] for key, value in page.attributes if key == "href"}
    assert used | set(re.findall(r"url\(#([^)]+)\)", text)) <= set(ids)
    names = {value for key, value in page.attributes if key == "aria-label"}
    assert names == {"gap", "loss"}
    assert "prefers-color-scheme: dark" in text and "@media print" in text
    with Image.open(tmp_path / "out/loss.png") as two_parts:  # there are eight colours
        assert two_parts.height > 1.5 * two_parts.width


def test_texts_of_models_are_shown_as_they_are_and_absent_if_none_was_asked_for(
    tmp_path: Path,
) -> None:
    comparison = comparison_of(tmp_path / "runs", 2, 1)
    page, text, content = written(comparison, tmp_path / "none")
    assert "Text of the models" not in text and "texts" not in content and len(page.texts) == 1
    texts = tuple(
        ModelText(variant, 0, prompt, f"{variant}{HOSTILE}")
        for prompt in ("<i>Once\nupon", "And")
        for variant in ("vanilla", "orthogonal")
    )
    page, text, content = written(comparison, tmp_path / "some", texts)
    assert page.open == [] and page.tags["script"] == 1
    wanted = [model_text.text for model_text in texts]
    assert [entry["text"] for entry in content["texts"]] == page.texts[1:] == wanted
    assert "<h3>After “&lt;i&gt;Once upon”</h3>" in text
    report = (tmp_path / "some/report.md").read_text()
    assert f"vanilla, seed 0:\n\n`````\nvanilla{HOSTILE}\n`````" in report


@pytest.mark.slow
@pytest.mark.distributed
def test_the_spread_over_seeds_is_drawn_whatever_the_number_of_variants(tmp_path: Path) -> None:
    def axis(variants: int, seeds: int) -> str:
        comparison = comparison_of(tmp_path / f"{variants}-{seeds}", variants, seeds)
        return write_figures({"loss": lambda: loss_figure(comparison)}, tmp_path)["loss"]

    assert "(band: all seeds)" in axis(3, 2) and "(bar at the end: all seeds)" in axis(5, 2)
    assert "all seeds)" not in axis(3, 1)


def test_the_baseline_is_the_black_one_and_its_name_is_whole_whatever_the_subject(
    tmp_path: Path,
) -> None:
    """It is a run of the second of two rates here, and would not be the first by its place."""
    adapters = {"config.attention.adapters": ["query_key_bias", "channel_scale", "low_rank"]}
    paths = []
    for variant, rate in (("orthogonal", 1e-3), ("vanilla", 2e-3)):
        changes = {**adapters, "config.optimizer.learning_rate": rate}
        for seed in (1, 2):
            name = f"{variant}-{seed}"
            paths.append(write_run(tmp_path, name, variant, seed=seed, changes=changes))
    baseline = "vanilla+query_key_bias+channel_scale+low_rank learning_rate=0.002"
    comparison = compare_runs(paths, baseline, ["optimizer.learning_rate"])
    assert [label.partition("+")[0] for label in comparison.labels] == ["vanilla", "orthogonal"]
    drawn = figures(comparison)
    loss = drawn["loss"]()
    assert loss is not None
    (legend,) = (legend for part in loss.subfigs for legend in part.legends)
    lines = zip(legend.get_texts(), legend.legend_handles, strict=True)
    colours = {text.get_text().partition("+")[0]: line.get_color() for text, line in lines}
    assert colours == {"vanilla": COLOURS[0], "orthogonal": COLOURS[1]}
    gap = drawn["gap"]()
    assert gap is not None
    assert max(map(len, gap.axes[0].get_xlabel().split("\n"))) <= 95 < len(gap.axes[0].get_xlabel())


def test_words_of_a_strangers_files_are_shown_and_never_obeyed(tmp_path: Path) -> None:
    words = "$x^$\x1b[2J[/b]\u202e"
    changes = {
        "config.attention.variant": words,
        "config.run.name": f"{words}\n# h",
        "environment.git_commit": words,
        "environment.packages": {"torch": words},
        "data.validation_tokens": {words: 6000},
    }
    paths = [
        write_run(tmp_path, f"{name}-{seed}", seed=seed, sources={words: 70.0}, changes=run_changes)
        for name, run_changes in (
            ("ours", {"data.validation_tokens": {words: 6000}}),
            ("theirs", changes),
        )
        for seed in (1, 2)
    ]
    comparison = compare_runs(paths, "vanilla")
    write_comparison(comparison, tmp_path / "out", COMMAND)
    console = Console(file=io.StringIO(), width=100)
    print_comparison(comparison, console)
    texts = {path.name: path.read_text() for path in (tmp_path / "out").glob("*.[mhs]*")}
    texts["terminal"] = console.file.getvalue()  # type: ignore[attr-defined]
    assert {"report.md", "report.html", "loss.svg", "gap.svg"} <= texts.keys()
    for name, text in texts.items():
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", text), name
        assert "$x^$" in text and "\\x1b[2J" in text, name
    assert "\n# h" not in texts["report.md"]


def test_a_phone_has_narrow_drawings_and_names_break_where_their_parts_end(tmp_path: Path) -> None:
    """A word that is broken anywhere reads "orthogo nal", and a scaled drawing not at all."""
    drawn = write_figures(figures(comparison_of(tmp_path / "runs", 2, 1)), tmp_path)
    wide, narrow = (
        float(re.findall(r'width="([\d.]+)pt', drawn[n])[0]) for n in ("gap", "gap-narrow")
    )
    assert narrow < 0.6 * wide and not (tmp_path / "gap-narrow.svg").exists()
    assert not any("95 % interval" in drawing for drawing in drawn.values())  # of one pair: none
    words = html_list(["short_convolution+low_rank, a_name_of_many_letters, 4,472 <a/b>"])
    broken = ["short_convolution+", "a_", "name_", "of_", "many_", "a/"]
    assert re.findall(r"[\w+/]+(?=<wbr>)", words) == broken
    style = (ROOT / "laboratory/reporting/page.css").read_text()
    assert "anywhere" not in style


def test_an_older_plot_that_has_nothing_to_show_is_removed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for name in ("gap", "loss"):
        (out / f"{name}.png").write_bytes(b"old")
    write_comparison(comparison_of(tmp_path, 1, 1), out, COMMAND)
    assert {path.stem for path in out.glob("*.png")} == {"loss"}
    assert (out / "loss.png").read_bytes() != b"old"
    assert "![gap]" not in (out / "report.md").read_text()


def test_lines_differ_in_print_too() -> None:
    """No two of 31 variants share dashes and marker, and the first eight all differ in either."""
    looks = {(str(style_of(i, DASHES)), style_of(i, MARKERS)) for i in range(31)}
    assert len(looks) == 31
    assert len(set(map(str, DASHES))) == 8 and len(set(COLOURS)) == 8 and len(set(MARKERS)) == 11
    assert [style_of(i, COLOURS) == COLOURS[0] for i in range(20)] == [True] + [False] * 19
