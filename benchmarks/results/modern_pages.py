"""The pages of docs/results/modern, the study of the recipe of 2026."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.results.page import RATE, Page, Report, Runs, by_names, compare, of_grid

DENSE = "vanilla_conv4"
STRUCTURE = "monarch_shared_conv4"
ARMS = (STRUCTURE, f"trained_{STRUCTURE}", f"early_{STRUCTURE}")
LENGTHS = (500, 1000, 2000, 4000)
WITHOUT_AND_WITH = [(f"vanilla-t{steps}", f"{DENSE}-t{steps}") for steps in (500, 4000)]


def cells(arms: Iterable[str], *lengths: int) -> tuple[str, ...]:
    """Return the cells of arms at lengths in steps."""
    return tuple(f"{arm}-t{steps}" for arm in arms for steps in lengths)


def at_one_length(baseline: str, out: str, arms: Iterable[str], steps: int) -> Report:
    """Return a report of arms at one length, without figures.

    Args:
        baseline: One of the arms.
        out: Folder in the page's folder.
        arms: First parts of their names.
        steps: The length.
    """
    return by_names(baseline, out, " ".join(cells(arms, steps)), figures="", subject="")


def frozen_after(rows: str) -> tuple[str, ...]:
    """Return the arms whose rows train and are frozen after a tenth, a quarter and a half."""
    return tuple(f"{when}_{rows}" for when in ("tenth", "early", "half"))


MODERN = (
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
        by_names(DENSE, figures="trend frontier"),
        by_names("multi_query_conv4", "to_multi_query"),
        by_names(f"trained_{STRUCTURE}", "to_trained", " ".join(cells(ARMS, *LENGTHS))),
        grid="documentation_modern",
    ),
    Page(
        "modern/adapters",
        (
            Runs("documentation_modern", ("vanilla-t500", f"{DENSE}-t500")),
            Runs("documentation_modern_adapters"),
        ),
        (
            by_names(DENSE, figures="gap", subject=""),
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
        by_names(DENSE, figures="trend frontier"),
        at_one_length(f"trained_{STRUCTURE}", "to_trained", ARMS, 4000),
        grid="code_modern",
    ),
    Page(
        "modern/dense",
        (
            Runs(
                "documentation_modern",
                (
                    *cells([DENSE], *LENGTHS),
                    "vanilla-t500",
                    *cells([f"early_{DENSE}"], 500, 2000),
                ),
            ),
            Runs("documentation_modern_dense"),
        ),
        (by_names(DENSE, figures="trend"),),
    ),
    Page(
        "modern/recall",
        (
            Runs("documentation_modern", (*WITHOUT_AND_WITH[0], f"{DENSE}-t4000")),
            Runs("documentation_modern_dense", ("vanilla-t4000",)),
        ),
        tuple(
            Report("evaluate anatomy", "vanilla", pair[0].partition("-")[2], pair)
            for pair in WITHOUT_AND_WITH
        ),
    ),
    Page(
        "modern/rivals",
        (
            Runs(
                "documentation_modern",
                cells((DENSE, "multi_query_conv4", *ARMS), 500, 2000, 4000),
            ),
            Runs("documentation_modern_rivals"),
        ),
        (by_names(DENSE, figures="trend frontier"),),
    ),
    Page(
        "modern/phases",
        (
            Runs("documentation_modern", cells((DENSE, f"early_{DENSE}", *ARMS), 2000)),
            Runs("documentation_modern_phases"),
        ),
        (
            at_one_length(DENSE, "dense", (DENSE, *frozen_after(DENSE)), 2000),
            at_one_length(
                f"trained_{STRUCTURE}",
                "structure",
                (STRUCTURE, f"trained_{STRUCTURE}", *frozen_after(STRUCTURE)),
                2000,
            ),
        ),
    ),
    of_grid(
        "modern/long",
        by_names(DENSE, figures="trend"),
        grid="documentation_modern_long",
    ),
)
