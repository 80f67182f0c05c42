"""What all reports share: numbers and settings as text, tables, strict JSON, the error lines of a
log."""

from __future__ import annotations

import io
import json
import math
import re
import resource
from importlib.resources import files
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from data_pipeline.io.files import strict_json
from laboratory.reporting.plots import COLOURS, in_lines, legend_below, write_figures
from pretrain.reporting.log_errors import error_lines
from pretrain.reporting.tables import Table, markdown, rich_table
from pretrain.reporting.text import Spread, byte_count, mean_sd, setting_text, spread, spread_of_all


def test_mean_and_deviation_of_the_sample() -> None:
    """1, 2, 6: mean 3, squares 4 + 1 + 9 over n - 1 = 2."""
    sample_spread = spread([1.0, 2.0, 6.0])
    assert sample_spread is not None and (sample_spread.n, sample_spread.mean) == (3, 3.0)
    assert sample_spread.sd == pytest.approx(math.sqrt(7))
    assert spread([5.0]) == Spread(1, 5.0, None) and spread([]) is None
    assert spread_of_all([5.0]) == spread([5.0])
    assert spread_of_all([5.0, None]) is None


@pytest.mark.parametrize(
    ("values", "digits", "text"),
    [
        ([1.0, 3.0], 1, "2.0 ± 1.4"),
        ([1234.5], 0, "1,234"),
        ([-0.001], 1, "0.0"),
        ([], 1, "–"),
    ],
)
def test_mean_and_deviation_as_text(values: list[float], digits: int, text: str) -> None:
    assert mean_sd(spread(values), digits) == text
    assert mean_sd(None, digits, missing="not finite") == "not finite"
    assert mean_sd(Spread(2, 1.0, 0.5), 1, "\n") == "1.0\n± 0.5"


@pytest.mark.parametrize(
    ("value", "label", "sentence"),
    [
        (None, "none", "none"),
        ([], "none", "none"),
        (["low_rank", "channel_scale"], "low_rank+channel_scale", "low_rank+channel_scale"),
        ([0.9, 0.98], "0.9+0.98", "0.9, 0.98"),
        ({"0-3": 1.0, "4-7": 0.5}, "{0-3: 1.0, 4-7: 0.5}", "{0-3: 1.0, 4-7: 0.5}"),
        ([{"at": 0.5}], "[{at: 0.5}]", "[{at: 0.5}]"),
        (True, "True", "True"),
        (3e-4, "0.0003", "0.0003"),
    ],
)
def test_settings_as_text(value: object, label: str, sentence: str) -> None:
    assert (setting_text(value), setting_text(value, ", ")) == (label, sentence)


def test_bytes_in_the_unit_that_suits_them() -> None:
    assert [byte_count(count) for count in (None, 1023, 1024, 3 << 30, 5 << 50)] == [
        "–",
        "1023 B",
        "1.00 KiB",
        "3.00 GiB",
        "5120.00 TiB",
    ]


def test_one_table_in_markdown_and_on_the_terminal() -> None:
    """A cell is shown as it is: no markup on the terminal, no column broken by its `|` in
    Markdown."""
    table = Table(("name", "n"), [("a|b\nc [red]", "1"), ("d", "20")])
    assert markdown(table) == [
        "| name | n |",
        "| --- | ---: |",
        "| a\\|b c [red] | 1 |",
        "| d | 20 |",
    ]
    output = io.StringIO()
    Console(file=output, width=40).print(rich_table(table, between_rows=True))
    shown = output.getvalue()
    assert "c [red]" in shown and shown.count("┼") == 1
    output = io.StringIO()
    Console(file=output, width=40).print(rich_table(table, bare=True))
    last = output.getvalue().splitlines()[-1]
    assert last.split() == ["d", "20"] and last.rstrip().index("20") > last.index("d") + 5


def test_json_has_null_for_what_json_does_not_know() -> None:
    content = strict_json(
        {"a": [1.5, math.nan], "b": (math.inf, "nan"), "c": {"d": -math.inf, "e": 2}}
    )
    assert json.loads(json.dumps(content, allow_nan=False)) == {
        "a": [1.5, None],
        "b": [None, "nan"],
        "c": {"d": None, "e": 2},
    }


def test_the_lines_of_a_log_that_say_what_went_wrong() -> None:
    errors = [
        "error: the training loss is nan at step 3",
        "ValueError: no",
        "torch.distributed.DistBackendError: NCCL error",
        "KeyboardInterrupt",
        "urllib3.exceptions.HTTPError:",  # its message begins on the next line
    ]
    others = [
        "Traceback (most recent call last):",
        "  ValueError: indented",
        "an error: inside",
        "Errors: 0",
    ]
    assert error_lines([*others, *errors]) == errors


def test_a_figure_gives_the_same_bytes_and_one_with_nothing_to_show_goes(tmp_path: Path) -> None:
    def figure() -> Figure:
        drawing = Figure()
        drawing.add_subplot().plot([1, 2, 4])
        return drawing

    drawn = write_figures({"a": figure, "b": figure}, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"a.png", "a.svg", "b.png", "b.svg"}
    for ending in ("png", "svg"):
        assert (tmp_path / f"a.{ending}").read_bytes() == (tmp_path / f"b.{ending}").read_bytes()
    assert drawn["a"] == (tmp_path / "a.svg").read_text() and drawn["a"].startswith("<?xml")
    drawn = write_figures({"a": figure, "b": lambda: None}, tmp_path)
    assert drawn.keys() == {"a", "a-narrow"}
    assert {path.name for path in tmp_path.iterdir()} == {"a.png", "a.svg"}


def test_a_figure_that_finds_no_room_leaves_the_older_one(tmp_path: Path) -> None:
    """A limit of the size of files stands for a full disk: either way a write is cut short."""
    write_figures({"a": Figure}, tmp_path)
    older = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_figures({"a": lambda: Figure((1, 1))}, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == older


def test_text_of_a_drawing_is_text_and_its_places_have_tenths_of_a_point(tmp_path: Path) -> None:
    drawing = Figure()
    drawing.add_subplot().plot([1, 2, 4], label="a < b & 0.12345")
    drawing.legend()
    svg = write_figures({"a": lambda: drawing}, tmp_path)["a"]
    assert ">a &lt; b &amp; 0.12345</text>" in svg and "<dc:date>" not in svg
    assert re.search(r'd="M \d+(\.\d)? ', svg) and not re.search(r' [dxy]="[^"]*\.\d\d', svg)


def luminance(colour: str) -> float:
    """Relative luminance of #rrggbb or #rgb, by WCAG 2."""
    whole = colour if len(colour) == 7 else "#" + "".join(2 * digit for digit in colour[1:])
    parts = [int(whole[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(colour: str, other: str) -> float:
    low, high = sorted((luminance(colour), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_dark_pages_have_a_colour_of_their_own_for_every_colour_of_the_plots() -> None:
    """A line is seen at 3 : 1 against the paper, text is read at 4.5 : 1, light and dark (WCAG
    2)."""
    style = files("laboratory.reporting").joinpath("page.css").read_text()
    light, dark = (
        dict(re.findall(r"--([\w-]+): (#\w+)", part)) for part in style.split("@media screen")[:2]
    )
    dark = light | dark
    paper = dark["paper"]
    assert all(contrast(dark[f"c-{colour[1:].lower()}"], paper) >= 3 for colour in COLOURS)
    assert len({dark[f"c-{colour[1:].lower()}"] for colour in COLOURS}) == len(COLOURS)
    assert dark["c-ffffff"] == paper
    for name in ("ink", "faint", "link"):
        assert min(contrast(light[name], light["paper"]), contrast(dark[name], paper)) >= 4.5


def test_a_label_is_broken_at_spaces_and_before_an_adapter_never_in_a_word() -> None:
    label = "monarch+short_convolution+query_key_bias+channel_scale learning_rate=0.003"
    lines = [
        "monarch+short_convolution",
        "+query_key_bias",
        "+channel_scale",
        "learning_rate=0.003",
    ]
    assert in_lines(label) == "\n".join(lines)
    assert in_lines(label, 80) == label and in_lines("short_convolution", 5) == "short_convolution"


def test_a_legend_has_each_name_once_and_as_many_columns_as_fit() -> None:
    figure = Figure(figsize=(8, 3))
    plots = figure.subplots(1, 2)
    for plot in plots:
        for name in ("vanilla", "orthogonal", "a name of thirty letters or so"):
            plot.plot([0, 1], label=name)
    legend_below(figure, *plots)
    legend_below(figure, plots[0], rows=3)
    first, second = figure.legends
    assert [text.get_text() for text in first.get_texts()] == list(
        dict.fromkeys(line.get_label() for line in plots[0].lines)
    )
    assert (first._ncols, second._ncols) == (2, 1)
