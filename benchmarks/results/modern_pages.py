"""The pages of docs/results/modern, the study of the recipe of 2026."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.results.page import RATE, Page, Report, Runs, by_names, of_grid

DENSE = "vanilla_conv4"
STRUCTURE = "monarch_shared_conv4"
BOTH_FROZEN = "fixed_output_orthogonal"
ARMS = (STRUCTURE, f"trained_{STRUCTURE}", f"early_{STRUCTURE}")
LENGTHS = (500, 1000, 2000, 4000)
FROZEN_AFTER = ("tenth", "early", "half")
"""First words of the arms that are frozen after a tenth, a quarter and a half of the steps."""


def cells(arms: Iterable[str], *lengths: int) -> tuple[str, ...]:
    """Return the cells of arms at lengths in steps."""
    return tuple(f"{arm}-t{steps}" for arm in arms for steps in lengths)


def of_names(baseline: str, out: str = "", compared: Iterable[str] = ()) -> Report:
    """Return a report by names of runs of one length; one in a folder of its own shows no figure.

    Args:
        baseline: The first part of the baseline's names.
        out: Folder in the page's folder.
        compared: The cells that are compared.
    """
    return by_names(baseline, out, " ".join(compared), figures="" if out else "gap", subject="")


MODERN = (
    of_grid("code_modern_rates"),
    of_grid("documentation_modern_rates_muon"),
    of_grid("documentation_modern_price_rates"),
    of_grid("documentation_modern_rivals_rates"),
    of_grid("documentation_modern_output_rates"),
    of_grid("documentation_modern_long_rates"),
    of_grid(
        "modern/price",
        of_names("vanilla", "", ("vanilla", "orthogonal", "fixed_output", BOTH_FROZEN)),
        of_names("vanilla_adamw", "adamw", ("vanilla_adamw", "orthogonal_adamw")),
        of_names("orthogonal", "to_orthogonal", ("orthogonal", BOTH_FROZEN)),
        grid="documentation_modern_price",
    ),
    Page(
        "modern/output",
        (
            Runs("documentation_modern_price", ("vanilla", "fixed_output")),
            Runs("documentation_modern_output"),
        ),
        (of_names("vanilla"),),
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
            of_names(DENSE),
            of_names("vanilla", "to_none"),
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
        of_names(f"trained_{STRUCTURE}", "to_trained", cells(ARMS, 4000)),
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
            of_names(
                DENSE,
                "dense",
                cells((DENSE, *(f"{when}_{DENSE}" for when in FROZEN_AFTER)), 2000),
            ),
            of_names(
                f"trained_{STRUCTURE}",
                "structure",
                cells((*ARMS[:2], *(f"{when}_{STRUCTURE}" for when in FROZEN_AFTER)), 2000),
            ),
        ),
    ),
    Page(
        "modern/long",
        (
            Runs("documentation_modern", cells((DENSE, STRUCTURE), *LENGTHS)),
            Runs("documentation_modern_long"),
        ),
        (by_names(DENSE, figures="trend"),),
        seeds=(21, 22, 23, 24, 25),  # whole when the study's core-hours ended
    ),
)
