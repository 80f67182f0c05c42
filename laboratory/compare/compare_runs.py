"""Compares finished runs: groups them, refuses what is not comparable, measures, tests, judges.

comparison = compare_runs([Path("runs/vanilla-1"), Path("runs/orthogonal-1")], baseline="vanilla")
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from laboratory.compare import comparability
from laboratory.compare.comparison import Comparison, Variant, measured_cost
from laboratory.compare.compute import (
    Lengths,
    bytes_per_token,
    equal_compute,
    paired_seconds,
    runs_by_length,
)
from laboratory.compare.convergence import FRACTIONS, reach, stability
from laboratory.compare.theory import Theory, expected_cost
from laboratory.compare.trend import Trend, fit_trends, subject_numbers
from laboratory.runs.finished import FinishedRun, read_finished_run
from laboratory.study.gaps import NATS, PairedGap, adjusted, paired_gap
from laboratory.study.seal import read_seals
from laboratory.study.sealed import arm_of
from laboratory.study.seeds import Group, Groups, group_runs, named_apart, refuse_twice
from laboratory.study.verdict import GapOf, Runs, about, gap_at_end, verdicts
from pretrain.reporting.text import perplexity, spread


def compare_runs(
    paths: Sequence[Path],
    baseline: str,
    subjects: Sequence[str] = (),
    match: str = "tokens",
    *,
    by: str = "settings",
) -> Comparison:
    """Compare finished runs, several seeds of each variant.

    Runs must agree in data, tokens (with `match` flops: in tokens or `schedule.flops`), model shape
    and evaluation.

    Args:
        paths: Run directories.
        baseline: A variant's label, or the name of a run.
        subjects: facts or settings that may differ, because their difference is what is compared.
        match: Quantity that variants have used equally at their gap: tokens, flops or seconds.
        by: What tells variants apart: settings, or names, the first part of the runs' names up to a
            dash; a variant may then have a model shape of its own.

    Raises:
        UserError: a directory is not a finished run, the baseline or a subject is not among what is
            there, runs differ in what is not the subject, one variant has two runs with one seed,
            or the runs do not have what `match` needs.
    """
    refuse_twice(paths)
    runs = named_apart([read_finished_run(path) for path in paths])
    values = comparability.find_subjects(runs, subjects)
    labels = [arm_of(run.config["run"]["name"]) for run in runs] if by == "names" else None
    shapes = comparability.shapes_of_labels(runs, labels) - values.keys() if labels else set()
    comparability.refuse_incomparable(runs, values.keys() | shapes, match)
    groups = group_runs(runs, baseline, values, labels=labels)
    lengths = runs_by_length(groups, runs, values)
    # Runs of a group differ in seeds alone, so the first stands for all.
    theories = {group.name: expected_cost(group.runs[0]) for group in groups.groups}
    variants = [
        _variant(group, groups, match=match, lengths=lengths, theories=theories)
        for group in groups.groups
    ]
    # Holm's correction needs all gaps of the report at once.
    variants = adjusted(variants)
    trends, trend_notes = _trends(variants, runs, values)
    return Comparison(
        baseline=groups.baseline,
        subjects=tuple(subjects),
        variants=tuple(variants),
        trends=trends,
        notes=(
            *_sample_notes(variants),
            *trend_notes,
            *comparability.length_notes(runs, values),
            *comparability.seed_notes(groups),
            *comparability.settings_notes(groups, values, shapes),
            *_theory_notes(variants),
        ),
        groups=groups,
        match=match,
        by=by,
        seals=tuple(
            _seal_sentences(
                runs,
                _sealed_gap(groups, runs, values, match),
                (match, subjects),
                claims=not all(variant.has_few_pairs for variant in variants),
            )
        ),
    )


def _variant(
    group: Group[FinishedRun],
    groups: Groups[FinishedRun],
    *,
    match: str,
    lengths: Lengths,
    theories: Mapping[str, Theory | None],
) -> Variant:
    base = groups.baseline_of(group)
    losses = _losses(group)
    by_source = {
        name: _losses(group, name) for name in sorted(group.runs[0].result.perplexity_by_source)
    }
    gap = None
    source_gaps: dict[str, PairedGap | None] = dict.fromkeys(by_source)
    compute = None
    if base.name != group.name:
        flops = _flops_ratio(theories[group.name], theories[base.name])
        compute = equal_compute(group, base, match=match, lengths=lengths, flops_ratio=flops)
        gap = compute.gap
        if match == "tokens":
            gap = paired_gap(base.name, losses, _losses(base), NATS)
        source_gaps = {
            source: paired_gap(base.name, source_losses, _losses(base, source), NATS)
            for source, source_losses in by_source.items()
        }
    by_seed, base_by_seed = ({run.seed: run for run in side.runs} for side in (group, base))
    perplexities = [run.result.validation_perplexity for run in group.runs]
    return Variant(
        name=group.name,
        label=group.label,
        stratum=group.stratum,
        baseline=base.name,
        runs=group.runs,
        validation_loss=spread(list(losses.values())),
        validation_perplexity=spread([value for value in perplexities if value is not None]),
        perplexity_by_source={
            key: spread([*map(perplexity, source_losses.values())])
            for key, source_losses in by_source.items()
        },
        gap=gap,
        source_gaps=source_gaps,
        reaches=tuple(reach(fraction, by_seed, base_by_seed) for fraction in FRACTIONS),
        stability=stability(group.runs),
        cost=measured_cost(group.runs),
        theory=theories[group.name],
        bytes_per_token=bytes_per_token(group.runs[0]),
        compute=compute,
        speed=paired_seconds(group, base) if compute else None,
    )


def _flops_ratio(theory: Theory | None, base: Theory | None) -> float | None:
    """Return the executed FLOPs of a token over the baseline's."""
    return (
        theory.executed_flops_per_token / base.executed_flops_per_token if theory and base else None
    )


def _trends(
    variants: Sequence[Variant], runs: Sequence[FinishedRun], subjects: Mapping[str, Sequence[Any]]
) -> tuple[tuple[Trend, ...], list[str]]:
    """Fit a line for each label, if the subject is a number.

    A gap to a baseline of another value has the subject's own effect in it, so it is left out.
    """
    numbers = subject_numbers(subjects)
    if numbers is None:
        return (), []
    value_of = dict(zip((run.path for run in runs), numbers, strict=True))
    stratum_of = {variant.name: variant.stratum for variant in variants}
    gaps: dict[str, dict[float, PairedGap]] = {}
    for variant in variants:
        if variant.gap is not None and stratum_of[variant.baseline] == variant.stratum:
            gaps.setdefault(variant.label, {})[value_of[variant.runs[0].path]] = variant.gap
    return fit_trends(next(iter(subjects)), gaps)


def _losses(group: Group[FinishedRun], source: str | None = None) -> dict[int, float]:
    """Return {seed: finite validation loss}, of all sources or of one."""
    if source is None:
        losses = {run.seed: run.result.validation_loss for run in group.runs}
        return {seed: loss for seed, loss in losses.items() if loss is not None}
    perplexities = {run.seed: run.result.perplexity_by_source.get(source) for run in group.runs}
    return {seed: math.log(value) for seed, value in perplexities.items() if value}


def _sample_notes(variants: Sequence[Variant]) -> list[str]:
    """Return notes on diverged runs and on runs without a pair."""
    notes = []
    if all(variant.is_baseline for variant in variants):
        notes.append("Only the baseline was given: there is nothing to compare it with.")
    seeds = {variant.name: {run.seed for run in variant.runs} for variant in variants}
    for variant in variants:
        diverged = [run.name for run in variant.runs if run.result.validation_loss is None]
        if diverged:
            notes.append(
                f"The validation loss of {', '.join(diverged)} is not finite: left out of the "
                f"means and gaps of {variant.name}, which therefore look better than it is."
            )
        alone = sorted(seeds[variant.name] ^ seeds[variant.baseline])
        if alone:
            notes.append(
                f"Only one of {variant.name} and {variant.baseline} has a run with seed "
                f"{', '.join(map(str, alone))}: such runs count in the means but not in the gap, "
                "which is paired by seed."
            )
    return notes


def _theory_notes(variants: Sequence[Variant]) -> list[str]:
    """Return notes on variants that the formulas do not cover, or count differently."""
    notes = []
    if unknown := [variant.name for variant in variants if variant.theory is None]:
        which = "any run" if len(unknown) == len(variants) else ", ".join(unknown)
        notes.append(
            f"The formulas say nothing of {which}: this version does not understand the config."
        )
    theories = [(variant, variant.theory) for variant in variants if variant.theory]
    if phased := [variant.name for variant, theory in theories if theory.phases > 1]:
        notes.append(
            f"Other weights of {', '.join(phased)} train in later phases: parameters and memory "
            "are those of the last phase, FLOPs the mean over all steps."
        )
    for variant, theory in theories:
        counted = variant.cost.size.trainable_parameters
        expected = theory.size.trainable_parameters
        if expected != counted:
            notes.append(
                f"{variant.name} trains {counted:,} parameters but the formulas count "
                f"{expected:,}: they do not cover all of its parts, and its other figures by "
                "formula are off as well."
            )
    return notes


def _seal_sentences(
    runs: Sequence[FinishedRun],
    gap_of: GapOf,
    asked: tuple[str, Sequence[str]],
    *,
    claims: bool,
) -> list[str]:
    """Return the verdict of each seal beside the runs, and a sentence on each unreadable seal.

    Args:
        claims: Whether a gap has enough pairs for a claim, so that a missing seal is worth a word.
    """
    read = read_seals(run.path.resolve().parent for run in runs)
    sentences = [verdicts(seal, runs, gap_of, asked, together=read.seals) for seal in read.seals]
    said = [sentence for sentence in sentences if sentence]
    if not said and read.seals:
        said = [f"Not judged: {'; '.join(map(about, read.seals))}."]
    if not said and claims:
        said = ["Not sealed: no hypothesis lies beside these runs from before the first of them."]
    return [*said, *read.problems]


def _sealed_gap(
    groups: Groups[FinishedRun],
    runs: Sequence[FinishedRun],
    subjects: Mapping[str, Sequence[Any]],
    match: str,
) -> GapOf:
    """Return a function for the gap of sealed runs at equal `match`, from these runs alone.

    Args:
        groups: The runs by label.
        runs: All runs that are compared, in the order of `subjects`.
        subjects: {subject: its value in each run}.
        match: tokens, flops or seconds.
    """
    if match == "tokens":
        return gap_at_end

    def gap_of(design: Runs, baseline: Runs, sealed: Sequence[FinishedRun]) -> PairedGap | None:
        sealed_paths = {run.path for run in sealed}
        indices = [index for index, run in enumerate(runs) if run.path in sealed_paths]
        values = {name: [by_run[index] for index in indices] for name, by_run in subjects.items()}
        sides = [
            Group(label, "", tuple(by_seed[seed] for seed in sorted(by_seed)))
            for label, by_seed in (("design", design), ("baseline", baseline))
        ]
        theories = [expected_cost(side.runs[0]) for side in sides]
        return equal_compute(
            *sides,
            match=match,
            lengths=runs_by_length(groups, [runs[index] for index in indices], values),
            flops_ratio=_flops_ratio(*theories),
        ).gap

    return gap_of
