"""Verb `evaluate glue`."""

from __future__ import annotations

import os
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from data_pipeline.errors import how_to_install
from data_pipeline.io.files import refuse_unwritable
from pretrain.errors import UserError

if TYPE_CHECKING:
    from laboratory.finetuning.classification_data import TaskData
    from laboratory.finetuning.glue import Plan
    from laboratory.finetuning.models import Pretrained


def glue(
    models: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN|DIR...", help="Run directories or exports, seeds of one variant."
        ),
    ],
    data: Annotated[Path, typer.Option(help="Directory of GLUE, with a folder for each task.")],
    tasks: Annotated[
        str, typer.Option(help="Of cola, sst2, mrpc, qqp, stsb, mnli, qnli, rte, wnli.")
    ] = "sst2",
    seeds: Annotated[
        int, typer.Option(min=1, help="Fine-tunings of each model: seeds 1 … this.")
    ] = 3,
    baseline: Annotated[
        str | None,
        typer.Option(help="Variant or run the others are compared with; default: the first's."),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(help="Directory for report.md, report.json, a plot and finished trainings."),
    ] = Path("evaluation/glue"),
    train_query_key: Annotated[
        bool,
        typer.Option("--train-query-key", help="Let Q and K train too, where they were frozen."),
    ] = False,
    learning_rate: Annotated[
        float, typer.Option(min=1e-12, help="Peak learning rate of AdamW.")
    ] = 5e-5,
    epochs: Annotated[
        int, typer.Option(min=1, help="Passes over the training examples, at most.")
    ] = 5,
    batch_size: Annotated[int, typer.Option(min=1, help="Examples of a step.")] = 32,
    patience: Annotated[
        int, typer.Option(min=0, help="Looks without a better one that end a training; 0: none do.")
    ] = 3,
    max_length: Annotated[
        int | None,
        typer.Option(min=8, help="Tokens of an example at most; default: the model's own."),
    ] = None,
    tolerance: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Criterion: largest relative loss to the baseline's score."
        ),
    ] = 0.05,
    trust_code: Annotated[
        bool, typer.Option("--trust-code", help="Run code that lies in a DIR.")
    ] = False,
) -> None:
    """E3: fine-tuning on GLUE's tasks with Q and K frozen again, several seeds, beside a baseline.

    Example: python -m pretrain evaluate glue runs/vanilla runs/orthogonal --data glue --tasks rte
    """
    from laboratory.finetuning.classification_data import find_tasks, read_task

    refuse_unwritable(out)
    data_of_tasks = [read_task(task, data) for task in find_tasks(tasks)]
    typer.echo("importing transformers, which takes a while")
    require_packages("evaluate glue", "accelerate")
    from laboratory.finetuning.glue import Plan, run_glue
    from laboratory.finetuning.models import group_models, open_pretrained
    from laboratory.finetuning.report import fine_tuned_report
    from laboratory.finetuning.training import Settings
    from laboratory.reporting.progress import WorkDisplay
    from laboratory.study.report import finish

    settings = Settings(learning_rate, epochs, batch_size, patience=patience)
    opened = [open_pretrained(path, trust_code) for path in models]
    groups = group_models(opened, baseline)
    plan = Plan(
        models=opened,
        groups=groups,
        settings=settings,
        seeds=seeds,
        max_length=max_length,
        train_query_key=train_query_key,
    )
    with WorkDisplay(len(models) * len(data_of_tasks) * seeds) as work:
        trials, details = run_glue(plan, data_of_tasks, out, work.begin)
    notes = [*map(_constant_score, data_of_tasks), *_notes(plan)]
    content = {
        "settings": asdict(settings),
        "models": [_model_facts(model, groups.name_of(model)) for model in opened],
        # The predictions themselves are in OUT/trials.
        "trainings": [
            {key: trial_details[key] for key in trial_details if key != "predictions"}
            for trial_details in details
        ],
    }
    kept = sum(bool(trial_details["kept"]) for trial_details in details)
    remark = f" ({kept} of {len(details)} trainings were there)" if kept else ""
    report = fine_tuned_report(trials, groups.baseline, tolerance, notes=notes, content=content)
    finish(report, out, remark=remark)


def require_packages(verb: str, *names: str) -> None:
    """Import transformers and other packages of a verb, quietly.

    Args:
        verb: Name of the verb, for the message.
        *names: Names by which the packages are imported.

    Raises:
        UserError: one is not installed.
    """
    from megatron_patches.engine.compat import prepare_imports
    from pretrain.export.models import require_transformers
    from pretrain.ranks.devices import use_cuda

    prepare_imports()
    # Transformers imports DeepSpeed where it is installed, which would print the accelerator it
    # detects.
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if use_cuda() else "cpu")
    require_transformers(verb)
    for name in names:
        try:
            import_module(name)
        except ImportError as error:
            raise UserError(
                f"{verb} needs the package {name} ({error}): {how_to_install('eval')}"
            ) from error


def _model_facts(model: Pretrained, group: str) -> dict[str, object]:
    return {
        "name": model.name,
        "group": group,
        "seed": model.seed,
        "sha256": model.digest,
        "frozen_rows": model.frozen_rows,
        "folded": model.facts.get("folded", []),
    }


def _constant_score(data: TaskData) -> str:
    from laboratory.finetuning.metrics import constant_score

    value = 100 * constant_score(data.task, [example.label for example in data.validation])
    return f"{data.task.name}: the most frequent label, given always, scores {value:.2f}"


def _notes(plan: Plan) -> list[str]:
    """Return notes about Q and K."""
    if plan.train_query_key:
        return ["--train-query-key: Q and K trained like everything else"]
    notes = [
        "Q and K rows that were frozen when the pretraining ended stayed so, with their biases: "
        "their bits were compared before and after every training"
    ]
    if folded := sorted({model.name for model in plan.models if model.facts.get("folded")}):
        notes.append(
            f"{', '.join(folded)}: adapters are folded into these rows, which are frozen as "
            "folded: the adapters do not train any more"
        )
    if free := [model.name for model in plan.models if not model.frozen_rows]:
        notes.append(f"{', '.join(free)}: nothing was frozen, so everything trains")
    return notes
