"""Command line for slurm/sweep.sh, not for people: `python -m laboratory.slurm sweep-runs`.

The answer is on stdout, a line of words a run; what people should read goes to stderr, which is the
job's log.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from data_pipeline.errors import DataError
from data_pipeline.io.home import expand_arguments
from data_pipeline.io.words import guard_output, shown_in_line
from laboratory.study.hypothesis import Question
from laboratory.sweep.verb import MarginOption
from pretrain.errors import UserError
from pretrain.job.shape import Batches, Shape, shape_to_use

if TYPE_CHECKING:
    from laboratory.sweep.plan import PlannedRun
    from pretrain.config.tree import Config

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__
)


@app.callback()
def _program() -> None:
    """Keep the name of the only verb, which Typer would drop otherwise."""


@app.command("sweep-runs")
def sweep_runs(
    grid: str,
    overrides: Annotated[list[str] | None, typer.Argument()] = None,
    task: Annotated[int, typer.Option(min=0)] = 0,
    num_tasks: Annotated[int, typer.Option(min=1)] = 1,
    nodes: Annotated[int, typer.Option(help="What Slurm gave.", min=1)] = 1,
    ranks_per_node: Annotated[int, typer.Option(min=1)] = 1,
    question: Annotated[Question | None, typer.Option()] = None,
    margin: MarginOption = 2.0,
) -> None:
    """List the runs of one task of a sweep, a line per run, config and overrides between tabs.

    With a question the grid is a trial's: the next run alone, or none once the answer is there.
    """
    from laboratory.sweep.grid import read_grid
    from laboratory.sweep.plan import plan_sweep
    from pretrain.config.sources import parse_overrides

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

    # Only the next run: its outcome decides whether another is needed.
    def answer_the_next(waiting: Sequence[PlannedRun], _: Sequence[PlannedRun]) -> None:
        answer(waiting[:1])
        raise typer.Exit

    override_pairs = parse_overrides(overrides or [])
    share = slice(task, None, num_tasks)
    if question is None:
        answer(plan_sweep(read_grid(grid), None, override_pairs, ranks_of, check_data=True)[share])
        return
    from laboratory.sweep.trial import Trial

    asked = Trial.of(
        read_grid(grid),
        base=None,
        overrides=override_pairs,
        ranks_of=ranks_of,
        question=question,
        margin=margin,
    )
    asked.carry_out(answer_the_next, None, share)


expand_arguments(app)


def main() -> None:
    """Run the verb; a user's mistake is one sentence with exit code 2."""
    guard_output()
    try:
        app()
    except (UserError, DataError) as error:
        print(f"error: {shown_in_line(str(error))}", file=sys.stderr, flush=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
