"""The verb `trial`: pairs of runs of two designs, one seed after the other, until a question is answered.

A trial is a sweep whose seeds grow. All follows from the run directories: started again, the trial goes on
where it was, and an answer once given stays, because differences count in the order of their seeds.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pretrain.errors import UserError

if TYPE_CHECKING:
    from pretrain.study.report import Document
    from pretrain.study.seal import Hypothesis, Seal
    from pretrain.study.sequential import Decision
    from pretrain.sweep.grid import Grid
    from pretrain.sweep.plan import PlannedRun


class Question(str, Enum):
    """Question that a trial answers, about the perplexity of the second design against the first."""

    BETTER = "better"
    WORSE = "worse"
    WITHIN = "within"


def trial(
    grid: Annotated[
        str, typer.Argument(help="A grid file with two runs a seed, baseline first.", metavar="GRID")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Values of every run, over the grid's `set`.", metavar="[section.key=value]..."),
    ] = None,
    question: Annotated[
        Question, typer.Option(help="Is the second design better, worse, or within ± the margin?")
    ] = Question.BETTER,
    margin: Annotated[float, typer.Option(help="Percent of perplexity that matters.")] = 2.0,
    max_pairs: Annotated[
        int | None, typer.Option(min=5, max=100, help="At most so many; default: planned from the first 5.")
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="A config or YAML file, instead of the grid's base.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 1,
    local_ranks: Annotated[int, typer.Option(min=1, help="Ranks of each run, on this machine.")] = 1,
    task: Annotated[
        int | None, typer.Option(help="Which task of --num-tasks, from 0; default: the Slurm array's id.")
    ] = None,
    num_tasks: Annotated[
        int | None, typer.Option(help="Share the runs among this many tasks, as `sweep` does.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Directory for report.md and trial.json.")] = Path("trial"),
) -> None:
    """Train pairs of runs until the question is answered, judged after every pair without peeking wrongly.

    Exit code 0: answered, or all pairs are made; 1: a run failed; 128 + signal number: stopped by it.

    Example: python -m pretrain trial designs.yaml --question within --margin 3 --jobs 2
    """
    from pretrain.sweep.running import SignalRelay, run_sweep

    signals = SignalRelay().install()
    from data_pipeline.tokenizing.verbs import which_task
    from pretrain.config.sources import parse_overrides
    from pretrain.study.report import finish
    from pretrain.study.seal import Hypothesis, design_of
    from pretrain.study.sequential import LAST, STOPPING_RULE, decide, pairs_needed
    from pretrain.sweep.grid import read_grid
    from pretrain.sweep.plan import plan_sweep, seal_plan
    from pretrain.sweep.verb import SweepLines, conclude

    chosen = which_task(task, num_tasks, os.environ)
    given, whole = parse_overrides(overrides or []), _growing(read_grid(grid), LAST)
    seeds = whole.content.seeds or []

    def planned(pairs: int) -> list[PlannedRun]:
        return plan_sweep(_growing(whole, pairs), base, given, lambda _: local_ranks, check_data=True)

    runs = planned(5)
    if len(runs) != 10:
        raise UserError(f"grid {whole.source} has {len(runs) // 5} runs a seed; a trial needs two")
    second, first = (design_of(run.name, run.config.run.seed) for run in (runs[1], runs[0]))
    hypothesis = Hypothesis.of(second, question.value, margin, first)
    seal = seal_plan(whole, base, given, runs, [hypothesis], STOPPING_RULE, seeds)
    while True:
        differences = _differences(runs)
        pilot = decide(differences[:5], hypothesis) if len(differences) >= 5 else None
        needed = max_pairs or (5 if chosen is None else LAST)
        if pilot is not None and max_pairs is None:
            needed = pairs_needed(pilot.sd, hypothesis)
        if len(runs) != 2 * needed:
            runs = planned(needed)
            differences = _differences(runs)
        decision = decide(differences[:needed], hypothesis)
        own = runs if chosen is None else runs[chosen.index :: chosen.count]
        waiting = [run for run in own if run.standing != "finished"][:jobs]
        if decision.answer is not None or not waiting:
            break
        lines = SweepLines(runs)
        outcomes = run_sweep(waiting, jobs, local_ranks, signals, lines)
        if not all(outcome.done for outcome in outcomes):
            raise typer.Exit(conclude(outcomes, signals.received))
        runs = planned(needed)
        typer.echo(_standing(decide(_differences(runs), hypothesis), hypothesis, needed))
    if decision.answer is None and decision.n < needed:
        typer.echo(
            f"this task has no run left; {decision.n} of {needed} pairs are finished, and no answer yet"
        )
        return
    result = Trial(hypothesis, decision, needed, tuple(runs[: 2 * decision.n]), tuple(differences), seal)
    finish(result.document(), out)


def _growing(grid: Grid, pairs: int) -> Grid:
    """Return the grid with so many seeds: its own, then those after its largest; from 1 without any."""
    own = grid.content.seeds or []
    seeds = [*own, *range(max(own, default=0) + 1, max(own, default=0) + 1 + pairs)][:pairs]
    return replace(grid, content=grid.content.model_copy(update={"seeds": seeds}))


def _differences(runs: Sequence[PlannedRun]) -> list[float]:
    """Return loss of the second minus loss of the first of each pair, up to the first unfinished pair."""
    found: list[float] = []
    for first, second in zip(runs[::2], runs[1::2], strict=True):
        if not first.standing == second.standing == "finished":
            break
        losses = [_loss(run) for run in (first, second)]
        found.append(losses[1] - losses[0])
    return found


def _loss(run: PlannedRun) -> float:
    from pretrain.runs.directory import RunDirectory

    value = json.loads(RunDirectory(run.path).summary.read_text())["validation"]["loss"]
    if not isinstance(value, float):
        raise UserError(
            f"{run.path} ended with a validation loss that is not finite: the trial cannot use it"
        )
    return value


def _standing(decision: Decision, hypothesis: Hypothesis, needed: int) -> str:
    """Return the trial's state as one line."""
    where = "" if math.isinf(decision.low) else f", gap between {decision.low:+.4f} and {decision.high:+.4f}"
    return (
        f"{hypothesis}: {decision.answer or 'undecided'} after {decision.n} of at most {needed} pairs{where}"
    )


@dataclass(frozen=True)
class Trial:
    """An ended trial: the runs of the pairs that count, and the differences of all finished pairs."""

    hypothesis: Hypothesis
    decision: Decision
    needed: int
    runs: Sequence[PlannedRun]
    differences: Sequence[float]
    seal: Seal | None

    def sentence(self, cost: str) -> str:
        """Return the verdict."""
        from pretrain.reporting.text import percent

        by, claim = self.decision, self.hypothesis
        words = {"yes": "yes", "no": "no", None: f"undecided, and all {self.needed} planned pairs are made"}
        link = "within ±" if claim.question == "within" else f"{claim.question} than"
        asked = f"{link}{claim.margin:g} % of" if claim.question == "within" else link
        bounds = f"{percent(math.exp(by.low))} to {percent(math.exp(by.high))}"
        return (
            f"Is {claim.design} {asked} {claim.baseline}? {words[by.answer].capitalize()}: after n = {by.n} "
            f"pairs its perplexity is {percent(math.exp(by.mean))} (interval valid at any time: {bounds}, "
            f"each end wrong in at most 5 % of trials; margin {claim.margin:g} %); {cost}."
        )

    def document(self) -> Document:
        """Return verdict, pairs and seal as page, JSON and terminal output."""
        from pretrain.reporting.tables import Table
        from pretrain.runs.finished import read_finished_run
        from pretrain.runs.tags import STEP_SECONDS
        from pretrain.study.report import Document
        from pretrain.study.sequential import STOPPING_RULE, YES, bounds

        done = [read_finished_run(run.path) for run in self.runs]
        tokens = sum(run.result.tokens for run in done)
        hours = sum(
            float(run.curves[STEP_SECONDS].mean()) * run.result.steps * run.environment["world_size"] / 3600
            for run in done
        )
        cost = f"it cost {len(done)} runs, {tokens:,} tokens, {hours:.2f} hours of a rank's steps"
        sealed = "Not sealed: runs of this grid had begun before this question was asked of them."
        if self.seal is not None:
            outcome = {"yes": "HIT", "no": "MISS", None: "undecided"}[self.decision.answer]
            sealed = f"{self.seal.statement(done)} Hypothesis '{self.hypothesis}': {outcome}."
        rows = []
        for n, difference in enumerate(self.differences[: self.decision.n], start=1):
            low, high = bounds(self.differences[:n], YES)
            interval = ("–", "–") if math.isinf(low) else (f"{low:+.4f}", f"{high:+.4f}")
            seed = self.runs[2 * n - 1].config.run.seed
            losses = (f"{run.result.validation_loss:.4f}" for run in done[2 * n - 2 : 2 * n])
            rows.append((str(n), str(seed), *losses, f"{difference:+.4f}", *interval))
        names = (self.hypothesis.baseline, self.hypothesis.design)
        table = Table(("pair", "seed", *names, "difference", "gap from", "to"), rows, ())
        content: dict[str, Any] = {
            "hypothesis": asdict(self.hypothesis),
            **asdict(self.decision),
            "planned_pairs": self.needed,
            "differences": list(self.differences),
            "runs": [str(run.path) for run in self.runs],
            "cost": {"runs": len(done), "tokens": tokens, "rank_hours": hours},
            "seal": None if self.seal is None else str(self.seal.path),
            "verdict": self.sentence(cost),
        }
        rule = f"Rule: {STOPPING_RULE}; losses are of held-out text, in nats per token."
        page = (f"# Trial: {self.hypothesis}", self.sentence(cost), sealed, table, rule)
        return Document(page, content, (self.sentence(cost), sealed), content_file="trial.json")
