"""Pages of docs/results: their runs, of shipped grids, and the reports of these."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from pretrain.runs.directory import RunDirectory
from pretrain.sweep.grid import expand, read_grid

RATE = "optimizer.learning_rate"


@dataclass(frozen=True)
class Runs:
    """Runs of a shipped grid, all seeds.

    Attributes:
        grid: Name of the grid.
        cells: Those runs whose name is CELL-seed_N with one of these; none: all.
    """

    grid: str
    cells: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """`python -m pretrain VERB` on runs of a page.

    Attributes:
        verb: The verb, in one or two words.
        baseline: What `--baseline` is, a label or the name of a run.
        out: Folder in the page's folder; "" for that one itself.
        cells: Those of the page's runs; none: all.
        subject: What `--subject` is.
        options: Further options.
        figures: Figures that are kept in docs/results, of those that the verb draws.
    """

    verb: str
    baseline: str = ""
    out: str = ""
    cells: tuple[str, ...] = ()
    subject: str = ""
    options: tuple[str, ...] = ()
    figures: tuple[str, ...] = ()


@dataclass(frozen=True)
class Page:
    """A folder of docs/results.

    A page without runs has reports that train models of their own; one without reports is a search.

    Attributes:
        name: Its name.
        runs: Its runs.
        reports: Its reports.
        seeds: Seeds of its runs; none: all of their grids.
    """

    name: str
    runs: tuple[Runs, ...]
    reports: tuple[Report, ...]
    seeds: tuple[int, ...] = ()


def of_grid(name: str, *reports: Report, grid: str = "") -> Page:
    """Return the page of one grid.

    Args:
        name: Name of the page.
        reports: Its reports.
        grid: Name of the grid, where that is not the page's.
    """
    return Page(name, (Runs(grid or name),), reports)


def compare(baseline: str, out: str = "", cells: str = "", figures: str = "gap") -> Report:
    """Return a report of `compare`; one in a folder of its own shows no figure.

    Args:
        baseline: A label or the name of a run.
        out: Folder in the page's folder.
        cells: Words: the cells that are compared.
        figures: Words: the figures that the page shows.
    """
    shown = () if out else tuple(figures.split())
    return Report("compare", baseline, out, tuple(cells.split()), figures=shown)


def at_flops(baseline: str, out: str = "", cells: str = "", subject: str = "") -> Report:
    """Return a report of `compare --match flops`.

    Args:
        baseline: A label or the name of a run.
        out: Folder in the page's folder.
        cells: Words: the cells that are compared.
        subject: What `--subject` is.
    """
    report = compare(baseline, out, cells)
    return replace(report, subject=subject, options=("--match", "flops"))


def over(subject: str, out: str = "", cells: str = "", figures: str = "trend") -> Report:
    """Return a report of `compare --subject` to `vanilla`.

    Args:
        subject: What `--subject` is.
        out: Folder in the page's folder.
        cells: Words: the cells that are compared.
        figures: Words: the figures that the page shows.
    """
    report = compare("vanilla", out, cells)
    return replace(report, subject=subject, figures=tuple(figures.split()))


def by_names(
    baseline: str,
    out: str = "",
    cells: str = "",
    *,
    figures: str = "trend",
    subject: str = "tokens",
) -> Report:
    """Return a report of `compare --by names`.

    Args:
        baseline: The first part of the baseline's names.
        out: Folder in the page's folder.
        cells: Words: the cells that are compared.
        figures: Words: the figures that the page shows.
        subject: What `--subject` is; "": none, for runs of one length.
    """
    report = compare(baseline, out, cells)
    options = ("--by", "names")
    return replace(report, subject=subject, options=options, figures=tuple(figures.split()))


def evaluated(name: str, *figures: str, runs: tuple[Runs, ...] = (), options: str = "") -> Page:
    """Return the page of a report of `evaluate`.

    Args:
        name: Name of the page and of the experiment.
        figures: Figures that the page shows.
        runs: Runs that are evaluated.
        options: Words: options of the verb.
    """
    report = Report(f"evaluate {name}", options=tuple(options.split()), figures=figures)
    return Page(name, runs, (report,))


@dataclass(frozen=True)
class PlacedRun:
    """A run of a grid, and its directory."""

    grid: str
    cell: str
    path: Path

    @property
    def finished(self) -> bool:
        return RunDirectory(self.path).is_finished()


def runs_of(page: Page) -> list[PlacedRun]:
    """Return the runs of a page, grid by grid, cell by cell and seed by seed."""
    found = []
    for selection in page.runs:
        grid = read_grid(selection.grid)
        names: dict[str, list[str]] = {}
        for run in expand(grid):
            cell, _, seed = run.name.rpartition("-seed_")
            if not page.seeds or int(seed) in page.seeds:
                names.setdefault(cell, []).append(run.name)
        for cell in selection.cells or names:
            for name in names[cell]:
                found.append(PlacedRun(selection.grid, cell, grid.content.directory / name))
    return found
