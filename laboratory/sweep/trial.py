"""A trial: pairs of runs of two designs, one seed after the other, until a question is answered.

A trial is a sweep whose seeds grow. All follows from the run directories: started again, the trial
continues where it was, and an answer once given stays, because differences count in the order of
their seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from laboratory.runs.finished import FinishedRun, read_finished_run, read_summary
from laboratory.study.hypothesis import Hypothesis
from laboratory.study.report import Document
from laboratory.study.seal import Seal, read_seals
from laboratory.study.sealed import Match, Measure, design_of
from laboratory.study.sequential import (
    FIRST,
    LAST,
    STOPPING_RULE,
    Decision,
    decide,
    look_table,
    pairs_needed,
    verdict,
)
from laboratory.study.verdict import SEQUENTIAL, gap_at_end, verdicts
from laboratory.sweep.grid import Grid
from laboratory.sweep.plan import PlannedRun, plan_sweep, seal_plan
from pretrain.errors import UserError
from pretrain.runs.directory import RunDirectory
from pretrain.runs.tags import STEP_SECONDS

if TYPE_CHECKING:
    from pretrain.config.tree import Config


def growing(grid: Grid, pairs: int) -> Grid:
    """Return the grid with more seeds, or fewer.

    Args:
        grid: Grid file; its seeds come first, then the numbers after its largest or from 1.
        pairs: Number of seeds.
    """
    grid_seeds = grid.content.seeds or []
    start = max(grid_seeds, default=0) + 1
    seeds = [*grid_seeds, *range(start, start + pairs)][:pairs]
    return replace(grid, content=grid.content.model_copy(update={"seeds": seeds}))


@dataclass(frozen=True)
class Trial:
    """A question about the two designs of a grid.

    Attributes:
        claim: Claim to judge.
        planned: Function that returns the runs of the first pairs, with their standing now.
        seal: None where a run had begun before the question was asked.
    """

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

        Args:
            grid: Grid with two runs a seed, the baseline first.
            base: A config or YAML file, instead of the grid's base.
            overrides: (key, value) of every run.
            ranks_of: Function that returns the number of ranks of a run.
            question: better, worse or within.
            margin: Percent of perplexity.

        Raises:
            UserError: the grid does not have two runs a seed, or has branches.
        """

        def planned(pairs: int) -> list[PlannedRun]:
            grown = growing(grid, pairs)
            return plan_sweep(grown, base, overrides, ranks_of=ranks_of, check_data=True)

        runs = planned(FIRST)
        if len(runs) != 2 * FIRST:
            raise UserError(
                f"grid {grid.source} has {len(runs) // FIRST} runs a seed; a trial needs two"
            )
        if any(run.config.trunk is not None for run in runs):
            raise UserError(
                f"grid {grid.source} has branches, and the runs of a trial train whole; leave "
                "schedule.branch_from out"
            )
        baseline, design = (design_of(run.name, run.config.run.seed) for run in runs[:2])
        claim = Hypothesis(design, question, margin, baseline)
        match = _match([run.config for run in runs])
        seal = seal_plan(
            grid,
            base,
            overrides,
            runs,
            hypotheses=[claim],
            stopping_rule=STOPPING_RULE,
            measure=Measure(match=match, subjects=[], rule=SEQUENTIAL),
            seeds=growing(grid, LAST).content.seeds,
        )
        return cls(claim, planned, seal)

    def carry_out(
        self,
        train: Callable[[Sequence[PlannedRun], Sequence[PlannedRun]], None],
        max_pairs: int | None,
        share: slice,
    ) -> Result:
        """Train runs until the question is answered, or nothing is left to train.

        Args:
            train: Function that trains the first of the waiting runs, its first argument; all
                runs, its second, are for a progress line.
            max_pairs: Most pairs; None: planned from the spread of the first pairs, which the test
                allows at any time.
            share: Part of the runs that is this task's.
        """
        runs = self.planned(max_pairs or (FIRST if share == slice(None) else LAST))
        while True:
            differences = _differences(runs)
            if max_pairs is None and len(differences) >= FIRST:
                needed = pairs_needed(decide(differences[:FIRST], self.claim).sd, self.claim)
                runs = self.planned(needed)
                differences = _differences(runs)
            decision = decide(differences, self.claim)
            waiting = [run for run in runs[share] if run.standing != "finished"]
            if decision.answer is not None or not waiting:
                return Result(decision, len(runs) // 2, runs)
            train(waiting, runs)
            runs = self.planned(len(runs) // 2)

    def document(self, result: Result) -> Document:
        """Return verdict, seal and pairs as page, JSON and terminal output."""
        by = result.decision
        runs = result.runs[: 2 * by.n]  # those after the answer do not count
        done = [read_finished_run(run.path) for run in runs]
        tokens = sum(run.result.tokens for run in done)
        seconds = sum(map(_rank_seconds, done))
        cost = (
            f"it cost {len(done)} runs, {tokens:,} tokens, {seconds / 3600:.2f} hours of a rank's "
            "steps"
        )
        undecided = f"Undecided, and all {result.needed} planned pairs are made"
        sentence = f"{verdict(self.claim, by, undecided)}; {cost}."
        sealed = "Not sealed: runs of this grid had begun before this question was asked of them."
        read = read_seals(run.path.resolve().parent for run in done)
        if self.seal is not None:
            lost = read.lost.get(self.seal.directory, ())
            sealed = verdicts(replace(self.seal, lost=lost), done, gap_at_end) or sealed
        table = look_table(self.claim, [run.seed for run in done[::2]], _losses(runs))
        rule = f"Rule: {STOPPING_RULE}; losses are of held-out text, in nats per token."
        return Document(
            page=(f"# Trial: {self.claim}", sentence, sealed, *read.problems, table, rule),
            content={
                "verdict": sentence,
                "hypothesis": asdict(self.claim),
                **asdict(by),
                "planned_pairs": result.needed,
                "differences": _differences(runs),
                "runs": [str(run.path) for run in runs],
                "cost": {"runs": len(done), "tokens": tokens, "rank_seconds": seconds},
                "seal": None if self.seal is None else str(self.seal.path),
            },
            summary=(sentence, sealed, *read.problems),
            content_file="trial.json",
        )


def _match(configs: Sequence[Config]) -> Match:
    """Return the quantity that all runs have used equally at their end."""
    flops = {config.schedule.flops for config in configs}
    if len(flops) == 1 and flops != {None}:
        return "flops"
    tokens = {config.total_steps * config.tokens_per_step for config in configs}
    return "tokens" if len(tokens) == 1 else "steps"


@dataclass(frozen=True)
class Result:
    """State of a trial when nothing is left to train.

    Attributes:
        decision: Decision by the pairs that are finished.
        needed: Pairs that were planned.
        runs: Runs of these pairs, baseline first in each.
    """

    decision: Decision
    needed: int
    runs: list[PlannedRun]


def _losses(runs: Sequence[PlannedRun]) -> list[tuple[float, float]]:
    """Return the losses of each pair, baseline first, up to the first unfinished pair."""
    losses: list[tuple[float, float]] = []
    for pair in zip(runs[::2], runs[1::2], strict=True):
        if {run.standing for run in pair} != {"finished"}:
            break
        first, second = (read_summary(RunDirectory(run.path))["validation"]["loss"] for run in pair)
        if first is None or second is None:
            raise UserError(
                f"{pair[0].path} or {pair[1].path} has no finite validation loss; "
                "no trial can use it"
            )
        losses.append((first, second))
    return losses


def _differences(runs: Sequence[PlannedRun]) -> list[float]:
    """Return the second's loss minus the first's of each pair, up to the first unfinished pair."""
    return [second - first for first, second in _losses(runs)]


def _rank_seconds(run: FinishedRun) -> float:
    """Return the seconds of all steps, summed over ranks."""
    seconds = float(run.curves[STEP_SECONDS].mean()) * run.result.steps
    return seconds * run.environment["world_size"]
