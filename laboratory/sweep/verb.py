"""The verbs `sweep` and `trial`, and their output."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from data_pipeline.io.files import refuse_unwritable
from laboratory.study.hypothesis import Hypothesis, Question
from pretrain.config.schedule import last_stable_step
from pretrain.errors import UserError
from pretrain.ranks.output import outlive_output
from pretrain.runs.directory import RunDirectory

if TYPE_CHECKING:
    from laboratory.sweep.plan import PlannedRun
    from laboratory.sweep.running import Outcome

CORE_FLOPS = 3e10
"""FLOPs that one core of a server executes in a second, in models of a few million parameters."""
FIXED_N = "judged once, when all runs are finished"
"""Stopping rule of a sweep."""
MIN_WIDTH = 120  # so that a table in a log is not folded at 80 columns


GridArgument = Annotated[
    str, typer.Argument(help="A shipped grid (see `list grids`) or a YAML file.", metavar="GRID")
]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        help="Values of every run, over the grid's `set`.", metavar="[section.key=value]..."
    ),
]
BaseOption = Annotated[
    str | None, typer.Option(help="A config or YAML file, instead of the grid's base.")
]
JobsOption = Annotated[int, typer.Option(min=1, help="Runs at a time.")]
RanksOption = Annotated[int, typer.Option(min=1, help="Ranks of each run, on this machine.")]
TaskOption = Annotated[
    int | None,
    typer.Option(help="Which task of --num-tasks, from 0; default: the Slurm array's id."),
]
TasksOption = Annotated[
    int | None,
    typer.Option(help="Share the runs among this many tasks; task I has runs I, I+N, ..."),
]
MarginOption = Annotated[float, typer.Option(help="Percent of perplexity; 0: any difference.")]


Match = Literal["tokens", "flops", "seconds"]
"""Budget at which runs are compared."""


def sweep(
    grid: GridArgument,
    overrides: OverridesArgument = None,
    base: BaseOption = None,
    jobs: JobsOption = 1,
    local_ranks: RanksOption = 1,
    task: TaskOption = None,
    num_tasks: TasksOption = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Only runs with such names, as 'vanilla-seed_*'; repeatable.", metavar="PATTERN"
        ),
    ] = None,
    seal: Annotated[
        list[str] | None,
        typer.Option(
            help="Seal a hypothesis before the first run: 'orthogonal within 5% of vanilla'; "
            "repeatable."
        ),
    ] = None,
    match: Annotated[
        Match,
        typer.Option(
            help="Judge what is sealed, and compare, at equal tokens, executed FLOPs, or seconds."
        ),
    ] = "tokens",
    subject: Annotated[
        list[str] | None,
        typer.Option(help="A setting that you vary on purpose, as in `compare`."),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Train nothing; list the runs with state, settings and size."
        ),
    ] = False,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Then compare all runs with the first, and write the page beside them.",
        ),
    ] = False,
) -> None:
    """Train every run of a grid file; started again, skip what is finished and resume the rest.

    Exit code 0: all are finished; 1: some failed; 128 + signal number: stopped by it, with runs
    left.

    Example: python -m pretrain sweep a1_init --jobs 2 schedule.steps=100
    """
    from laboratory.sweep.running import SignalRelay, run_sweep

    # First of all: a signal while the plan is made must not be lost.
    outlive_output()
    signals = SignalRelay().install()
    from laboratory.study.sealed import Measure
    from laboratory.sweep.grid import read_grid
    from laboratory.sweep.plan import plan_sweep, seal_plan
    from pretrain.config.sources import parse_overrides

    share = _share(task, num_tasks)
    override_pairs = parse_overrides(overrides or [])
    hypotheses = [Hypothesis.parse(text) for text in seal or ()]
    if not (hypotheses or compare) and (subject or match != "tokens"):
        raise UserError(
            "--match and --subject are of what is sealed or compared; add --seal or --compare, or "
            "leave them out"
        )
    if hypotheses and (only or share != slice(None)):
        raise UserError(
            "--seal is for the whole grid: give it once with --dry-run and without --only and "
            "--num-tasks, then train without --seal"
        )
    if compare and (only or share != slice(None) or dry_run):
        raise UserError(
            "--compare is for the whole grid: leave out --only, --num-tasks and --dry-run, or "
            "compare the runs with `python -m pretrain compare`"
        )
    read = read_grid(grid)
    runs = plan_sweep(
        read,
        base,
        override_pairs,
        ranks_of=lambda _: local_ranks,
        check_data=not dry_run or bool(hypotheses),
        only=only or (),
    )
    if hypotheses:
        from laboratory.study.verdict import fixed_rule

        rule = fixed_rule(len({run.config.run.seed for run in runs}))
        asked = {"match": match, "subjects": subject or [], "rule": rule}
        sealed = seal_plan(
            read,
            base,
            override_pairs,
            runs,
            hypotheses=hypotheses,
            stopping_rule=FIXED_N,
            measure=Measure.model_validate(asked),
        )
        if sealed is None:
            raise UserError(
                "a run of this grid has begun, and a hypothesis is sealed before the first one; "
                "leave --seal out, or choose another `directory`"
            )
        typer.echo(f"sealed: {sealed.path}")
    runs = runs[share]
    if not runs:
        typer.echo("the grid has fewer runs than there are tasks: none is this one's")
        return
    if dry_run:
        _print_plan(runs)
        return
    typer.echo(_headline(runs, jobs, local_ranks))
    outcomes = run_sweep(runs, jobs, local_ranks, signals=signals, report=Progress(runs, jobs))
    _print_outcomes(outcomes)
    code = _conclusion(outcomes, signals.received)
    if compare and code == 0:
        code = _compare(runs, match, subject or ())
    raise typer.Exit(code)


def _compare(runs: Sequence[PlannedRun], match: Match, subjects: Sequence[str]) -> int:
    """Compare runs by the verb, the first run's variant being the baseline; return its exit code.

    The report is in `comparison` in the directory of the runs. Runs of one `schedule.flops` whose
    tokens differ are compared at equal FLOPs.
    """
    tokens = {run.config.tokens_per_step * run.config.total_steps for run in runs}
    flops = {run.config.schedule.flops for run in runs}
    if match == "tokens" and len(tokens) > 1 and len(flops) == 1 and None not in flops:
        match = "flops"
    out = runs[0].path.parent / "comparison"
    paths = [str(run.path) for run in runs]
    asked = [f"--baseline={runs[0].name}", f"--out={out}", f"--match={match}"]
    asked += [f"--subject={subject}" for subject in subjects]
    return subprocess.call([sys.executable, "-m", "pretrain", "compare", *paths, *asked])


def _share(task: int | None, num_tasks: int | None) -> slice:
    """Return the slice of runs of this task, by the options or a Slurm array's environment."""
    from data_pipeline.tokenizing.verbs import which_task

    chosen = which_task(task, num_tasks, os.environ)
    return slice(None) if chosen is None else slice(chosen.index, None, chosen.count)


def trial(
    grid: GridArgument,
    overrides: OverridesArgument = None,
    question: Annotated[
        Question,
        typer.Option(
            help="Is the second arm better or worse by more than the margin, or within ± it?"
        ),
    ] = "better",
    margin: MarginOption = 2.0,
    max_pairs: Annotated[
        int | None,
        typer.Option(min=5, max=100, help="At most this many; default: planned from the first 5."),
    ] = None,
    base: BaseOption = None,
    jobs: JobsOption = 1,
    local_ranks: RanksOption = 1,
    task: TaskOption = None,
    num_tasks: TasksOption = None,
    out: Annotated[Path, typer.Option(help="Directory for report.md and trial.json.")] = Path(
        "trial"
    ),
) -> None:
    """Train pairs of runs of a grid's two arms, baseline first, until a question is answered.

    Exit code 0: answered, or all pairs are made; 1: a run failed; 128 + signal number: stopped by
    it.

    Example: python -m pretrain trial grid.yaml --question within --margin 3 --jobs 2
    """
    refuse_unwritable(out)
    from laboratory.sweep.running import SignalRelay, run_sweep

    outlive_output()
    signals = SignalRelay().install()
    from laboratory.study.report import finish
    from laboratory.sweep.grid import read_grid
    from laboratory.sweep.trial import Trial
    from pretrain.config.sources import parse_overrides

    def train(waiting: Sequence[PlannedRun], runs: Sequence[PlannedRun]) -> None:
        now = waiting[:jobs]
        outcomes = run_sweep(now, jobs, local_ranks, signals=signals, report=Progress(runs, jobs))
        if not all(outcome.done for outcome in outcomes):
            raise typer.Exit(_conclusion(outcomes, signals.received))

    asked = Trial.of(
        read_grid(grid),
        base,
        parse_overrides(overrides or []),
        ranks_of=lambda _: local_ranks,
        question=question,
        margin=margin,
    )
    result = asked.carry_out(train, max_pairs, _share(task, num_tasks))
    decision = result.decision
    if decision.answer is None and decision.n < result.needed:
        typer.echo(
            f"nothing is left for this task; no answer after {decision.n} of {result.needed} pairs"
        )
        return
    finish(asked.document(result), out)


class Progress:
    """Console lines of a sweep: one when a run starts, one a minute, two when a run has ended."""

    def __init__(self, runs: Sequence[PlannedRun], jobs: int) -> None:
        self._jobs = jobs
        self._total = len(runs)
        self._steps = {run.name: _steps_left(run) for run in runs if run.standing != "finished"}
        self._ended = self._total - len(self._steps)
        self._started: dict[str, float] = {}
        self._seconds = 0.0  # of the runs that this sweep has finished, and their steps
        self._trained = 0

    def __call__(self, run: PlannedRun, outcome: Outcome | None) -> None:
        if outcome is None:
            typer.echo(f"{'started' if run.standing == 'new' else 'resumed'}  {run.name}")
            self._steps[run.name] = _steps_left(run)
            self._started[run.name] = time.monotonic()
            return
        if outcome.ending == "running":
            typer.echo(f"running  {run.name}: {outcome.detail}")
            return
        steps = self._steps.pop(run.name, 0)
        if outcome.ending == "busy":
            typer.echo(f"busy     {run.name}: {outcome.detail}; its end is waited for")
            return
        if outcome.ending == "finished":
            self._seconds += outcome.seconds
            self._trained += steps
        self._ended += 1
        typer.echo(
            f"{outcome.ending} {run.name}  ({self._ended} of {self._total}{self._time_left()})"
        )
        typer.echo(f"    {_result(outcome)}")

    def _time_left(self) -> str:
        """Return the time of the runs that have not ended, by the steps of those that finished."""
        if not self._trained or not self._steps:
            return ""
        now = time.monotonic()
        pace = self._seconds / self._trained
        left = [
            max(0.0, pace * steps - (now - self._started.get(name, now)))
            for name, steps in self._steps.items()
        ]
        return f", about {_clock(max(sum(left) / self._jobs, *left))} left"


def _steps_left(run: PlannedRun) -> int:
    """Return the steps to train, for a branch those of its decay if it has not begun."""
    total = run.config.total_steps
    done = RunDirectory(run.path).trained_steps()
    if run.standing == "new" and run.config.trunk is not None:
        done = min(last_stable_step(run.config.schedule, total), total - 1)
    return total - done


def _result(outcome: Outcome) -> str:
    if not outcome.done:
        return f"{outcome.detail}; log: {outcome.run.log}"
    loss, perplexity = outcome.validation()
    values = (
        f"validation loss {loss:.4f}, perplexity {perplexity:.2f} " if loss and perplexity else ""
    )
    return f"{values}in {_clock(outcome.seconds)}"


def _headline(runs: Sequence[PlannedRun], jobs: int, local_ranks: int) -> str:
    count = Counter(run.standing for run in runs)
    where = ", ".join(sorted({str(run.config.run.directory) for run in runs}))
    ranks = f"{local_ranks} rank{'s' if local_ranks > 1 else ''} each"
    return (
        f"{len(runs)} runs in {where}:\n{count['finished']} finished, {count['partial']} to "
        f"resume, {count['new']} to start; {jobs} at a time, {ranks}"
    )


def _print_plan(runs: Sequence[PlannedRun]) -> None:
    """Print the settings that all runs share, a row of each run, and what there is to train."""
    common = set.intersection(*(set(run.overrides) for run in runs)) if len(runs) > 1 else set()
    rows = []
    for run in runs:
        others = common | {f"run.name={run.name}"}
        own_settings = shlex.join(word for word in run.overrides if word not in others)
        tokens = run.config.tokens_per_step * run.config.total_steps
        flops = f"{run.config.total_flops:.2e}"
        rows.append((run.name, run.standing, own_settings, f"{tokens / 1e6:,.1f} M", flops))
    shared = shlex.join(word for word in runs[0].overrides if word in common)
    typer.echo(f"every run: {runs[0].base} {shared}".rstrip())
    header = ("run", "state", "settings of its own", "tokens", "FLOPs")
    _print_table(header, rows, text_columns=(0, 1, 2))
    waiting = [run for run in runs if run.standing != "finished"]
    left = sum(
        run.config.total_flops * _steps_left(run) / run.config.total_steps for run in waiting
    )
    typer.echo(
        f"{len(waiting)} of {len(runs)} runs to train: {left:.2e} FLOPs, about "
        f"{_clock(left / CORE_FLOPS)} on one core of a server; `plan` says how long one takes on "
        "GPUs"
    )


def _print_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], text_columns: Sequence[int]
) -> None:
    from rich.console import Console

    from pretrain.reporting.tables import Table, rich_table

    table = rich_table(Table(header, rows, text_columns), bare=True)
    width = shutil.get_terminal_size((MIN_WIDTH, 24)).columns
    Console(width=width, highlight=False, markup=False).print("", table, "", sep="\n")


def _print_outcomes(outcomes: Sequence[Outcome]) -> None:
    rows = []
    for outcome in outcomes:
        values = zip(outcome.validation(), (4, 2), strict=True)
        numbers = ["" if value is None else f"{value:.{digits}f}" for value, digits in values]
        seconds = _clock(outcome.seconds) if outcome.seconds else ""
        rows.append((outcome.run.name, outcome.ending, *numbers, seconds))
    header = ("run", "outcome", "validation loss", "perplexity", "time")
    _print_table(header, rows, text_columns=(0, 1))


def _conclusion(outcomes: Sequence[Outcome], received: Sequence[int]) -> int:
    """Print failures and remaining runs, and return the exit code."""
    for outcome in outcomes:
        if outcome.ending in ("failed", "busy"):
            typer.echo(
                f"{outcome.ending}: {outcome.run.name}: {outcome.detail}; log: {outcome.run.log}"
            )
    left = [outcome for outcome in outcomes if not outcome.done]
    if not left:
        typer.echo(f"all {len(outcomes)} runs are finished")
        return 0
    count = Counter(outcome.ending for outcome in left)
    listed = ", ".join(f"{number} {ending}" for ending, number in count.items())
    why = f"{signal.Signals(received[0]).name} received; " if received else ""
    typer.echo(
        f"{why}{len(left)} of {len(outcomes)} runs are left ({listed}); "
        "the same command continues with them"
    )
    return 128 + received[0] if received else 1


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
