"""The pages of docs/results: the runs of each, and its reports."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pretrain.runs.directory import RunDirectory
from pretrain.sweep.grid import expand, read_grid


@dataclass(frozen=True)
class Runs:
    """Runs of a shipped grid, all seeds: those whose name is CELL-seed_N with one of `cells`, or all."""

    grid: str
    cells: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """`python -m pretrain VERB` on the page's runs of `cells`, or on all; `out` unless in the page's folder.

    `options` are further ones of the verb, `quick` those in their place with --quick; `figures` are shown in
    docs/results, the others are in a report that is made by hand.
    """

    verb: str
    baseline: str = ""
    subject: str = ""
    cells: tuple[str, ...] = ()
    out: str = ""
    options: tuple[str, ...] = ()
    quick: tuple[str, ...] = ()
    figures: tuple[str, ...] = ()


@dataclass(frozen=True)
class Page:
    """A folder of docs/results. With --quick it has its first report alone, of `quick`, the baseline first.

    A page without runs has reports that train models of their own; one without reports is a search.
    """

    name: str
    runs: tuple[Runs, ...]
    reports: tuple[Report, ...]
    quick: tuple[Runs, ...] = ()

    @property
    def in_quick(self) -> bool:
        """Made by --quick too; not if its runs are too many, or too long."""
        return bool(self.quick) or not self.runs


GAP = ("gap",)


def of_grid(name: str, grid: str, *reports: Report) -> Page:
    """A page of one grid, too long for --quick."""
    return Page(name, (Runs(grid),), reports)


def ablation(grid: str, quick: str, subject: str = "", more: tuple[Report, ...] = ()) -> Page:
    """A page of one grid, everything against vanilla; `quick` is the run to try out beside it."""
    figures = ("trend",) if subject else GAP
    report = Report("compare", "vanilla", subject, figures=figures)
    return Page(grid, (Runs(grid),), (report, *more), (Runs(grid, ("vanilla", quick)),))


def among(
    baseline: str,
    out: str,
    *cells: str,
    subject: str = "",
    options: tuple[str, ...] = (),
    figures: tuple[str, ...] = (),
) -> Report:
    """`compare` on some of the page's runs, into a folder of their own, or in the page's."""
    shown = figures or (() if out else GAP)
    return Report("compare", baseline, subject, cells, out, options, figures=shown)


RATE = "optimizer.learning_rate"
FROZEN = ("orthogonal", "monarch", "hadamard", "gaussian")
CORRECTED = tuple(f"{name}_low_rank_8" for name in FROZEN)
VARIANTS = ("vanilla", "orthogonal", "gaussian", "low_rank_8", "synthesizer_random", "hybrid")
BOTH = ("vanilla", "orthogonal")
APPROXIMATION = Report(
    "evaluate approximation",
    options=("--seeds", "5"),
    quick=("--seeds", "1", "--widths", "16,32", "--depths", "1", "--steps", "100"),
    figures=("approximation",),
)
TRAINED_OR_FROZEN = among(
    "orthogonal", "a2_trainability/to_orthogonal", "orthogonal", "orthogonal_trainable"
)
STRENGTHS = ("orthogonal", "trainable_half_rate", "penalty_0.1", "unfreeze_full_rate")
FURTHER_TRAINED_OR_FROZEN = among("orthogonal", "a2_strengths/to_orthogonal", *STRENGTHS)
HEAD_DIMS = (*BOTH, "vanilla_head_dim_16", "orthogonal_head_dim_16")
NARROW_HEADS = among("vanilla", "a4_head_dim/16_to_32", *HEAD_DIMS, subject="model.head_dim")
FIRST_OR_LAST = among("last_half-seed_1", "a9_layers/to_last_half", "last_half", "first_half")
BUILT = among(
    "orthogonal-seed_1", "a7_construction/to_orthogonal", "orthogonal", "cayley", "hadamard", "dct"
)
WITH_HELPERS = (
    "shared_conv4",
    "shared_conv4_low_rank_8",
    "monarch_shared_conv4",
    "trained_shared_conv4",
)
STUDIED = ("shared_conv4", "trained_shared_conv4")
FLOPS = ("--match", "flops")
RATES = ("0.0015", "0.003", "0.006", "0.012")
BY_RATE = [f"{arm}-warmup_steps_{{}}-learning_rate_{rate}" for arm in BOTH for rate in RATES]
THIN = ("low_rank_8_conv4", "low_rank_16_conv4", "shared_conv4_low_rank_8")
MONARCHS = ("trained_monarch_shared_conv4", "monarch_shared_conv4")
CELLS = [f"w{width}-{kind}" for width in (64, 128, 256) for kind in ("short", "long", "warm")]
CELLS += [f"w128-t{steps}" for steps in (2000, 4000, 8000)]
BY_WIDTH = {cell: (f"vanilla_conv4-{cell}", f"{MONARCHS[1]}-{cell}") for cell in CELLS}
SEARCHES = [
    f"documentation{kind}_rates" for kind in ("", "_headline", "_rivals", "_thin", "_widths")
]
SEARCHES += ["demo_helper_rates", "demo_thin_rates", "wiki_rates"]
STRUCTURED_QUICK = (Runs("demo_structured", BOTH),)

PAGES = (
    Page(
        "structured",
        (Runs("demo_structured"),),
        (
            Report("compare", "vanilla", figures=GAP),
            among("orthogonal", "structured/to_orthogonal", *FROZEN),
            among("orthogonal+low_rank", "structured/to_orthogonal_low_rank", *CORRECTED),
        ),
        STRUCTURED_QUICK,
    ),
    ablation("a1_init", "gaussian_naive"),
    ablation("a2_trainability", "unfreeze", more=(TRAINED_OR_FROZEN,)),
    ablation("a2_strengths", "penalty_0.1", more=(FURTHER_TRAINED_OR_FROZEN,)),
    ablation("a3_heads", "orthogonal_2_heads", "model.num_attention_heads"),
    ablation("a4_head_dim", "orthogonal_head_dim_16", "model.head_dim", more=(NARROW_HEADS,)),
    ablation("a5_length", "orthogonal_length_256", "data.sequence_length"),
    ablation("a6_depth", "orthogonal_2_layers", "model.num_layers"),
    ablation("a7_construction", "dct", more=(BUILT,)),
    ablation("a8_adapters", "low_rank_8"),
    ablation("a8_ranks", "low_rank_8"),
    ablation("a9_layers", "last_half_low_rank_8", more=(FIRST_OR_LAST,)),
    ablation("a9_first_layers", "low_rank_8"),
    of_grid(
        "frozen_designs",
        "demo_frozen_designs",
        Report("compare", "vanilla", figures=("frontier", *GAP)),
        among(
            "vanilla_conv4-seed_1",
            "frozen_designs/to_vanilla_conv4",
            "vanilla_conv4",
            *WITH_HELPERS,
        ),
        among(
            "low_rank_8_conv4-seed_1",
            "frozen_designs/to_low_rank",
            "low_rank_8_conv4",
            *WITH_HELPERS,
        ),
    ),
    *(
        of_grid(
            name,
            grid,
            Report("compare", "vanilla", figures=GAP),
            among("vanilla_conv4-seed_1", f"{name}/to_vanilla_conv4", "vanilla_conv4", *STUDIED),
            among("trained_shared_conv4-seed_1", f"{name}/to_trained_shared", *STUDIED),
        )
        for name, grid in (
            ("documentation", "documentation_frozen_designs"),
            ("own_rates", "demo_own_rates"),
        )
    ),
    *(
        of_grid(
            f"equal_flops/{text}",
            f"{text}_equal_flops",
            among("vanilla_conv4-seed_1", "", options=FLOPS),
            among("vanilla", f"equal_flops/{text}/to_vanilla", options=FLOPS),
        )
        for text in ("demo", "documentation")
    ),
    of_grid(
        "ladder", "documentation_ladder", Report("ladder", "vanilla_conv4", figures=("ladder",))
    ),
    *(
        of_grid(
            page,
            f"{text}_thin",
            among("vanilla_conv4-seed_1", "", "vanilla_conv4", *thin, *MONARCHS, options=FLOPS),
            among("low_rank_8_conv4-seed_1", f"{page}/to_low_rank", *thin, options=FLOPS),
            among(f"{slow[0]}-seed_1", f"{page}/to_slow", *slow, options=FLOPS),
            among(
                "trained_monarch_shared_conv4-seed_1",
                f"{page}/to_trained_monarch",
                *MONARCHS,
                options=FLOPS,
            ),
        )
        for page, text, thin, slow in (
            ("thin", "documentation", THIN, ("low_rank_8_conv4_slow", THIN[-1])),
            ("thin_demo", "demo", THIN[::2], ("vanilla_conv4_slow", THIN[-1], *MONARCHS)),
        )
    ),
    of_grid(
        "stability",
        "demo_stability",
        *(
            among(
                "vanilla",
                f"stability/warmup_{n}",
                *(one.format(n) for one in BY_RATE),
                subject=RATE,
                figures=("trend",),
            )
            for n in (30, 60)
        ),
    ),
    of_grid(
        "widths",
        "documentation_widths",
        *(
            among(f"{two[0]}-seed_1", f"widths/{cell}", *two, options=FLOPS)
            for cell, two in BY_WIDTH.items()
        ),
    ),
    of_grid(
        "headline",
        "documentation_headline",
        among("vanilla_conv4-seed_11", "", subject=RATE, options=FLOPS),
    ),
    of_grid("wiki", "wiki", among("vanilla_conv4-seed_1", "", options=FLOPS)),
    of_grid("rivals", "documentation_rivals", among("vanilla", "", options=FLOPS)),
    *(of_grid(grid, grid) for grid in SEARCHES),
    Page(
        "tokens",
        (Runs("a1_init", BOTH), Runs("demo_structured", BOTH), Runs("demo_tokens")),
        (Report("compare", "vanilla", "tokens", figures=("trend",)),),
        (Runs("a1_init", ("vanilla",)), Runs("demo_structured", ("orthogonal",))),
    ),
    Page(
        "rates",
        (Runs("demo_rates"),),
        (Report("compare", "vanilla", RATE, figures=GAP),),
        (Runs("demo_rates", ("vanilla-learning_rate_0.0015", "vanilla-learning_rate_0.003")),),
    ),
    Page(
        "diversity",
        (Runs("demo_structured", (*BOTH, "gaussian", "orthogonal_low_rank_8")),),
        (Report("evaluate diversity", figures=("diversity", "maps")),),
        STRUCTURED_QUICK,
    ),
    Page(
        "anatomy", (Runs("demo_own_rates", ("vanilla", *STUDIED)),), (Report("evaluate anatomy"),)
    ),
    Page(
        "length",
        (Runs("a5_length", ("vanilla_length_256", "orthogonal_length_256")),),
        (Report("evaluate length", figures=("length",)),),
        (Runs("a5_length", ("orthogonal_length_256",)),),
    ),
    Page(
        "approximation",
        (),
        (APPROXIMATION,),
    ),
    of_grid(
        "variants",
        "demo_variants",
        *(
            among("vanilla", kind, *(f"{name}-{kind}" for name in VARIANTS), figures=GAP)
            for kind in ("rope", "learned")
        ),
    ),
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


def runs_of(page: Page, quick: bool = False) -> list[PlacedRun]:
    """The runs of a page, grid by grid, cell by cell and seed by seed; with `quick` one seed of a few."""
    found = []
    for selection in page.quick if quick else page.runs:
        grid = read_grid(selection.grid)
        runs = [(run.name.rpartition("-seed_"), run.name) for run in expand(grid)]
        cells = selection.cells or tuple(dict.fromkeys(cell for (cell, _, _), _ in runs))
        seeds = (grid.content.seeds or [])[: 1 if quick else None]
        for wanted in cells:
            for (cell, _, seed), name in runs:
                if cell == wanted and int(seed) in seeds:
                    found.append(PlacedRun(selection.grid, cell, grid.content.directory / name))
    return found
