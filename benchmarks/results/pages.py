"""The pages of docs/results: the runs of each, and its reports."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from pretrain.runs.directory import RunDirectory
from pretrain.sweep.grid import expand, read_grid


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
    """

    name: str
    runs: tuple[Runs, ...]
    reports: tuple[Report, ...]


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


RATE = "optimizer.learning_rate"
LADDER = Report("ladder", "vanilla_conv4", figures=("ladder",))
FROZEN = "orthogonal monarch hadamard gaussian"
STUDIED = "shared_conv4 trained_shared_conv4"
ADAPTED = "shared_conv4 shared_conv4_low_rank_8 monarch_shared_conv4 trained_shared_conv4"
MONARCHS = "trained_monarch_shared_conv4 monarch_shared_conv4"
THIN = "low_rank_8_conv4 shared_conv4_low_rank_8"
THREE_THIN = "low_rank_8_conv4 low_rank_16_conv4 shared_conv4_low_rank_8"
KINDS = ("vanilla", "orthogonal", "gaussian", "low_rank_8", "synthesizer_random", "hybrid")
STUDIES = ("documentation", "documentation_headline", "documentation_rivals", "documentation_thin")
SEARCHED = (*STUDIES, "documentation_widths", "demo_helper", "demo_thin", "wiki")


def at_warmup(steps: int) -> Report:
    """Return the report of two arms at four rates, warmed up over so many steps."""
    cells = [
        f"{arm}-warmup_steps_{steps}-learning_rate_{rate}"
        for arm in ("vanilla", "orthogonal")
        for rate in ("0.0015", "0.003", "0.006", "0.012")
    ]
    return over(RATE, f"warmup_{steps}", " ".join(cells))


def at_width(cell: str) -> Report:
    """Return the report of the two arms at a width and a length."""
    baseline = f"vanilla_conv4-{cell}"
    return at_flops(f"{baseline}-seed_1", cell, f"{baseline} monarch_shared_conv4-{cell}")


def own_rates(name: str, grid: str) -> Page:
    """Return the page of a study in which each arm has its own rate.

    Args:
        name: Name of the page.
        grid: Name of its grid.
    """
    to_conv4 = compare("vanilla_conv4-seed_1", "to_vanilla_conv4", f"vanilla_conv4 {STUDIED}")
    to_trained = compare("trained_shared_conv4-seed_1", "to_trained_shared", STUDIED)
    return of_grid(name, compare("vanilla"), to_conv4, to_trained, grid=grid)


def equal_flops(text: str) -> Page:
    """Return the page of shared rows at equal FLOPs on one text."""
    reports = (at_flops("vanilla_conv4-seed_1"), at_flops("vanilla", "to_vanilla"))
    return of_grid(f"equal_flops/{text}", *reports, grid=f"{text}_equal_flops")


def thin(name: str, grid: str, arms: str, slow: str) -> Page:
    """Return the page of thin rivals on one text.

    Args:
        name: Name of the page.
        grid: Name of its grid.
        arms: Words: the cells of thin queries and keys.
        slow: Words: the baseline at the rate of the others, and what is compared with it.
    """
    reports = (
        at_flops("vanilla_conv4-seed_1", "", f"vanilla_conv4 {arms} {MONARCHS}"),
        at_flops("low_rank_8_conv4-seed_1", "to_low_rank", arms),
        at_flops(f"{slow.split()[0]}-seed_1", "to_slow", slow),
        at_flops("trained_monarch_shared_conv4-seed_1", "to_trained_monarch", MONARCHS),
    )
    return of_grid(name, *reports, grid=grid)


def positions(kind: str) -> Page:
    """Return the page of six kinds of attention with rotary or learned positions."""
    cells = tuple(f"{name}-{kind}" for name in KINDS)
    return Page(kind, (Runs("demo_variants", cells),), (compare("vanilla"),))


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


HEAD_DIMS = "vanilla orthogonal vanilla_head_dim_16 orthogonal_head_dim_16"
STRENGTHS = "orthogonal trainable_half_rate penalty_0.1 unfreeze_full_rate"
CORRECTED = "orthogonal_low_rank_8 monarch_low_rank_8 hadamard_low_rank_8 gaussian_low_rank_8"
EARLY_ARMS = [f"{kind}monarch_shared_conv4" for kind in ("", "trained_", "early_")]
EARLY = " ".join(f"{arm}-t{steps}" for arm in EARLY_ARMS for steps in (500, 1000, 2000, 4000))
DENSE = tuple(f"vanilla_conv4-t{steps}" for steps in (500, 1000, 2000, 4000))
DENSE += ("vanilla-t500", "early_vanilla_conv4-t500", "early_vanilla_conv4-t2000")
SAVING = tuple(
    f"{arm}-t{steps}"
    for arm in ("vanilla_conv4", "multi_query_conv4", *EARLY_ARMS)
    for steps in (500, 2000, 4000)
)
WITHOUT_AND_WITH = [(f"vanilla-t{steps}", f"vanilla_conv4-t{steps}") for steps in (500, 4000)]
BOTH = ("vanilla", "orthogonal")
PAGES = (
    of_grid(
        "structured",
        compare("vanilla"),
        compare("orthogonal", "to_orthogonal", FROZEN),
        compare("orthogonal+low_rank", "to_orthogonal_low_rank", CORRECTED),
        grid="demo_structured",
    ),
    of_grid("a1_init", compare("vanilla")),
    of_grid(
        "a2_trainability",
        compare("vanilla"),
        compare("orthogonal", "to_orthogonal", "orthogonal orthogonal_trainable"),
    ),
    of_grid("a2_strengths", compare("vanilla"), compare("orthogonal", "to_orthogonal", STRENGTHS)),
    of_grid("a3_heads", over("model.num_attention_heads")),
    of_grid(
        "a4_head_dim",
        over("model.head_dim"),
        over("model.head_dim", "16_to_32", HEAD_DIMS, figures=""),
    ),
    of_grid("a5_length", over("data.sequence_length")),
    of_grid("a6_depth", over("model.num_layers")),
    of_grid(
        "a7_construction",
        compare("vanilla"),
        compare("orthogonal-seed_1", "to_orthogonal", "orthogonal cayley hadamard dct"),
    ),
    of_grid("a8_adapters", compare("vanilla")),
    of_grid("a8_ranks", compare("vanilla")),
    of_grid(
        "a9_layers",
        compare("vanilla"),
        compare("last_half-seed_1", "to_last_half", "last_half first_half"),
    ),
    of_grid("a9_first_layers", compare("vanilla")),
    of_grid(
        "frozen_designs",
        compare("vanilla", figures="frontier gap"),
        compare("vanilla_conv4-seed_1", "to_vanilla_conv4", f"vanilla_conv4 {ADAPTED}"),
        compare("low_rank_8_conv4-seed_1", "to_low_rank", f"low_rank_8_conv4 {ADAPTED}"),
        grid="demo_frozen_designs",
    ),
    own_rates("documentation", "documentation_frozen_designs"),
    own_rates("own_rates", "demo_own_rates"),
    equal_flops("demo"),
    equal_flops("documentation"),
    of_grid("ladder", LADDER, grid="documentation_ladder"),
    thin("thin", "documentation_thin", THREE_THIN, "low_rank_8_conv4_slow shared_conv4_low_rank_8"),
    thin("thin_demo", "demo_thin", THIN, f"vanilla_conv4_slow {THIN.split()[-1]} {MONARCHS}"),
    of_grid("stability", at_warmup(30), at_warmup(60), grid="demo_stability"),
    of_grid(
        "widths",
        *(at_width(f"w{n}-{kind}") for n in (64, 128, 256) for kind in ("short", "long", "warm")),
        *(at_width(f"w128-t{steps}") for steps in (2000, 4000, 8000)),
        grid="documentation_widths",
    ),
    of_grid(
        "headline", at_flops("vanilla_conv4-seed_11", subject=RATE), grid="documentation_headline"
    ),
    of_grid("wiki", at_flops("vanilla_conv4-seed_1")),
    of_grid("rivals", at_flops("vanilla"), grid="documentation_rivals"),
    *(of_grid(f"{study}_rates") for study in SEARCHED),
    of_grid("code_modern_rates"),
    of_grid("documentation_modern_rates_muon"),
    of_grid("documentation_modern_price_rates"),
    of_grid("documentation_modern_rivals_rates"),
    of_grid("documentation_modern_output_rates"),
    of_grid("documentation_modern_long_rates"),
    of_grid(
        "modern/price",
        compare("vanilla-seed_31", "", "vanilla orthogonal fixed_output fixed_output_orthogonal"),
        compare("vanilla_adamw-seed_31", "adamw", "vanilla_adamw orthogonal_adamw"),
        compare("orthogonal-seed_31", "to_orthogonal", "orthogonal fixed_output_orthogonal"),
        grid="documentation_modern_price",
    ),
    Page(
        "modern/output",
        (
            Runs("documentation_modern_price", ("vanilla", "fixed_output")),
            Runs("documentation_modern_output"),
        ),
        (compare("vanilla-seed_31"),),
    ),
    of_grid(
        "modern",
        by_names("vanilla_conv4", figures="trend frontier"),
        by_names("multi_query_conv4", "to_multi_query"),
        by_names("trained_monarch_shared_conv4", "to_trained", EARLY),
        grid="documentation_modern",
    ),
    Page(
        "modern/adapters",
        (
            Runs("documentation_modern", ("vanilla-t500", "vanilla_conv4-t500")),
            Runs("documentation_modern_adapters"),
        ),
        (
            by_names("vanilla_conv4", figures="gap", subject=""),
            by_names("vanilla", "to_none", figures="", subject=""),
        ),
    ),
    of_grid(
        "modern/scores",
        by_names("vanilla", figures="trend", subject=RATE),
        grid="documentation_modern_scores",
    ),
    of_grid(
        "modern/code",
        by_names("vanilla_conv4", figures="trend frontier"),
        by_names(
            "trained_monarch_shared_conv4",
            "to_trained",
            " ".join(f"{arm}-t4000" for arm in EARLY_ARMS),
            figures="",
            subject="",
        ),
        grid="code_modern",
    ),
    Page(
        "modern/dense",
        (Runs("documentation_modern", DENSE), Runs("documentation_modern_dense")),
        (by_names("vanilla_conv4", figures="trend"),),
    ),
    Page(
        "modern/recall",
        (
            Runs("documentation_modern", (*WITHOUT_AND_WITH[0], "vanilla_conv4-t4000")),
            Runs("documentation_modern_dense", ("vanilla-t4000",)),
        ),
        tuple(
            Report("evaluate anatomy", "vanilla", cells[0].partition("-")[2], cells)
            for cells in WITHOUT_AND_WITH
        ),
    ),
    Page(
        "modern/rivals",
        (Runs("documentation_modern", SAVING), Runs("documentation_modern_rivals")),
        (by_names("vanilla_conv4", figures="trend frontier"),),
    ),
    of_grid(
        "modern/long",
        by_names("vanilla_conv4", figures="trend"),
        grid="documentation_modern_long",
    ),
    Page(
        "tokens",
        (Runs("a1_init", BOTH), Runs("demo_structured", BOTH), Runs("demo_tokens")),
        (over("tokens"),),
    ),
    of_grid("rates", over(RATE, figures="gap"), grid="demo_rates"),
    evaluated(
        "diversity",
        "diversity",
        "maps",
        runs=(Runs("demo_structured", (*BOTH, "gaussian", "orthogonal_low_rank_8")),),
    ),
    evaluated("anatomy", runs=(Runs("demo_own_rates", ("vanilla", *STUDIED.split())),)),
    evaluated(
        "length",
        "length",
        runs=(Runs("a5_length", ("vanilla_length_256", "orthogonal_length_256")),),
    ),
    evaluated("approximation", "approximation", options="--seeds 5"),
    positions("rope"),
    positions("learned"),
)


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
            names.setdefault(run.name.rpartition("-seed_")[0], []).append(run.name)
        for cell in selection.cells or names:
            for name in names[cell]:
                found.append(PlacedRun(selection.grid, cell, grid.content.directory / name))
    return found
