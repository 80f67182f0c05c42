"""The table of metrics: what follows from it, and that no tag is written anywhere else."""

from __future__ import annotations

import re

import pytest

from pretrain.runs import tags
from pretrain.runs.tags import METRICS, Page, When, metric_of
from pretrain.telemetry.event_file import chart_layout
from tests.parsed_files import texts
from tests.pretrain.telemetry.records import tags_of
from tests.ranks import ROOT

PUBLIC = [
    "loss/train",
    "loss/",
    "loss/valid",
    "perplexity/valid",
    "perplexity/valid/",
    "optim/lr",
    "optim/grad_norm",
    "stability/loss_variance",
    "stability/skipped_steps",
    "attention/entropy/",
    "attention/score_scale/",
    "attention/largest_score/",
    "weights/norm/",
    "weights/update/",
    "weights/spectral_norm/",
    "throughput/tokens_per_second",
    "throughput/tokens_per_second_per_gpu",
    "throughput/model_tflops_per_gpu",
    "throughput/mfu",
    "throughput/hfu",
    "time/step",
    "time/data",
    "time/forward_backward",
    "time/optimizer",
    "time/checkpoint_stall",
    "time/checkpoint_write",
    "time/checkpoint",
    "memory/trainable_parameters",
    "memory/frozen_parameters",
    "memory/gradients",
    "memory/optimizer_state",
    "memory/allocated_peak",
    "memory/host_rss",
]
"""Users' notebooks read these: a tag may be added, but not renamed."""


def test_the_tags_are_those_that_users_know() -> None:
    assert [metric.tag for metric in METRICS] == PUBLIC
    assert all(metric.tag.endswith("/") == bool(metric.member) for metric in METRICS)


def test_what_is_measured_is_time_speed_and_memory_in_use() -> None:
    measured = {metric.tag for metric in METRICS if metric.measured}
    families = ("time/", "throughput/", "memory/host_rss", "memory/allocated_peak")
    assert measured == {tag for tag in PUBLIC if tag.startswith(families)}


def test_a_tag_belongs_to_the_metric_itself_before_any_family() -> None:
    assert metric_of("loss/train") is tags.LOSS
    assert metric_of("loss/orthogonal_penalty") is tags.AUXILIARY_LOSS
    assert metric_of("perplexity/valid") is tags.PERPLEXITY
    assert metric_of("perplexity/valid/a/b") is tags.PERPLEXITY_OF_SOURCE
    with pytest.raises(KeyError, match="no metric 'time/coffee' is declared"):
        metric_of("time/coffee")
    record = {
        "step": 1,
        "perplexity/valid": 9.0,
        "perplexity/valid/prose": 8.0,
        "perplexity/valid/x/y": 7.0,
    }
    assert tags.PERPLEXITY_OF_SOURCE.members(record) == {"prose": 8.0, "x/y": 7.0}
    assert "loss/" not in tags_of(*When)


def test_tensorboards_charts_show_every_metric_that_has_one_exactly_once() -> None:
    """TensorBoard matches a chart's expressions from the start of a tag."""
    layout = chart_layout()
    assert list(layout) == [page.value for page in Page]
    expressions = [
        text for charts in layout.values() for chart in charts.values() for text in chart
    ]
    for metric in METRICS:
        tag = metric.charted + ("prose" if metric.member else "")
        shown = [text for text in expressions if re.match(text, tag)]
        assert len(shown) == (0 if metric.chart is None else 1), tag
    assert list(layout["quality"])[:2] == ["training loss", "validation loss"]
    assert layout["throughput"]["utilisation: mfu and hfu"] == [
        "throughput/mfu$",
        "throughput/hfu$",
    ]


def markdown_table() -> list[str]:
    """Return the lines of the table in docs/metrics.md."""
    rows = [("tag", "unit", "what it is", "in a record")]
    rows += [("---",) * 4]
    rows += [
        (
            f"`{metric.tag}{f'<{metric.member}>' if metric.member else ''}`",
            metric.unit,
            metric.meaning,
            metric.when.value,
        )
        for metric in METRICS
    ]
    return [f"| {' | '.join(row)} |" for row in rows]


def test_the_documented_table_is_that_of_the_program() -> None:
    table = "\n".join(markdown_table())
    assert table in (ROOT / "docs/metrics.md").read_text(), (
        f"docs/metrics.md needs this table:\n{table}"
    )


def test_no_tag_is_written_anywhere_else_in_the_program() -> None:
    like_a_tag = re.compile(
        rf"({'|'.join(sorted({tag.partition('/')[0] for tag in PUBLIC}))})/[\w/]*"
    )
    table = ROOT / "pretrain/runs/tags.py"
    for path in [*(ROOT / "pretrain").rglob("*.py"), *(ROOT / "laboratory").rglob("*.py")]:
        written = {text for text in texts(path) if like_a_tag.fullmatch(text)}
        expected = set(PUBLIC) if path == table else set()
        assert written == expected, f"{path.relative_to(ROOT)} writes {written ^ expected}"
