"""The verbs `compare` and `compare-losses`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from data_pipeline.io.files import refuse_unwritable
from laboratory.study.hypothesis import Question
from laboratory.sweep.verb import MarginOption, Match
from pretrain.ranks.devices import ask_for

if TYPE_CHECKING:
    from laboratory.compare.comparison import Comparison
    from laboratory.compare.report import ModelText


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run directories of finished runs.")],
    baseline: Annotated[
        str, typer.Option(help="The variant (or the name of a run) the others are compared with.")
    ] = "vanilla",
    subject: Annotated[
        list[str] | None,
        typer.Option(
            help="A setting that you vary on purpose, such as model.num_layers; repeatable."
        ),
    ] = None,
    match: Annotated[
        Match, typer.Option(help="Gap to the baseline at equal tokens, executed FLOPs, or seconds.")
    ] = "tokens",
    by: Annotated[
        Literal["settings", "names"],
        typer.Option(help="Variants are told apart by their settings, or by the runs' names."),
    ] = "settings",
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="Also show what the models write after this text; repeatable."),
    ] = None,
    sample_tokens: Annotated[int, typer.Option(min=1, help="Tokens after each --prompt.")] = 60,
    out: Annotated[
        Path, typer.Option(help="Directory for report.html and .md, comparison.json, plots, links.")
    ] = Path("comparison"),
) -> None:
    """Compare finished runs, several seeds of each variant: quality, convergence and cost.

    Example: python -m pretrain compare runs/* --baseline vanilla --out comparison
    """
    refuse_unwritable(out)
    from laboratory.runs.finished import leave_out_others

    directories, left_out = leave_out_others(runs)
    typer.echo(f"runs to compare: {len(directories)}")  # before imports that take seconds
    from shutil import get_terminal_size, which

    from rich.console import Console

    from laboratory.compare.compare_runs import compare_runs

    comparison = compare_runs(directories, baseline, subject or [], match, by=by)
    from laboratory.compare.report import compare_command, print_comparison, write_comparison

    command = compare_command(runs, comparison, out)
    command += [("--prompt", text) for text in prompt or []]
    command += [("--sample-tokens", str(sample_tokens))] if prompt else []
    events = write_comparison(
        comparison, out, command, _model_texts(comparison, prompt or [], sample_tokens)
    )
    print_comparison(comparison, Console(width=get_terminal_size((100, 24)).columns))
    if left_out:
        typer.echo(left_out)
    # A shell outside the environment finds no other.
    tensorboard = str(Path(sys.executable).with_name("tensorboard"))
    tensorboard = (
        "tensorboard"
        if which("tensorboard")
        else min(tensorboard, os.path.relpath(tensorboard), key=len)
    )
    typer.echo(f"TensorBoard: {tensorboard} --logdir {events}\nreport: {out / 'report.html'}")


def _model_texts(comparison: Comparison, prompts: list[str], tokens: int) -> list[ModelText]:
    """Return the texts that the first run of each variant writes after each prompt."""
    if not prompts:
        return []
    typer.echo(f"asking {len(comparison.variants)} models what they write")
    from laboratory.compare.report import ModelText
    from megatron_patches.engine.compat import prepare_imports

    # Has to come before anything imports megatron-core or DeepSpeed.
    prepare_imports()
    ask_for("cpu")
    from pretrain.export.trained_run import model_texts

    runs = [(variant.name, variant.runs[0]) for variant in comparison.variants]
    texts = model_texts([run.path for _, run in runs], prompts, tokens)
    return [
        ModelText(name, run.seed, prompt, text)
        for name, run in runs
        for prompt, text in zip(prompts, texts[run.path], strict=True)
    ]


def compare_losses(
    files: Annotated[
        list[str],
        typer.Argument(
            help="Tables with columns name, seed, loss (CSV, JSON lines, W&B exports), or metrics "
            "of one run each (trainer_state.json, event files of TensorBoard, CSV, JSON lines), "
            "named in their paths, as baseline-seed_1, or given as NAME:SEED=PATH."
        ),
    ],
    baseline: Annotated[
        str | None, typer.Option(help="Name the others are compared with; default: the first.")
    ] = None,
    metric: Annotated[
        str | None, typer.Option(help="Name of the loss; default: the one of held-out text.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Column with the names; default: name, model, variant, run.")
    ] = None,
    unit: Annotated[
        Literal["nats", "bits"] | None,
        typer.Option(help="nats a token or bits a byte; default: bits for a bpb."),
    ] = None,
    question: Annotated[
        Question | None, typer.Option(help="Are they better, worse by the margin, or within it?")
    ] = None,
    margin: MarginOption = 2.0,
    sequential: Annotated[
        bool, typer.Option("--sequential", help="Judge after every pair: you may look at any time.")
    ] = False,
    out: Annotated[
        Path, typer.Option(help="Directory for report.html and .md, comparison.json, the figure.")
    ] = Path("comparison"),
) -> None:
    """Compare losses of anybody's runs, paired by seed: intervals, tests, equivalence, a trial.

    Needs no run of this program.

    Example: python -m pretrain compare-losses losses.csv --question within --margin 1
    """
    from dataclasses import replace

    from laboratory.compare import losses
    from laboratory.study.report import finish

    comparison = losses.compare_losses(
        files,
        baseline,
        metric=metric,
        names=name,
        unit=unit,
        question=question,
        margin=margin,
        sequential=sequential,
    )
    command = ("python", "-m", "pretrain", *sys.argv[1:])
    finish(replace(comparison, command=command).document(), out, log_width=100)
