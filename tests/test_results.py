"""benchmarks.results: its table against grids and `compare`; what it makes and leaves out."""

from __future__ import annotations

import csv
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from benchmarks.results import figures
from benchmarks.results.__main__ import main, reports, sweeps
from benchmarks.results.page import Page, PlacedRun, runs_of
from benchmarks.results.pages import PAGES
from pretrain.study.sealed import arm_of
from pretrain.study.seeds import group_runs, settings_of
from pretrain.sweep.plan import PlannedRun
from tests.fabricated_runs import write_run
from tests.ranks import ROOT, rank_environment
from tests.shipped_grids import planned_runs, shipped_grid, shipped_grids

NAMED = {page.name: page for page in PAGES}
ABLATIONS = Path("demo/sweeps/ablations")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Grids name their runs from the working directory; the program has own signal handlers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@cache
def planned(grid: str) -> dict[Path, PlannedRun]:
    return {run.path: run for run in planned_runs(grid)}


@dataclass(frozen=True)
class Trained:
    """A run as `compare` would find it."""

    path: Path
    name: str
    variant: str
    seed: int
    config: Mapping[str, Any]


def as_trained(run: PlacedRun) -> Trained:
    config = planned(run.grid)[run.path].config
    return Trained(
        path=run.path,
        name=run.path.name,
        variant=config.attention.variant,
        seed=config.run.seed,
        config=config.as_dict(),
    )


def value_of(run: Trained, subject: str) -> Any:
    settings = settings_of(run)
    if subject == "tokens":
        if settings["schedule.flops"]:  # compare asks for the same of these, with --match flops
            return settings["schedule.flops"]
        keys = ("schedule.steps", "data.global_batch_size", "data.sequence_length")
        return settings[keys[0]] * settings[keys[1]] * settings[keys[2]]
    heads, width = settings["model.num_attention_heads"], settings["model.hidden_size"]
    return settings.get(subject) or {"model.head_dim": width // heads}[subject]


# The table


def test_every_shipped_grid_is_in_a_page_and_every_report_in_a_folder_of_its_own() -> None:
    assert {selection.grid for page in PAGES for selection in page.runs} == set(shipped_grids())
    folders = [step.out for page in PAGES for step in reports(page, Path("out"))]
    assert len(set(folders)) == len(folders)


@pytest.mark.distributed  # no processes, but all grids are planned
@pytest.mark.parametrize("page", PAGES, ids=NAMED)
def test_every_cell_that_is_named_is_in_its_grid_with_the_seeds_of_the_page(page: Page) -> None:
    runs = runs_of(page)
    for selection in page.runs:
        seeds = len(page.seeds or shipped_grid(selection.grid).content.seeds or [])
        own = [run for run in runs if run.grid == selection.grid]
        counted = {cell: len(list(group)) for cell, group in groupby(own, lambda run: run.cell)}
        assert set(selection.cells) <= set(counted) and set(counted.values()) == {seeds}
        assert all(run.path in planned(run.grid) for run in own)
    assert len({run.path for run in runs}) == len(runs)
    for report in page.reports:
        assert set(report.cells) <= {run.cell for run in runs}


@pytest.mark.distributed  # of the same plans
@pytest.mark.parametrize("page", PAGES, ids=NAMED)
def test_compare_finds_the_baseline_of_every_report(page: Page) -> None:
    placed = {run.path: run for run in runs_of(page)}
    for step in reports(page, Path("out")):
        runs = [as_trained(placed[path]) for path in step.runs]
        if step.arguments[0] != "compare":
            assert runs or page.name == "approximation"
            continue
        words = list(step.arguments)
        subjects = [words[i + 1] for i, word in enumerate(words) if word == "--subject"]
        values = {subject: [value_of(run, subject) for run in runs] for subject in subjects}
        assert all(len(set(map(str, found))) > 1 for found in values.values())
        names = [arm_of(run.name) for run in runs] if "--by" in words else None
        groups = group_runs(runs, words[words.index("--baseline") + 1], values, labels=names)
        assert len(groups.groups) > 1
        shapes = {
            (
                *(run.config["model"][key] for key in ("num_layers", "num_attention_heads")),
                value_of(run, "tokens"),
            )
            for run in runs
        }
        assert subjects or len(shapes) == 1
        seeds = {tuple(run.seed for run in group.runs) for group in groups.groups}
        assert len(seeds) == 1


def test_a_page_of_some_seeds_waits_for_no_others() -> None:
    runs = runs_of(NAMED["modern/long"])
    assert {run.path.name.rpartition("-seed_")[2] for run in runs} == {"21", "22", "23", "24", "25"}
    assert {run.cell for run in runs if run.grid == "documentation_modern_long"} == {
        f"{variant}_conv4-t{steps}"
        for variant in ("vanilla", "monarch_shared")
        for steps in (8000, 16000)
    }


def test_a_whole_grid_needs_no_names_and_a_part_of_one_names_its_runs() -> None:
    assert [step.arguments for step in sweeps(NAMED["a1_init"], jobs=3)] == [
        ("sweep", "a1_init", "--jobs", "3")
    ]
    (length,) = sweeps(NAMED["length"], jobs=2)
    assert length.arguments[4:6] == ("--only", "vanilla_length_256-seed_1")
    assert len(length.arguments) == 24


# What is committed


@pytest.mark.parametrize("page", ["headline", "a3_heads"])
def test_the_published_numbers_come_from_the_committed_runs(page: str, tmp_path: Path) -> None:
    """Gaps, intervals and tests at equal FLOPs, and the line through the gaps over a subject."""
    (report,) = NAMED[page].reports
    place = shutil.copytree(ROOT / "docs/results" / page, tmp_path / page)
    assert figures.deviations(place, report) == []
    runs = place / "runs.csv"
    loss = next(iter(csv.DictReader(runs.open())))["validation_loss"]
    runs.write_text(runs.read_text().replace(loss, str(float(loss) + 0.01)))
    found = figures.deviations(place, report)
    assert any("variants.csv: gap.mean of " in line for line in found)
    assert any("report.md: lacks | " in line for line in found)


def test_the_committed_figures_can_be_drawn_again(tmp_path: Path) -> None:
    name = "equal_flops/demo"
    report, committed = NAMED[name].reports[0], ROOT / "docs/results" / name
    figures.draw(committed, report, tmp_path / "again")
    drawn = sorted((tmp_path / "again").iterdir())
    assert [path.name for path in drawn] == sorted(path.name for path in committed.glob("*.svg"))
    for path in drawn:
        own, other = (
            re.findall(r">([^<>\n]+)</text>", one.read_text())
            for one in (path, committed / path.name)
        )
        assert own == other and len(own) > 10


def test_a_page_shows_no_figure_that_is_not_committed() -> None:
    for text in (ROOT / "docs/results").rglob("*.md"):
        for shown in re.findall(r"!\[[^]]+\]\(([^)]+)\)", text.read_text()):
            assert shown.endswith(".svg") and (text.parent / shown).is_file(), f"{text}: {shown}"


# What it makes


def fabricate(*names: str) -> None:
    for name in names:
        variant, _, seed = name.rpartition("-seed_")
        write_run(ABLATIONS, name, variant, seed=int(seed), loss=4.0 + int(seed) / 100)


@pytest.mark.distributed
def test_without_training_it_makes_what_is_finished_and_says_what_the_rest_waits_for(
    capfd: pytest.CaptureFixture[str],
) -> None:
    variants = ("vanilla", "orthogonal", "gaussian", "gaussian_naive")
    fabricate(*(f"{variant}-seed_{seed}" for variant in variants for seed in (1, 2, 3, 4, 5)))
    (ABLATIONS / "gaussian-seed_9").mkdir()
    assert (
        main(["a1_init", "a7_construction", "approximation", "--no-training", "--out", "out"]) == 0
    )
    said = capfd.readouterr().out
    assert "page a7_construction is left out: 15 of its 25 runs are not finished: " in said
    first = ", ".join(f"{ABLATIONS}/cayley-seed_{seed}" for seed in (1, 2, 3))
    assert f"{first} and 12 more" in said
    assert "page approximation is left out" in said
    assert "page a1_init: out/a1_init/report.md" in said and "1 pages in out after 0:" in said
    assert [path.name for path in Path("out").iterdir()] == ["a1_init"]
    report = Path("out/a1_init/report.md").read_text()
    assert "Each of 20 runs" in report and "seed_9" not in report
    assert sorted(path.name for path in Path("out/a1_init").iterdir() if path.is_file()) == [
        "curves.csv",
        "gap.svg",
        "loss.svg",
        "report.html",
        "report.md",
        "runs.csv",
        "variants.csv",
    ]
    assert re.findall(r"\]\((\w+\.\w+)\)", report) == ["gap.svg", "loss.svg"]
    (own,) = NAMED["a1_init"].reports
    assert figures.deviations(Path("out/a1_init"), own) == []

    (ABLATIONS / "gaussian_naive-seed_5" / "state").write_text("running\n")
    assert main(["a1_init", "--no-training", "--out", "other"]) == 1
    said = capfd.readouterr().out
    assert "1 of its 20 runs are not finished: demo/sweeps/ablations/gaussian_naive-seed_5" in said
    assert not Path("other").exists()


def test_the_list_counts_what_is_finished_and_names_the_folders(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fabricate("vanilla-seed_1", "orthogonal-seed_1")
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(NAMED)
    assert lines[1].split() == [
        "a1_init",
        "2",
        "of",
        "20",
        "runs",
        "finished",
        "docs/results/a1_init",
    ]
    assert lines[-1].split()[-1] == "docs/results/learned"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a1"], "there is no page 'a1'; there are structured, a1_init, "),
        (["--jobs", "0"], "--jobs is 0"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.distributed
def test_a_sweep_that_fails_ends_it_with_its_exit_code_and_the_page(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """There is no text to train on here."""
    assert main(["a1_init", "a2_trainability", "--out", "out"]) == 2
    lines = capfd.readouterr().err.splitlines()
    assert lines[0].startswith("error: grid a1_init.yaml, run vanilla-seed_1: ")
    assert lines[1:] == ["error: page a1_init: 'sweep a1_init' ended with 2"]
    assert not Path("out").exists()


@pytest.mark.distributed
@pytest.mark.parametrize(("number", "to_group"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_a_signal_ends_it_in_one_sentence_and_leaves_no_process(
    number: signal.Signals, to_group: bool, tmp_path: Path
) -> None:
    """Ctrl-C comes to the whole group, another signal to one process."""
    command = [sys.executable, "-m", "benchmarks.results", "approximation"]
    with subprocess.Popen(
        command, env=rank_environment(), stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("1/")  # its first model is trained
        (os.killpg if to_group else os.kill)(process.pid, number)
        _, errors = process.communicate(timeout=60)  # which ends when nobody holds the pipe
    assert process.returncode == 128 + number
    assert (
        errors.splitlines()[-1]
        == f"error: {number.name} received; the same command continues from here"
    )
    assert "Traceback" not in errors
