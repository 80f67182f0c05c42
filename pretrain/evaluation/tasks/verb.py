"""Verb `evaluate tasks`: lm-evaluation-harness on runs and exports, and their comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pretrain.errors import UserError


def tasks(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN|DIR...", help="Run directories, or models of transformers.")
    ],
    names: Annotated[
        str, typer.Option("--tasks", help="Tasks, groups and tags of lm-evaluation-harness, by commas.")
    ],
    baseline: Annotated[
        str, typer.Option(help="The variant (or the name of a run) the others are compared with.")
    ] = "vanilla",
    include_path: Annotated[
        Path | None,
        typer.Option(help="Directory of task files (YAML) of your own; they win over the harness's."),
    ] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(min=0, help="Worked examples before each item; default: as the task says.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first so many items of each task, to try it out.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 16,
    step: Annotated[
        int | None, typer.Option(min=0, help="Of every run's checkpoint; default: the newest complete one.")
    ] = None,
    trust_code: Annotated[
        bool, typer.Option("--trust-code", help="Run code that lies in DIR (a run's own needs no asking).")
    ] = False,
    out: Annotated[
        Path, typer.Option(help="Directory for the report and for results, which are not measured again.")
    ] = Path("evaluation/tasks"),
) -> None:
    """Downstream tasks by lm-evaluation-harness (extra `eval`), compared over pairs of seeds and over items.

    Example: python -m pretrain evaluate tasks runs/* --tasks lambada_openai,blimp,arc_easy --out tasks
    """
    wanted = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    if not wanted:
        raise UserError("--tasks names no task; give some, such as --tasks lambada_openai,arc_easy")
    from pretrain.evaluation.tasks.models import read_models
    from pretrain.study.seeds import group_runs

    models = read_models(runs, step)
    groups = group_runs(models, baseline)
    from pretrain.evaluation.tasks.harness import load_tasks, require_harness
    from pretrain.evaluation.tasks.run import Settings, measure
    from pretrain.ranks.devices import use_cuda

    device = "cuda" if use_cuda() else "cpu"
    versions = require_harness(device)
    measured = load_tasks(wanted, include_path, num_fewshot, limit)
    settings = Settings(batch_size, device, limit, trust_code, versions["lm-eval"], out / "results")
    scores = measure(models, measured, settings)

    from shutil import get_terminal_size

    from rich.console import Console

    from pretrain.evaluation.tasks.report import TaskReport
    from pretrain.evaluation.tasks.statistics import compare_tasks
    from pretrain.study.report import finish

    options: dict[str, str | int | Path | None] = {"--tasks": names, "--baseline": baseline}
    options |= {"--include-path": include_path, "--num-fewshot": num_fewshot, "--limit": limit}
    options |= {"--step": step, "--out": out}
    command = [("python", "-m", "pretrain", "evaluate", "tasks"), *((str(run),) for run in runs)]
    command += [(key, str(value)) for key, value in options.items() if value is not None]
    comparison = compare_tasks(groups, scores)
    report = TaskReport(comparison, groups, measured, scores, limit, versions, command)
    finish(report.document(), out, Console(width=max(100, get_terminal_size().columns)))
