"""A comparison on the terminal: two tables that fit 100 columns, and what a reader must know."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from pretrain.compare.comparison import Comparison, Variant
from pretrain.compare.tables import cost_change
from pretrain.compare.text import NOT_FINITE
from pretrain.compare.trend_text import trend_sentences
from pretrain.reporting.tables import Table, rich_table
from pretrain.reporting.text import byte_count, interval, mean_sd, number, percent, signed
from pretrain.study.tables import gap_sentence, p_value

LONG_LABEL = 20
"""A label of more characters is broken before its adapters."""


def print_comparison(comparison: Comparison, console: Console) -> None:
    """The tables with what they rest on above and what a reader must know below."""
    for line in headlines(comparison):
        console.print(Text(line))
    console.print(rich_table(_quality_table(comparison.variants), between_rows=True))
    console.print(rich_table(_cost_table(comparison), between_rows=True))
    for note in (*_footnotes(comparison), *comparison.notes):
        console.print(Text(f"* {note}"))


def headlines(comparison: Comparison) -> list[str]:
    """What was compared with what, on how much."""
    tokens = sorted({run.result.tokens for run in comparison.runs})
    lengths = sorted(
        {run.config["data"]["sequence_length"] for group in comparison.groups.groups for run in group.runs}
    )
    unigram = sorted({round(run.result.unigram_perplexity, 2) for run in comparison.runs})
    subject = f" Subject: {', '.join(comparison.subjects)}." if comparison.subjects else ""
    return [
        f"Baseline: {comparison.baseline}.{subject} Each of {len(comparison.runs)} runs trained on "
        f"{_either(tokens)} tokens in sequences of {_either(lengths)}.",
        "Perplexity of the validation text for a model without context (unigram): "
        f"{_either(unigram, ',.2f')}.",
    ]


def _either(values: Sequence[float], form: str = ",") -> str:
    return " or ".join(format(value, form) for value in values)


def _footnotes(comparison: Comparison) -> list[str]:
    notes = [
        gap_sentence(variant.name, variant.gap) for variant in comparison.variants if not variant.is_baseline
    ]
    return [
        *notes,
        *trend_sentences(comparison.trends),
        "Runs made one after the other share a machine with different company: benchmarks/step/measure.py "
        "measures a ratio of speeds side by side.",
    ]


def _quality_table(variants: Sequence[Variant]) -> Table:
    header = (
        "variant",
        "n",
        "validation\nloss",
        "perplexity",
        "gap, nats/token\n(of perplexity)",
        "d_z",
        "p, Holm",
    )
    rows = []
    for variant in variants:
        gap = variant.gap
        row = [
            _in_lines(variant),
            str(len(variant.runs)),
            mean_sd(variant.validation_loss, 4, "\n", NOT_FINITE),
            mean_sd(variant.validation_perplexity, 2, "\n", NOT_FINITE),
        ]
        if gap is None:
            row += ["baseline" if variant.is_baseline else "no pair", "", ""]
        else:
            span = "" if gap.low is None else "\n" + interval(gap.low, gap.high, 3)
            row += [
                f"{signed(gap.mean, 3)} ({percent(gap.perplexity_ratio)}){span}",
                signed(gap.cohens_dz, 2),
                p_value(gap.t_p_holm, gap.n),
            ]
        rows.append(row)
    return Table(header, rows)


def _cost_table(comparison: Comparison) -> Table:
    header = (
        "variant",
        "tokens/s",
        "trainable\nparameters",
        "frozen\nparameters",
        "gradients +\noptimizer state",
        "checkpoint",
    )
    rows = []
    for variant in comparison.variants:
        base = comparison.variant(variant.baseline).cost
        cost = variant.cost
        speed = cost.tokens_per_second.median if cost.tokens_per_second else None
        base_speed = base.tokens_per_second.median if base.tokens_per_second else None
        states, base_states = (c.states.gradient_bytes + c.states.optimizer_state_bytes for c in (cost, base))
        trainable, base_trainable = (c.size.trainable_parameters for c in (cost, base))
        frozen, base_frozen = (c.size.frozen_parameters for c in (cost, base))
        checkpoint, base_checkpoint = (c.states.checkpoint_bytes for c in (cost, base))
        cells = [
            (number(speed, 0), speed, base_speed),
            (f"{trainable:,}", trainable, base_trainable),
            (f"{frozen:,}", frozen, base_frozen),
            (byte_count(states), states, base_states),
            (byte_count(checkpoint), checkpoint, base_checkpoint),
        ]
        row = [_in_lines(variant), *(text + cost_change(variant, now, then) for text, now, then in cells)]
        rows.append([cell.replace(" (", "\n(", 1) for cell in row])
    return Table(header, rows)


def _in_lines(variant: Variant) -> str:
    label = variant.label.replace(" ", "\n")
    if len(label) > LONG_LABEL:
        label = label.replace("+", "\n+")
    return "\n".join(part for part in (label, variant.stratum) if part)
