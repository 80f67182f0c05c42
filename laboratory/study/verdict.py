"""What the runs beside a seal make of its hypotheses: from all sealed runs, and from no others.

A hypothesis of a sweep is judged once, by the 95 % interval of its paired gap; "yes" has all of it
among the gaps that are claimed, of "better" and "worse" beyond the margin, and needs p < 0.05 after
Holm's correction over the hypotheses of all seals beside the runs, with the two-sided p value of
the nearest gap that is not claimed. A hypothesis of a trial is judged by the sequential test alone,
in the order of the sealed seeds. What is judged by another measure than the sealed one, from runs
that are not as sealed, or with other seals gone, is called unsealed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, takewhile
from typing import Any

from laboratory.runs.finished import FinishedRun
from laboratory.study.gaps import (
    CONFIDENCE,
    FEWEST_SEEDS,
    LEVEL,
    NATS,
    PairedGap,
    holm,
    p_value,
    paired_gap,
)
from laboratory.study.hypothesis import Hypothesis
from laboratory.study.seal import Seal, lost_text
from laboratory.study.sealed import Measure, design_of
from laboratory.study.sequential import EXPONENT, FIRST, KAPPA, LAST, NO, YES, decide
from pretrain.errors import UserError

Runs = Mapping[int, FinishedRun]
"""{seed: run}"""
GapOf = Callable[[Runs, Runs, Sequence[FinishedRun]], PairedGap | None]
"""(runs of a design, runs of its baseline, all sealed runs) -> gap, by the measure of a report."""
SEQUENTIAL: dict[str, Any] = {
    "name": "sequential",
    "first": FIRST,
    "last": LAST,
    "exponent": EXPONENT,
    "kappa_yes": KAPPA[YES],
    "kappa_no": KAPPA[NO],
}
"""Rule of a trial, as a seal has it."""
_WORDS = {"yes": "HIT", "no": "MISS"}
_NAMED = 12
"""Runs and changes that are named."""


def fixed_rule(pairs: int) -> dict[str, Any]:
    """Return the rule of a sweep with so many pairs of runs, as a seal has it."""
    return {
        "name": "fixed_n",
        "pairs": pairs,
        "fewest_pairs": FEWEST_SEEDS,
        "confidence": CONFIDENCE,
        "level": LEVEL,
    }


def gap_at_end(design: Runs, baseline: Runs, _: object = None) -> PairedGap | None:
    """Return the gap of the losses at the end of the runs, without losses that are not finite.

    Args:
        baseline: Runs of its baseline.
    """
    values, base = (
        {seed: run.result.validation_loss for seed, run in runs.items()}
        for runs in (design, baseline)
    )
    finite = {seed: loss for seed, loss in values.items() if loss is not None}
    return paired_gap(
        "", finite, {seed: loss for seed, loss in base.items() if loss is not None}, NATS
    )


def about(seal: Seal) -> str:
    """Return a clause on what a seal is about."""
    claims = ", ".join(f"'{claim}'" for claim in seal.sealed.hypotheses)
    return f"the seal {seal.path.stem} is of {claims}, whose runs are not all here"


def verdicts(
    seal: Seal,
    runs: Sequence[FinishedRun],
    gap_of: GapOf,
    asked: tuple[str, Sequence[str]] | None = None,
    *,
    together: Iterable[Seal] = (),
) -> str:
    """Return the verdicts of a seal on runs as sentences; "" without a hypothesis about them.

    Args:
        seal: Seal beside some of the runs.
        runs: Any finished runs.
        gap_of: Function that returns a gap by the measure that is asked for.
        asked: Match and subjects of the report; None: those that are sealed.
        together: All seals that are read, of which those of the same directory count for Holm's
            correction: hypotheses sealed one by one get no easier test than together.
    """
    present = {design_of(run.config["run"]["name"], run.seed) for run in seal.beside(runs)}
    claims = [c for c in seal.sealed.hypotheses if {c.design, c.baseline} <= present]
    if not claims:
        return ""
    by_design = seal.own_runs(runs)
    changes = {
        (design, seed): seal.changes_of(run, design)
        for design, of_design in by_design.items()
        for seed, run in of_design.items()
    }
    of_all = _measure_changes(seal, asked)
    elsewhere = [
        claim
        for other in together
        if other.directory == seal.directory and other.path != seal.path and other.sealed.fixed_n
        for claim in other.sealed.hypotheses
    ]
    outcomes = _outcomes(seal, by_design, gap_of, elsewhere)
    sentences = [_statement(seal, by_design, [*of_all, *chain.from_iterable(changes.values())])]
    if unrecorded := seal.unrecorded(by_design):
        sentences.append(f"Not recorded: {'; '.join(unrecorded)}.")
    designs = {name for claim in claims for name in (claim.design, claim.baseline)}
    if strangers := [run.name for run in seal.strangers(runs, designs)]:
        sentences.append(
            f"Not of this seal, and left out of its verdict: {_listed(strangers, ', ')}."
        )
    for claim in claims:
        outcome, seeds = outcomes[claim]
        counted = [(name, seed) for name in (claim.design, claim.baseline) for seed in seeds]
        if seal.sealed.measure.reads_curves:
            counted = [*changes]
        unsealed = seeds and (of_all or any(changes.get(run) for run in counted))
        note = ", unsealed because of what has changed" if unsealed else ""
        sentences.append(f"Hypothesis '{claim}'{note}: {outcome}.")
    return " ".join(sentences)


def _statement(seal: Seal, by_design: Mapping[str, Runs], changes: Iterable[str]) -> str:
    """Return one sentence on the seal's time, hash, rule and measure, and on all changes.

    Args:
        by_design: Runs of the seal, of `Seal.own_runs`.
        changes: Clauses on what has changed of runs and measure.
    """
    clauses = [*changes, *seal.notes(by_design)]
    since = f"changed since: {_listed(clauses, '; ')}" if clauses else "nothing has changed since"
    sealed = seal.sealed
    return (
        f"Sealed {sealed.sealed} as {seal.path.stem}, {sealed.stopping_rule}, {sealed.measure}; "
        f"{since}."
    )


def _listed(texts: Sequence[str], link: str) -> str:
    more = [f"and {len(texts) - _NAMED} more"] if len(texts) > _NAMED else []
    return link.join([*texts[:_NAMED], *more])


def _measure_changes(seal: Seal, asked: tuple[str, Sequence[str]] | None) -> list[str]:
    """Return clauses on differences of the judged from the sealed measure.

    Args:
        asked: Match and subjects of a report; None: those that are sealed.
    """
    clauses = [] if seal.intact else [f"{seal.path} no longer has its own hash"]
    clauses += [lost_text(seal.lost)] if seal.lost else []
    sealed = seal.sealed.measure
    if asked and not _is_measure(sealed, *asked):
        now = sealed.model_copy(update={"match": asked[0], "subjects": [*asked[1]]})
        clauses.append(f"the report compares {now}, sealed is {sealed}")
    return clauses


def _is_measure(sealed: Measure, match: str, subjects: Sequence[str]) -> bool:
    """Return whether a report with these options judges by the sealed measure.

    At equal tokens a gap is of the sealed runs' last losses, whatever else is the report's subject;
    at equal compute the subjects say which runs make a learning curve.
    """
    if match == sealed.match == "tokens":
        return True
    return (match, set(subjects)) == (sealed.match, set(sealed.subjects))


def _outcomes(
    seal: Seal, by_design: Mapping[str, Runs], gap_of: GapOf, elsewhere: Iterable[Hypothesis]
) -> dict[Hypothesis, tuple[str, Sequence[int]]]:
    """Return {hypothesis: its outcome, and the seeds that it was judged by}.

    Args:
        seal: Seal with the hypotheses.
        by_design: Runs of the seal, of `Seal.own_runs`.
        gap_of: Function that returns a gap.
        elsewhere: Hypotheses of other seals beside it.
    """
    sealed = seal.sealed
    every = [run for of_design in by_design.values() for run in of_design.values()]
    lacking = len(sealed.runs) - sum(run.result.validation_loss is not None for run in every)
    if lacking and sealed.measure.reads_curves:
        why = (
            f"not judged, {lacking} of the {len(sealed.runs)} sealed runs, whose losses make the "
            "learning curves, are not among these, or have no finite loss"
        )
        return dict.fromkeys(sealed.hypotheses, (why, ()))
    gaps: dict[Hypothesis, PairedGap | None] = {}
    outcomes: dict[Hypothesis, tuple[str, Sequence[int]]] = {}
    rule = _rule(seal)
    for claim in sealed.hypotheses:
        sides = by_design[claim.design], by_design[claim.baseline]
        try:
            gaps[claim] = gap_of(*sides, every) if all(sides) else None
        except UserError as error:
            gaps[claim] = None
            outcomes[claim] = (f"not judged, {error}", ())
        if rule is None:
            outcomes[claim] = ("not judged, this version does not know the sealed rule", ())
    if rule == "sequential":
        return {
            claim: _sequential(claim, gap, sealed.seeds) for claim, gap in gaps.items()
        } | outcomes
    return _fixed(gaps, sealed.seeds, elsewhere) | outcomes


def _rule(seal: Seal) -> str | None:
    sealed = seal.sealed
    rules = (SEQUENTIAL, fixed_rule(len(sealed.seeds)))
    return str(sealed.measure.rule["name"]) if sealed.measure.rule in rules else None


def _sequential(
    claim: Hypothesis, gap: PairedGap | None, seeds: Sequence[int]
) -> tuple[str, Sequence[int]]:
    """Return the outcome by the pairs up to the first missing one, or up to the answer."""
    differences = dict(zip(gap.seeds, gap.differences, strict=True)) if gap else {}
    decision = decide(
        [differences[seed] for seed in takewhile(differences.__contains__, seeds)], claim
    )
    word = _WORDS.get(str(decision.answer), "undecided")
    return f"{word} after {decision.n} pairs in the order of their seeds", seeds[: decision.n]


def _fixed(
    gaps: Mapping[Hypothesis, PairedGap | None],
    seeds: Sequence[int],
    elsewhere: Iterable[Hypothesis],
) -> dict[Hypothesis, tuple[str, Sequence[int]]]:
    """Return the outcomes of hypotheses that are judged once, by all pairs.

    Args:
        gaps: {hypothesis: its gap, None where there is none}.
        seeds: Seeds of the seal.
        elsewhere: Hypotheses of other seals beside it.
    """
    whole = {claim: gap for claim, gap in gaps.items() if gap and set(gap.seeds) == set(seeds)}
    # What cannot be judged, and what other seals have, counts as the weakest test, so that leaving
    # it out, or apart, helps no other.
    tests = {_test(claim): 1.0 for claim in (*gaps, *elsewhere)}
    tests |= {_test(claim): p_value(claim, gap) for claim, gap in whole.items()}
    adjusted = dict(zip(tests, holm([*tests.values()]), strict=True))
    outcomes: dict[Hypothesis, tuple[str, Sequence[int]]] = {}
    for claim, gap in gaps.items():
        if claim not in whole:
            lacking = len(seeds) - (gap.n if gap else 0)
            outcomes[claim] = (
                f"not judged, {lacking} of its {len(seeds)} pairs of runs are not among these, or "
                "have no finite loss",
                (),
            )
            continue
        answer = _answer(claim, whole[claim], adjusted[_test(claim)])
        outcomes[claim] = (_WORDS.get(str(answer), "not decided by these runs"), seeds)
    return outcomes


def _test(claim: Hypothesis) -> tuple[str, str, tuple[float, float]]:
    """Return the key of a hypothesis's test; hypotheses of one key share it."""
    return claim.design, claim.baseline, claim.claimed


def _answer(claim: Hypothesis, gap: PairedGap, adjusted: float | None) -> str | None:
    answer = replace(gap, t_p_holm=adjusted).answer(claim)
    # The interval is not adjusted for the number of hypotheses; the test is.
    return None if answer == "yes" and (adjusted is None or adjusted >= LEVEL) else answer
