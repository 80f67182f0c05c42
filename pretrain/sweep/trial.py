"""A trial: pairs of runs of two designs, one seed after the other, until a question is answered.

A trial is a sweep whose seeds grow. All follows from the run directories: started again, the trial goes on
where it was, and an answer once given stays, because differences count in the order of their seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from pretrain.errors import UserError
from pretrain.reporting.tables import Table
from pretrain.reporting.text import percent, perplexity
from pretrain.runs.directory import RunDirectory
from pretrain.runs.facts import read_facts
from pretrain.runs.finished import read_finished_run
from pretrain.runs.tags import STEP_SECONDS
from pretrain.study.report import Document
from pretrain.study.seal import Hypothesis, Seal, design_of
from pretrain.study.sequential import (
    FIRST,
    LAST,
    STOPPING_RULE,
    YES,
    Decision,
    bounds,
    decide,
    pairs_needed,
)
from pretrain.sweep.grid import Grid
from pretrain.sweep.plan import PlannedRun, plan_sweep, seal_plan

if TYPE_CHECKING:
    from pretrain.config.tree import Config


def growing(grid: Grid, pairs: int) -> Grid:
    """Return the grid with so many seeds: its own, then those after its largest; from 1 without any."""
    own = grid.content.seeds or []
    start = max(own, default=0) + 1
    seeds = [*own, *range(start, start + pairs)][:pairs]
    return replace(grid, content=grid.content.model_copy(update={"seeds": seeds}))


@dataclass(frozen=True)
class Trial:
    """A question about the two designs of a grid, how to plan its first pairs of runs, and its seal."""

    claim: Hypothesis
    planned: Callable[[int], list[PlannedRun]]
    seal: Seal | None

    @classmethod
    def of(
        cls,
        grid: Grid,
        base: str | None,
        overrides: Sequence[tuple[str, Any]],
        ranks_of: Callable[[Config], int],
        question: str,
        margin: float,
    ) -> Trial:
        """Plan the trial of a grid, and seal its question, unless a run has begun.

        Raises UserError: the grid has not two runs a seed.
        """
        whole = growing(grid, LAST)

        def planned(pairs: int) -> list[PlannedRun]:
            return plan_sweep(growing(whole, pairs), base, overrides, ranks_of, check_data=True)

        runs = planned(FIRST)
        if len(runs) != 2 * FIRST:
            raise UserError(
                f"grid {whole.source} has {len(runs) // FIRST} runs a seed; a trial needs two"
            )
        baseline, design = (design_of(run.name, run.config.run.seed) for run in runs[:2])
        claim = Hypothesis(design, question, margin, baseline)
        seeds = whole.content.seeds
        return cls(
            claim, planned, seal_plan(whole, base, overrides, runs, [claim], STOPPING_RULE, seeds)
        )


def carry_out(
    planned: Callable[[int], list[PlannedRun]],
    train: Callable[[Sequence[PlannedRun], Sequence[PlannedRun]], None],
    hypothesis: Hypothesis,
    max_pairs: int | None,
    share: slice,
) -> tuple[Decision, int, list[PlannedRun]]:
    """Train runs until the question is answered, or nothing is left to train.

    Args:
        planned: returns the runs of the first pairs, baseline first in each, with their standing now.
        train: trains the first of these runs that are waiting; the others are for its progress line.
        max_pairs: None: planned from the spread of the first pairs, which the test allows at any time.
        share: this task's part of the runs.

    Returns the decision, the number of pairs planned, and the runs of these.
    """
    runs = planned(max_pairs or (FIRST if share == slice(None) else LAST))
    while True:
        differences = _differences(runs)
        if max_pairs is None and len(differences) >= FIRST:
            needed = pairs_needed(decide(differences[:FIRST], hypothesis).sd, hypothesis)
            runs = planned(needed)[: 2 * needed]
            differences = _differences(runs)
        decision = decide(differences, hypothesis)
        waiting = [run for run in runs[share] if run.standing != "finished"]
        if decision.answer is not None or not waiting:
            return decision, len(runs) // 2, runs
        train(waiting, runs)
        runs = planned(len(runs) // 2)


def _differences(runs: Sequence[PlannedRun]) -> list[float]:
    """Return loss of the second minus loss of the first of each pair, up to the first unfinished pair."""
    found: list[float] = []
    for pair in zip(runs[::2], runs[1::2], strict=True):
        if {run.standing for run in pair} != {"finished"}:
            break
        first, second = (
            read_facts(RunDirectory(r.path).summary)["validation"]["loss"] for r in pair
        )
        if first is None or second is None:
            raise UserError(
                f"{pair[0].path} or {pair[1].path} has no finite validation loss; no trial can use it"
            )
        found.append(second - first)
    return found


def verdict(claim: Hypothesis, by: Decision, needed: int, cost: str) -> str:
    """Return the outcome of a trial as one sentence."""
    within = claim.question == "within"
    asked = f"within ± {claim.margin:g} % of" if within else f"{claim.question} than"
    no = "No" if within else f"No, not by {claim.margin:g} %"
    answer = {"yes": "Yes", "no": no, None: f"Undecided, and all {needed} planned pairs are made"}[
        by.answer
    ]
    return (
        f"Is {claim.design} {asked} {claim.baseline}? {answer}: after n = {by.n} pairs its perplexity is "
        f"{percent(perplexity(by.mean))} (interval valid at any time {percent(perplexity(by.low))} to "
        f"{percent(perplexity(by.high))}, each end wrong in at most 5 % of trials; "
        f"margin {claim.margin:g} %); {cost}."
    )


def trial_document(
    claim: Hypothesis, by: Decision, needed: int, runs: Sequence[PlannedRun], seal: Seal | None
) -> Document:
    """Return verdict, seal and pairs as page, JSON and terminal output; `runs` are those that count."""
    done = [read_finished_run(run.path) for run in runs]
    tokens, seconds = sum(run.result.tokens for run in done), 0.0
    for run in done:
        seconds += (
            float(run.curves[STEP_SECONDS].mean())
            * run.result.steps
            * run.environment["world_size"]
        )
    cost = (
        f"it cost {len(done)} runs, {tokens:,} tokens, {seconds / 3600:.2f} hours of a rank's steps"
    )
    sentence = verdict(claim, by, needed, cost)
    outcome = {"yes": "HIT", "no": "MISS", None: "undecided"}[by.answer]
    sealed = "Not sealed: runs of this grid had begun before this question was asked of them."
    if seal is not None:
        sealed = f"{seal.statement(done)} Hypothesis '{claim}': {outcome}."
    differences, rows = _differences(runs), []
    for n, difference in enumerate(differences, start=1):
        pair = done[2 * n - 2 : 2 * n]
        losses = (f"{run.result.validation_loss:.4f}" for run in pair)
        ends = ("–" if n < FIRST else f"{end:+.4f}" for end in bounds(differences[:n], YES))
        rows.append((str(n), str(pair[0].seed), *losses, f"{difference:+.4f}", *ends))
    table = Table(
        ("pair", "seed", claim.baseline, claim.design, "difference", "gap from", "to"), rows, ()
    )
    content = {
        "verdict": sentence,
        "hypothesis": asdict(claim),
        **asdict(by),
        "planned_pairs": needed,
        "differences": differences,
        "runs": [str(run.path) for run in runs],
        "cost": {"runs": len(done), "tokens": tokens, "rank_seconds": seconds},
        "seal": None if seal is None else str(seal.path),
    }
    rule = f"Rule: {STOPPING_RULE}; losses are of held-out text, in nats per token."
    page = (f"# Trial: {claim}", sentence, sealed, table, rule)
    return Document(page, content, (sentence, sealed), content_file="trial.json")
