"""Command line for the job scripts in slurm/, not for people: `python -m pretrain.job VERB`.

The answer is one line of words on stdout; text for people goes to stderr, which is the job's log.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Annotated

import typer
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from data_pipeline.errors import DataError
from data_pipeline.io.home import expand_arguments, unset_empty_variables
from data_pipeline.io.words import guard_output, shown_in_line
from pretrain.errors import UserError
from pretrain.job.job_kinds import JobKind, Tokenizing, Training, errors_in
from pretrain.job.segments import REFUSED, REQUEUE, Ending, Segments, SlurmJob
from pretrain.job.shape import Batches, Shape, shape_to_use
from pretrain.runs.directory import FINISHED, RunDirectory
from pretrain.runs.facts import read_facts, read_form

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
    """The parts of the doctor's report that are read."""

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
    """Refuse what can be refused before the ranks start.

    Answer: `finished`, or `run NODES RANKS_PER_NODE RUN LOGS` with as many ranks as the run can
    use.
    """
    from pretrain.config.load import load_config
    from pretrain.data.open import check_inputs

    loaded = load_config(config, overrides or [])
    path = loaded.run_path.absolute()
    run = RunDirectory(path)
    if run.is_finished() and read_facts(run.summary)["step"] >= loaded.total_steps:
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
    refusal = Segments(work).logs(SlurmJob.read(os.environ)) / REFUSED
    refused = refusal.read_text().strip() if refusal.is_file() else ""
    ending = Ending(exit_code, job_state, preempted=preempted, asked=asked, refused=refused)
    _end(work, ending, max_stalled)


@app.command("export-at-end")
def export_at_end(run: RunArgument) -> None:
    """Export a finished run that asks for it (checkpoint.export_at_end); a failure is a warning."""
    from pretrain.config.load import load_config
    from pretrain.export.run_exports import export_at_end as export_finished

    directory = RunDirectory(run)
    if load_config(str(directory.config), []).checkpoint.export_at_end:
        export_finished(directory, directory.state() or "")


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
    unset_empty_variables()
    guard_output()
    try:
        app()
    except (UserError, DataError) as error:
        _say(f"error: {shown_in_line(str(error))}")
        sys.exit(2)
    except OSError as error:
        if error.filename is None:
            raise
        _say(f"error: cannot use {shown_in_line(str(error.filename))}: {error.strerror}")
        sys.exit(2)


if __name__ == "__main__":
    main()
