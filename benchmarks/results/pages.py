"""The pages of docs/results."""

from __future__ import annotations

from benchmarks.results.modern_pages import MODERN
from benchmarks.results.page import (
    RATE,
    Page,
    Report,
    Runs,
    at_flops,
    compare,
    evaluated,
    of_grid,
    over,
)

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


HEAD_DIMS = "vanilla orthogonal vanilla_head_dim_16 orthogonal_head_dim_16"
STRENGTHS = "orthogonal trainable_half_rate penalty_0.1 unfreeze_full_rate"
CORRECTED = "orthogonal_low_rank_8 monarch_low_rank_8 hadamard_low_rank_8 gaussian_low_rank_8"
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
    *MODERN,
    Page(
        "tokens",
        (Runs("a1_init", BOTH), Runs("demo_structured", BOTH), Runs("demo_tokens")),
        (over("tokens"),),
    ),
    of_grid("rates", over(RATE, figures="gap"), grid="demo_rates"),
    evaluated(
        "diversity",
        "diversity",
        runs=(Runs("demo_structured", (*BOTH, "gaussian", "orthogonal_low_rank_8")),),
    ),
    evaluated(
        "length",
        "length",
        runs=(Runs("a5_length", ("vanilla_length_256", "orthogonal_length_256")),),
    ),
    evaluated("approximation", "approximation", options="--seeds 5"),
    positions("rope"),
    positions("learned"),
)
