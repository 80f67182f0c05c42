"""laboratory.results: the published numbers and figures again, from what is committed."""

from __future__ import annotations

import csv
import re
import shutil
from pathlib import Path

import pytest

from laboratory.results import figures
from tests.ranks import ROOT


@pytest.mark.parametrize("page", ["headline", "a3_heads"])
def test_the_published_numbers_come_from_the_committed_runs(page: str, tmp_path: Path) -> None:
    """Gaps, intervals and tests at equal FLOPs, and the line through the gaps over a subject."""
    folder = shutil.copytree(ROOT / "docs/results" / page, tmp_path / page)
    assert figures.deviations(folder) == []
    runs = folder / "runs.csv"
    loss = next(iter(csv.DictReader(runs.open())))["validation_loss"]
    runs.write_text(runs.read_text().replace(loss, str(float(loss) + 0.01)))
    sentences = figures.deviations(folder)
    assert any("variants.csv: gap.mean of " in line for line in sentences)
    assert any("report.md: lacks | " in line for line in sentences)


@pytest.mark.parametrize("name", ["equal_flops/demo", "length", "modern/scores"])
def test_the_committed_figures_can_be_drawn_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    committed = ROOT / "docs/results" / name
    figures.draw(committed, tmp_path / "again")
    drawn = sorted((tmp_path / "again").iterdir())
    # The line over a subject's values is drawn in tag v0.5-lab only; its numbers are in the table.
    published = {path.name for path in committed.glob("*.svg")} - {"trend.svg"}
    assert {path.name for path in drawn} == published
    for path in drawn:
        words, published_words = (
            re.findall(r">([^<>\n]+)</text>", svg.read_text())
            for svg in (path, committed / path.name)
        )
        assert words == published_words and len(words) > 10


def test_a_page_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        figures.main(["a1"])
    assert ended.value.code == 2 and "there is no page 'a1'" in capsys.readouterr().err


def test_a_page_shows_no_figure_that_is_not_committed() -> None:
    for text in (ROOT / "docs/results").rglob("*.md"):
        for shown in re.findall(r"!\[[^]]+\]\(([^)]+)\)", text.read_text()):
            assert shown.endswith(".svg") and (text.parent / shown).is_file(), f"{text}: {shown}"
