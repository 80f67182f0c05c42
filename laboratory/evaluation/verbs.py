"""`python -m pretrain evaluate VERB`: each writes report.md, report.json and PNGs into --out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from data_pipeline.io.files import refuse_unwritable
from laboratory.finetuning.verbs import Baseline, Models, TrustCode, glue, reservoir
from pretrain.errors import UserError

if TYPE_CHECKING:
    from laboratory.evaluation.heads.trained_model import TrainedModel
    from laboratory.runs.finished import FinishedRun
    from pretrain.ranks.groups import ParallelContext

Measured = TypeVar("Measured")

evaluate = typer.Typer(
    no_args_is_help=True,
    help="Experiments on finished runs, and on the method itself; each says whether its criterion "
    "held. Downstream tasks, compared as by `compare`.",
)
RunsArgument = Annotated[
    list[Path], typer.Argument(help="Run directories of finished runs, of any parallel layout.")
]
Out = Annotated[Path, typer.Option(help="Directory for report.md, report.json and plots.")]


@evaluate.command()
def tasks(
    runs: Models,
    names: Annotated[
        str,
        typer.Option("--tasks", help="Tasks, groups and tags of lm-evaluation-harness, by commas."),
    ],
    baseline: Baseline = None,
    include_path: Annotated[
        Path | None,
        typer.Option(
            help="Directory of task files (YAML) of your own; they win over the harness's."
        ),
    ] = None,
    num_fewshot: Annotated[
        int | None,
        typer.Option(min=0, help="Worked examples before each item; default: as the task says."),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Only the first items of each task, this many, to try it out."),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 16,
    step: Annotated[
        int | None,
        typer.Option(min=0, help="Of every run's checkpoint; default: the newest complete one."),
    ] = None,
    trust_code: TrustCode = False,
    out: Annotated[
        Path,
        typer.Option(
            help="Directory for the report and for results, which are not measured again."
        ),
    ] = Path("evaluation/tasks"),
) -> None:
    """Downstream tasks by lm-evaluation-harness (extra `eval`), compared over seeds and over items.

    Example: python -m pretrain evaluate tasks runs/* --tasks blimp,arc_easy --out tasks
    """
    task_names = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    if not task_names:
        raise UserError("--tasks names no task; give some, such as --tasks lambada_openai,arc_easy")
    refuse_unwritable(out)
    from laboratory.runs.finished import leave_out_others
    from laboratory.study.report import finish
    from laboratory.study.seeds import named_apart
    from pretrain.ranks.devices import use_cuda

    kept, left_out = leave_out_others(runs, models=True)
    if left_out:
        typer.echo(left_out, err=True)
    from laboratory.evaluation.tasks.harness import (
        Request,
        evaluate_models,
        load_manager,
        require_harness,
    )

    versions = require_harness()
    manager = load_manager(task_names, include_path)
    from laboratory.evaluation.tasks.report import tasks_document
    from laboratory.finetuning.models import group_models, open_pretrained

    models = named_apart([open_pretrained(path, trust_code, step) for path in kept])
    groups = group_models(models, baseline)
    request = Request(
        names=task_names,
        shots=num_fewshot,
        limit=limit,
        batch_size=batch_size,
        device="cuda" if use_cuda() else "cpu",
        results=out / "results",
    )
    scores, facts = evaluate_models(models, manager, request)
    document = tasks_document(groups, scores, {"versions": versions, "tasks": facts}, limit)
    finish(document, out, log_width=100)


@evaluate.command()
def diversity(
    runs: RunsArgument,
    out: Out = Path("evaluation/diversity"),
    samples: Annotated[int, typer.Option(min=1, help="Held-out samples of each source.")] = 8,
    cosine: Annotated[
        float, typer.Option(min=0, help="Criterion: largest cosine between heads.")
    ] = 0.3,
    divergence: Annotated[
        float, typer.Option(min=0, help="Criterion: least KL between heads, nats.")
    ] = 1.0,
) -> None:
    """E4: how different the heads of a layer are, in their weights and in what they attend to.

    Example: python -m pretrain evaluate diversity runs/vanilla runs/orthogonal --out runs/diversity
    """
    refuse_unwritable(out)
    read = _read_runs(runs)
    from laboratory.evaluation.heads.diversity import Limits, diversity_report, measure_run
    from laboratory.study.report import finish

    measured = _measure(
        read, lambda trained, group, context: measure_run(trained, group, context, samples)
    )
    finish(diversity_report(measured, Limits(cosine, divergence), samples).document(), out)


@evaluate.command()
def length(
    runs: RunsArgument,
    out: Out = Path("evaluation/length"),
    samples: Annotated[
        int | None,
        typer.Option(
            min=1, help="Held-out spans of three samples of each source; unset: as in training."
        ),
    ] = None,
    tolerance: Annotated[
        float, typer.Option(min=0, help="Criterion: largest relative change of perplexity.")
    ] = 0.1,
) -> None:
    """E5: perplexity at half and one and a half times the trained length, of the same predictions.

    Example: python -m pretrain evaluate length runs/vanilla runs/orthogonal --out runs/length
    """
    refuse_unwritable(out)
    read = _read_runs(runs)
    from laboratory.evaluation.heads.length import length_report, measure_lengths
    from laboratory.study.report import finish

    measured = _measure(read, lambda trained, group, _: measure_lengths(trained, group, samples))
    finish(length_report(measured, tolerance).document(), out)


@evaluate.command()
def approximation(
    out: Out = Path("evaluation/approximation"),
    variants: Annotated[
        str, typer.Option(help="Variants of docs/method.md; the first is the baseline.")
    ] = "vanilla,orthogonal",
    widths: Annotated[str, typer.Option(help="hidden_size values, ascending.")] = "16,32,64",
    depths: Annotated[str, typer.Option(help="num_layers values, ascending.")] = "1,2,4",
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds, from 1 on.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of every model.")] = 400,
    learning_rate: Annotated[
        float, typer.Option(min=0, help="Peak learning rate of AdamW.")
    ] = 3e-3,
    tolerance: Annotated[
        float,
        typer.Option(min=0, help="Criterion: largest relative excess over the baseline's error."),
    ] = 0.1,
) -> None:
    """E1: regression of a function of a sequence by this program's own layers, by width and depth.

    Example: python -m pretrain evaluate approximation --out runs/approximation
    """
    refuse_unwritable(out)
    from megatron_patches.engine.compat import prepare_imports

    prepare_imports()
    from laboratory.evaluation.heads.approximation import Grid, approximation_report, run_grid
    from laboratory.study.report import finish

    names = tuple(name.strip() for name in variants.split(","))
    if len(set(names)) < len(names):
        raise UserError(f"--variants {variants} names a variant twice; give each once")
    grid = Grid(
        variants=names,
        widths=_ascending("--widths", widths),
        depths=_ascending("--depths", depths),
        seeds=seeds,
        steps=steps,
        learning_rate=learning_rate,
    )
    finish(approximation_report(grid, run_grid(grid), tolerance).document(), out)


evaluate.command()(glue)
evaluate.command()(reservoir)


def _ascending(option: str, text: str) -> tuple[int, ...]:
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or min(values) < 1 or list(values) != sorted(set(values)):
        raise UserError(
            f"{option} is '{text}': give whole numbers in ascending order, such as 16,32,64"
        )
    return values


def _read_runs(paths: Sequence[Path]) -> list[FinishedRun]:
    """Read finished runs of one data set, and refuse runs without a checkpoint."""
    from laboratory.runs.finished import leave_out_others, read_finished_run
    from pretrain.runs.directory import RunDirectory

    paths, left_out = leave_out_others(paths)
    runs = [read_finished_run(path) for path in paths]
    for run in runs:
        RunDirectory(run.path).find_checkpoint(None)
    if len({run.data_fingerprint for run in runs}) > 1:
        raise UserError(
            "these runs were trained on different data, so they have no held-out text in common; "
            "evaluate runs of one data set together"
        )
    if left_out:
        typer.echo(left_out, err=True)
    typer.echo(f"measuring {len(runs)} runs, one after the other; the imports take a while")
    from megatron_patches.engine.compat import prepare_imports

    prepare_imports()
    return runs


def _measure(
    runs: Sequence[FinishedRun], measure: Callable[[TrainedModel, str, ParallelContext], Measured]
) -> list[Measured]:
    """Load and measure one model after another, each with the name of its group."""
    from laboratory.evaluation.heads.trained_model import load_trained_model
    from laboratory.reporting.progress import WorkDisplay
    from laboratory.study.seeds import group_by_method
    from pretrain.ranks.single_process import one_process

    groups = group_by_method(runs)
    results = []
    with one_process() as context, WorkDisplay(len(runs)) as work:
        for run in runs:
            work.begin(run.name)
            results.append(
                measure(load_trained_model(run.path, context), groups.name_of(run), context)
            )
    return results
