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
    from laboratory.finetuning.glue_data import Task
    from laboratory.finetuning.models import Pretrained
    from laboratory.finetuning.report import Study
    from laboratory.finetuning.training import Arm, Settings

MODULES = ("datasets", "accelerate", "sklearn", "scipy")
Models = Annotated[
    list[Path],
    typer.Argument(metavar="RUN|DIR...", help="Run directories, or models of transformers."),
]
Baseline = Annotated[
    str | None,
    typer.Option(help="Variant or run the others are compared with; default: the first's."),
]
Data = Annotated[
    str,
    typer.Option(help="Directory of GLUE with a folder for each task, or its name on the hub."),
]
Seeds = Annotated[int, typer.Option(min=1, help="Fine-tunings of each, with seeds from 1 on.")]
LearningRate = Annotated[float, typer.Option(min=1e-12, help="Peak learning rate of AdamW.")]
Epochs = Annotated[int, typer.Option(min=1, help="Passes over the training examples.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Examples of a step.")]
MaxLength = Annotated[
    int | None,
    typer.Option(min=8, help="Tokens of an example at most; default: the model's own."),
]
TrustCode = Annotated[
    bool,
    typer.Option("--trust-code", help="Run code that lies in DIR (a run's own needs no asking)."),
]
Out = Annotated[Path, typer.Option(help="Directory for the report and for finished trainings.")]


def glue(
    models: Models,
    data: Data = "nyu-mll/glue",
    tasks: Annotated[
        str, typer.Option(help="Of cola, sst2, mrpc, qqp, stsb, mnli, qnli, rte, wnli.")
    ] = "sst2",
    seeds: Seeds = 3,
    baseline: Baseline = None,
    out: Out = Path("evaluation/glue"),
    train_query_key: Annotated[
        bool,
        typer.Option("--train-query-key", help="Let Q and K train too, where they were frozen."),
    ] = False,
    learning_rate: LearningRate = 5e-5,
    epochs: Epochs = 5,
    batch_size: BatchSize = 32,
    max_length: MaxLength = None,
    trust_code: TrustCode = False,
) -> None:
    """E3: fine-tuning on GLUE's tasks with Q and K frozen again, several seeds, beside a baseline.

    Example: python -m pretrain evaluate glue runs/vanilla runs/orthogonal --data glue --tasks rte
    """
    rows = _read("glue", "--tasks", tasks, data=data, out=out)
    from laboratory.finetuning.models import group_models, open_pretrained
    from laboratory.finetuning.report import Study
    from laboratory.finetuning.training import Arm, Settings

    opened = [open_pretrained(path, trust_code) for path in models]
    groups = group_models(opened, baseline)
    arms = [
        Arm(groups.name_of(model), model, {} if train_query_key else model.frozen_rows)
        for model in opened
    ]
    notes = _query_key_notes(opened, train_query_key)
    study = Study("E3", "Fine-tuning on GLUE", groups.baseline, ("score",), notes=notes)
    settings = Settings(learning_rate, epochs, batch_size, max_length)
    _run(study, arms, rows, settings, seeds=seeds, out=out)


def reservoir(
    model: Annotated[
        Path,
        typer.Argument(metavar="RUN|DIR", help="A model of transformers, or its name on the hub."),
    ],
    task: Annotated[str, typer.Option(help="A task of GLUE.")] = "sst2",
    data: Data = "nyu-mll/glue",
    seeds: Seeds = 5,
    out: Out = Path("evaluation/reservoir"),
    learning_rate: LearningRate = 2e-5,
    epochs: Epochs = 3,
    batch_size: BatchSize = 32,
    max_length: MaxLength = 128,
    trust_code: TrustCode = False,
) -> None:
    """Q and K of a pretrained model trained, frozen, or replaced by orthonormal rows and frozen.

    Example: python -m pretrain evaluate reservoir google-bert/bert-base-uncased --task sst2
    """
    rows = _read("reservoir", "--task", task, data=data, out=out)
    from laboratory.finetuning.models import load_classifier, load_tokenizer, open_pretrained
    from laboratory.finetuning.query_key import query_key
    from laboratory.finetuning.report import Study
    from laboratory.finetuning.training import TRAINED, Settings, reservoir_arms

    opened = open_pretrained(model, trust_code)
    # Refused before the first training, which would take long.
    query_key(load_classifier(opened, next(iter(rows)), load_tokenizer(opened)))
    note = (
        "per head, one matrix: rows of the frozen bank by the seed of the fine-tuning, "
        "orthonormal within each head, and over all heads of a layer; their biases are 0"
    )
    metrics = ("accuracy", "f1") if all(of.labels == 2 for of in rows) else ("score",)
    study = Study("reservoir", "Reservoir test", TRAINED, metrics, notes=[note])
    settings = Settings(learning_rate, epochs, batch_size, max_length)
    _run(study, reservoir_arms(opened), rows, settings, seeds=seeds, out=out)


def _read(verb: str, option: str, tasks: str, data: str, out: Path) -> dict[Task, dict[str, Any]]:
    """Return the splits of the tasks, after everything that can be refused before they are read."""
    from laboratory.finetuning.glue_data import find_tasks, read_task

    chosen_tasks = find_tasks(tasks, option)
    refuse_unwritable(out)
    require_packages(f"evaluate {verb}", *MODULES)
    return {task: read_task(task, data) for task in chosen_tasks}


def _run(
    study: Study,
    arms: Sequence[Arm],
    rows: Mapping[Task, Mapping[str, Any]],
    settings: Settings,
    seeds: int,
    out: Path,
) -> None:
    """Fine-tune all arms, and write the report."""
    from laboratory.finetuning.report import fine_tuned_report
    from laboratory.finetuning.training import run_trials
    from laboratory.study.report import finish

    trials = run_trials(arms, rows, settings, seeds, out=out)
    models = [
        {
            "name": arm.model.name,
            "group": arm.group,
            "seed": arm.model.seed,
            "sha256": arm.model.digest,
            "frozen_rows": arm.rows,
            "folded": arm.model.facts.get("folded", []),
        }
        for arm in arms
    ]
    kept = sum(trial.kept for trial in trials)
    remark = f" ({kept} of {len(trials)} trainings were there)" if kept else ""
    content = {"settings": asdict(settings), "models": models}
    finish(fine_tuned_report(study, trials, content).document(), out, remark=remark)


def require_packages(verb: str, *modules: str) -> None:
    """Import transformers, and modules of packages of the extra `eval`, quietly.

    Raises:
        UserError: one of them is not installed.
    """
    from pretrain.export.models import require_transformers
    from pretrain.ranks.devices import use_cuda

    typer.echo(f"{verb}: importing transformers, which takes a while")
    # accelerate imports DeepSpeed where it is installed, which would print the accelerator it
    # detects.
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if use_cuda() else "cpu")
    require_transformers(verb)
    try:
        for module in modules:
            import_module(module)
    except ImportError as error:
        raise UserError(
            f"{verb} needs a package that is not installed ({error}); {how_to_install('eval')}"
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
    return notes
