"""Command line for the job scripts in slurm/, not for people: `python -m pretrain.job VERB`.

The answer is one line of words on stdout; what people should read goes to stderr, which is the
job's log.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product, starmap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from data_pipeline.errors import DataError
from data_pipeline.io.home import expand_arguments
from data_pipeline.io.words import guard_output, shown_in_line
from pretrain.errors import UserError
from pretrain.job.job_kinds import JobKind, Tokenizing, Training, errors_in
from pretrain.job.segments import REQUEUE, Ending, Segments, SlurmJob
from pretrain.runs.directory import FINISHED, RunDirectory
from pretrain.runs.facts import read_facts, read_form
from pretrain.sweep.verb import MarginOption, Question

if TYPE_CHECKING:
    from pretrain.config.tree import Config
    from pretrain.sweep.plan import PlannedRun

USER_MISTAKE = 2

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__
)

MaxStalled = Annotated[int, typer.Option(envvar="ORA_MAX_STALLED_SEGMENTS", min=1)]
Nodes = Annotated[int, typer.Option(help="What Slurm gave.", min=1)]
RanksPerNode = Annotated[int, typer.Option(min=1)]
RunArgument = Annotated[Path, typer.Argument(help="The run's directory.")]


class _Problem(TypedDict):
    nodes: list[str]
    text: str


class _Verdict(TypedDict):
    """What is read of the doctor's report."""

    problems: list[_Problem]
    bad_nodes: list[str]


_VERDICT = TypeAdapter(_Verdict)


@app.command("begin-training")
def begin_training(
    config: str,
    overrides: Annotated[list[str] | None, typer.Argument()] = None,
    nodes: Nodes = 1,
    ranks_per_node: RanksPerNode = 1,
    max_stalled: MaxStalled = 3,
) -> None:
    """Refuse what can be refused before ranks start.

    Answer: `finished`, or `run NODES RANKS_PER_NODE RUN LOGS` with as many of the ranks as the run
    can use.
    """
    from pretrain.config.load import load_config
    from pretrain.data.open import check_inputs

    loaded = load_config(config, overrides or [])
    path = loaded.run_path.absolute()
    if _trained_steps(path) >= loaded.total_steps:
        _say(f"{path} is finished: nothing to do")
        typer.echo(FINISHED)
        return
    if re.search(r"[\s%\\]", str(path)):
        raise UserError(
            f"{path} has a blank, a percent sign or a backslash, which Slurm and the job scripts "
            "read in their own way; choose another run.name or run.directory"
        )
    used, idle = shape_to_use(Shape(nodes, ranks_per_node), Batches.of(loaded))
    check_inputs(loaded, used.ranks)
    logs = Segments(Training(path)).begin(SlurmJob.read(os.environ), max_stalled, used.ranks)
    if idle is not None:
        _say(idle)
    typer.echo(f"run {used.nodes} {used.ranks_per_node} {path} {logs}")


@app.command("end-training")
def end_training(
    run: RunArgument,
    exit_code: Annotated[int, typer.Option()],
    job_state: Annotated[str, typer.Option()],
    preempted: Annotated[bool, typer.Option("--preempted")] = False,
    asked: Annotated[bool, typer.Option("--asked")] = False,
    max_stalled: MaxStalled = 3,
) -> None:
    """Decide after the ranks ended. Answer: `finished`, `requeue` or `stop`."""
    work = Training(run)
    refusal = Segments(work).logs(SlurmJob.read(os.environ)) / "refused"
    refused = refusal.read_text().strip() if refusal.is_file() else ""
    _end(
        work,
        Ending(
            exit_code=exit_code,
            job_state=job_state,
            preempted=preempted,
            asked=asked,
            refused=refused,
        ),
        max_stalled,
    )


@app.command("sweep-runs")
def sweep_runs(
    grid: str,
    overrides: Annotated[list[str] | None, typer.Argument()] = None,
    task: Annotated[int, typer.Option(min=0)] = 0,
    num_tasks: Annotated[int, typer.Option(min=1)] = 1,
    nodes: Nodes = 1,
    ranks_per_node: RanksPerNode = 1,
    question: Annotated[Question | None, typer.Option()] = None,
    margin: MarginOption = 2.0,
) -> None:
    """List the runs of one task of a sweep, a line per run, config and overrides between tabs.

    With a question the grid is a trial's: the next run alone, or none once the answer is there.
    """
    from pretrain.config.sources import parse_overrides
    from pretrain.sweep.grid import read_grid
    from pretrain.sweep.plan import plan_sweep

    if task >= num_tasks:
        raise UserError(
            f"array task {task} of {num_tasks}: set ORA_NUM_TASKS, or give "
            f"--array=0-{num_tasks - 1}"
        )

    def ranks_of(config: Config) -> int:
        return shape_to_use(Shape(nodes, ranks_per_node), Batches.of(config))[0].ranks

    def answer(runs: Sequence[PlannedRun]) -> None:
        for run in runs:
            typer.echo("\t".join([run.base, *run.overrides]))

    def answer_the_next(waiting: Sequence[PlannedRun], _: Sequence[PlannedRun]) -> None:
        answer(waiting[:1])
        raise typer.Exit

    given = parse_overrides(overrides or [])
    share = slice(task, None, num_tasks)
    if question is None:
        answer(plan_sweep(read_grid(grid), None, given, ranks_of, check_data=True)[share])
        return
    from pretrain.sweep.trial import Trial, carry_out

    asked = Trial.of(
        read_grid(grid),
        base=None,
        overrides=given,
        ranks_of=ranks_of,
        question=question.value,
        margin=margin,
    )
    carry_out(asked.planned, answer_the_next, asked.claim, max_pairs=None, share=share)


@app.command("begin-tokenizing")
def begin_tokenizing(shards: Path, index: int, count: int, max_stalled: MaxStalled = 3) -> None:
    """Begin a task of a tokenize array. Answer: `run LOGS`."""
    work = Tokenizing(shards.absolute(), index, count)
    typer.echo(f"run {Segments(work).begin(SlurmJob.read(os.environ), max_stalled)}")


@app.command("end-tokenizing")
def end_tokenizing(
    shards: Path,
    index: int,
    count: int,
    exit_code: Annotated[int, typer.Option()],
    job_state: Annotated[str, typer.Option()],
    asked: Annotated[bool, typer.Option("--asked")] = False,
    max_stalled: MaxStalled = 3,
) -> None:
    """Decide after a task of a tokenize array ended. Answer: `finished`, `requeue` or `stop`."""
    work = Tokenizing(shards.absolute(), index, count)
    refused = "fix what the error above says" if exit_code == USER_MISTAKE else ""
    _end(work, Ending(exit_code, job_state, asked=asked, refused=refused), max_stalled)


@app.command("after-doctor")
def after_doctor(
    run: RunArgument,
    report: Annotated[Path, typer.Argument(help="The doctor's JSON.")],
    already: Annotated[
        str, typer.Option(help="Comma-separated nodes that the job leaves out now.")
    ] = "",
    most: Annotated[int, typer.Option(envvar="ORA_MAX_EXCLUDED_NODES", min=0)] = 4,
) -> None:
    """Name the nodes to leave out after a preflight that failed; none without a report.

    Exit code 2 where no other node would help.
    """
    try:
        verdict = read_form(report, _VERDICT)
    except UserError:
        return
    for problem in verdict["problems"]:
        _say(f"doctor: {', '.join(problem['nodes']) or 'all nodes'}: {problem['text']}")
    if not verdict["bad_nodes"]:
        raise UserError(
            "the preflight failed and no other node would help: fix it, then submit again "
            f"({report})"
        )
    names = [node for node in already.split(",") if node]
    segments = Segments(Training(run))
    typer.echo(
        ",".join(segments.exclude(SlurmJob.read(os.environ), verdict["bad_nodes"], names, most))
    )


@dataclass(frozen=True)
class Shape:
    """Ranks on nodes, the same number on each."""

    nodes: int
    ranks_per_node: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    def __str__(self) -> str:
        return f"{self.ranks} ranks ({self.nodes} x {self.ranks_per_node})"


@dataclass(frozen=True)
class Batches:
    """The sizes of a configuration that decide which numbers of ranks are possible."""

    global_batch: int
    micro_batch: int
    tensor_parallel: int

    @staticmethod
    def of(config: Config) -> Batches:
        return Batches(
            config.data.global_batch_size,
            config.data.micro_batch_size,
            config.parallel.tensor_model_parallel_size,
        )

    def misfit(self, ranks: int) -> str | None:
        """Return why this number of ranks is impossible; None: it is possible."""
        if ranks % self.tensor_parallel:
            key = "parallel.tensor_model_parallel_size"
            return f"{ranks} is not a multiple of {key}={self.tensor_parallel}"
        copies = ranks // self.tensor_parallel
        if self.global_batch % (self.micro_batch * copies):
            return (
                f"data.global_batch_size={self.global_batch} is not divisible by "
                f"data.micro_batch_size={self.micro_batch} times {copies} data-parallel ranks"
            )
        return None


def shape_to_use(given: Shape, batches: Batches) -> tuple[Shape, str | None]:
    """Return the largest part of a job's ranks that a run can use.

    Of shapes with the same number of ranks, first one whose tensor-parallel ranks share a node,
    then the one on the fewest nodes. The shape is `given` itself where nothing fits, because there
    are fewer ranks than one copy of the model needs: `resolve` refuses that.

    Args:
        given: the job's ranks.
        batches: sizes of the configuration.

    Returns:
        The shape, and the sentence about what is left idle; None if all is used, or nothing fits.
    """
    reason = batches.misfit(given.ranks)
    best = _largest_part(given, batches)
    if reason is None or best is None:
        return given, None
    sentence = f"trains on {best} of the job's {given}: {reason}"
    more = _largest_part(given, replace(batches, micro_batch=1)) or best
    if more.ranks > best.ranks:
        share = batches.global_batch * batches.tensor_parallel // more.ranks
        size = max(n for n in range(1, batches.micro_batch + 1) if share % n == 0)
        sentence += f"; with data.micro_batch_size={size} it would on {more}"
    return best, sentence


def _largest_part(given: Shape, batches: Batches) -> Shape | None:
    """Return the best possible part of a job's ranks, as `shape_to_use` ranks them; or None."""
    parts = product(range(1, given.nodes + 1), range(1, given.ranks_per_node + 1))
    possible = [shape for shape in starmap(Shape, parts) if batches.misfit(shape.ranks) is None]
    return max(
        possible,
        key=lambda s: (s.ranks, s.ranks_per_node % batches.tensor_parallel == 0, -s.nodes),
        default=None,
    )


def _trained_steps(run: Path) -> int:
    """Return the steps of a finished run, else 0."""
    directory = RunDirectory(run)
    return int(read_facts(directory.summary)["step"]) if directory.is_finished() else 0


def _end(work: JobKind, ending: Ending, max_stalled: int) -> None:
    segments = Segments(work)
    job = SlurmJob.read(os.environ)
    decision = segments.end(job, ending, max_stalled)
    if decision.action != FINISHED and ending.exit_code != 0:
        for sentence in errors_in(segments.logs(job)):
            _say(sentence)
    prefix = "" if decision.action in (FINISHED, REQUEUE) else "error: "
    _say(f"{prefix}{decision.reason}")
    typer.echo(decision.action)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


expand_arguments(app)


def main() -> None:
    """Run a verb; user errors are one sentence with exit code 2."""
    guard_output()
    try:
        app()
    except (UserError, DataError) as error:
        _say(f"error: {shown_in_line(str(error))}")
        sys.exit(2)


if __name__ == "__main__":
    main()
