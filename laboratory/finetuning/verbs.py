"""Verbs `evaluate glue` and `evaluate reservoir`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from data_pipeline.errors import how_to_install
from data_pipeline.io.files import refuse_unwritable
from pretrain.errors import UserError

if TYPE_CHECKING:
    from laboratory.finetuning.experiment import Arm
    from laboratory.finetuning.glue_data import Task
    from laboratory.finetuning.models import Pretrained
    from laboratory.finetuning.training import Settings

PACKAGES = ("datasets", "accelerate", "sklearn", "scipy")
"""Packages of both verbs beside transformers, by the names they are imported by."""

Data = Annotated[
    str,
    typer.Option(help="Directory of GLUE with a folder for each task, or its name on the hub."),
]
Seeds = Annotated[int, typer.Option(min=1, help="Fine-tunings of each, with seeds from 1 on.")]
LearningRate = Annotated[float, typer.Option(min=1e-12, help="Peak learning rate of AdamW.")]
Epochs = Annotated[int, typer.Option(min=1, help="Passes over the training examples, at most.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Examples of a step.")]
Patience = Annotated[
    int, typer.Option(min=0, help="Epochs without a better one that end a training; 0: none do.")
]
MaxLength = Annotated[
    int | None,
    typer.Option(min=8, help="Tokens of an example at most; default: the model's own."),
]
Tolerance = Annotated[
    float,
    typer.Option(min=0, max=1, help="Criterion: largest relative loss to the baseline's score."),
]
TrustCode = Annotated[bool, typer.Option("--trust-code", help="Run code that lies in a DIR.")]


def glue(
    models: Annotated[
        list[Path],
        typer.Argument(metavar="RUN|DIR...", help="Run directories, or models of transformers."),
    ],
    data: Data = "nyu-mll/glue",
    tasks: Annotated[
        str, typer.Option(help="Of cola, sst2, mrpc, qqp, stsb, mnli, qnli, rte, wnli.")
    ] = "sst2",
    seeds: Seeds = 3,
    baseline: Annotated[
        str | None,
        typer.Option(help="Variant or run the others are compared with; default: the first's."),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Directory for the report and for finished trainings.")
    ] = Path("evaluation/glue"),
    train_query_key: Annotated[
        bool,
        typer.Option("--train-query-key", help="Let Q and K train too, where they were frozen."),
    ] = False,
    learning_rate: LearningRate = 5e-5,
    epochs: Epochs = 5,
    batch_size: BatchSize = 32,
    patience: Patience = 3,
    max_length: MaxLength = None,
    tolerance: Tolerance = 0.05,
    trust_code: TrustCode = False,
) -> None:
    """E3: fine-tuning on GLUE's tasks with Q and K frozen again, several seeds, beside a baseline.

    Example: python -m pretrain evaluate glue runs/vanilla runs/orthogonal --data glue --tasks rte
    """
    from laboratory.finetuning.glue_data import find_tasks

    glue_tasks = find_tasks(tasks)
    refuse_unwritable(out)
    require_packages("evaluate glue", *PACKAGES)
    rows = _read(glue_tasks, data)
    from laboratory.finetuning.experiment import exported_arm
    from laboratory.finetuning.models import group_models, open_pretrained
    from laboratory.finetuning.training import Settings

    settings = Settings(
        learning_rate=learning_rate,
        epochs=epochs,
        batch_size=batch_size,
        patience=patience,
        max_length=max_length,
    )
    opened = [open_pretrained(path, trust_code) for path in models]
    groups = group_models(opened, baseline)
    notes = _query_key_notes(opened, train_query_key)
    _run(
        [exported_arm(groups.name_of(model), model, train_query_key) for model in opened],
        rows,
        settings=settings,
        seeds=seeds,
        out=out,
        report={
            "experiment": "E3",
            "title": "Fine-tuning on GLUE",
            "baseline": groups.baseline,
            "metrics": ("score",),
            "tolerance": tolerance,
            "notes": notes,
        },
    )


def reservoir(
    model: Annotated[
        Path,
        typer.Argument(metavar="RUN|DIR", help="A model of transformers, or its name on the hub."),
    ],
    task: Annotated[str, typer.Option(help="A task of GLUE.")] = "sst2",
    data: Data = "nyu-mll/glue",
    seeds: Seeds = 5,
    out: Annotated[
        Path, typer.Option(help="Directory for the report and for finished trainings.")
    ] = Path("evaluation/reservoir"),
    learning_rate: LearningRate = 2e-5,
    epochs: Epochs = 3,
    batch_size: BatchSize = 32,
    patience: Patience = 0,
    max_length: MaxLength = 128,
    tolerance: Tolerance = 0.05,
    trust_code: TrustCode = False,
) -> None:
    """Q and K of a pretrained model trained, frozen, or replaced by orthonormal rows and frozen.

    Example: python -m pretrain evaluate reservoir google-bert/bert-base-uncased --task sst2
    """
    from laboratory.finetuning.glue_data import find_tasks

    glue_tasks = find_tasks(task, "--task")
    refuse_unwritable(out)
    require_packages("evaluate reservoir", *PACKAGES)
    rows = _read(glue_tasks, data)
    from laboratory.finetuning.experiment import TRAINED, reservoir_arms
    from laboratory.finetuning.models import load_classifier, load_tokenizer, open_pretrained
    from laboratory.finetuning.query_key import query_key
    from laboratory.finetuning.training import Settings

    settings = Settings(
        learning_rate=learning_rate,
        epochs=epochs,
        batch_size=batch_size,
        patience=patience,
        max_length=max_length,
    )
    opened = open_pretrained(model, trust_code)
    # Refused before the first training, which would take long.
    query_key(load_classifier(opened, glue_tasks[0], load_tokenizer(opened)))
    two_labels = all(glue_task.labels == 2 for glue_task in glue_tasks)
    _run(
        reservoir_arms(opened),
        rows,
        settings=settings,
        seeds=seeds,
        out=out,
        report={
            "experiment": "reservoir",
            "title": "Reservoir test",
            "baseline": TRAINED,
            "metrics": ("accuracy", "f1") if two_labels else ("score",),
            "tolerance": tolerance,
            "notes": [
                "per head, one matrix: rows of the frozen bank by the seed of the fine-tuning, "
                "orthonormal within each head, and over all heads of a layer; their biases are 0"
            ],
        },
    )


def _read(tasks: Sequence[Task], data: str) -> dict[Task, dict[str, Any]]:
    from laboratory.finetuning.glue_data import read_task

    return {task: read_task(task, data) for task in tasks}


def _run(
    arms: Sequence[Arm],
    rows: Mapping[Task, Mapping[str, Any]],
    settings: Settings,
    seeds: int,
    out: Path,
    report: Mapping[str, Any],
) -> None:
    """Fine-tune all arms, and write the report."""
    from laboratory.finetuning.experiment import run_trials
    from laboratory.finetuning.report import fine_tuned_report
    from laboratory.reporting.progress import WorkDisplay
    from laboratory.study.report import finish

    with WorkDisplay(len(arms) * len(rows) * seeds) as work:
        metrics = tuple(name for name in report["metrics"] if name != "score")
        trials, details = run_trials(
            arms,
            rows,
            settings=settings,
            seeds=seeds,
            metrics=metrics,
            out=out,
            begin=work.begin,
        )
    models = {arm.model.name: (arm.group, arm.model) for arm in arms}
    content = {
        "experiment": report["experiment"],
        "title": report["title"],
        "settings": asdict(settings),
        "models": [
            {
                "name": name,
                "group": group,
                "seed": model.seed,
                "sha256": model.digest,
                "frozen_rows": model.frozen_rows,
                "folded": model.facts.get("folded", []),
            }
            for name, (group, model) in models.items()
        ],
        "trainings": details,
    }
    kept = sum(bool(detail["kept"]) for detail in details)
    finish(
        fine_tuned_report(
            trials,
            report["baseline"],
            report["metrics"],
            report["tolerance"],
            notes=report["notes"],
            content=content,
        ),
        out,
        remark=f" ({kept} of {len(details)} trainings were there)" if kept else "",
    )


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

    typer.echo(f"{verb}: importing transformers, which takes a while")
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


def _query_key_notes(models: Sequence[Pretrained], train_query_key: bool) -> list[str]:
    if train_query_key:
        return ["--train-query-key: Q and K trained like everything else"]
    notes = [
        "Q and K rows that were frozen when the pretraining ended stayed so, with their biases: "
        "their bits were compared before and after every training"
    ]
    if folded := sorted({model.name for model in models if model.facts.get("folded")}):
        notes.append(
            f"{', '.join(folded)}: adapters are folded into these rows, which are frozen as "
            "folded: the adapters do not train any more"
        )
    if free := [model.name for model in models if not model.frozen_rows]:
        notes.append(f"{', '.join(free)}: nothing was frozen, so everything trains")
    return notes
