"""Verbs `evaluate glue` and `evaluate translation`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from pretrain.finetuning.classification_data import TaskData
    from pretrain.finetuning.plan import Plan
    from pretrain.finetuning.pretrained import Pretrained
    from pretrain.finetuning.report import Trial
    from pretrain.study.seeds import Groups


class Words(str, Enum):
    """sacreBLEU's ways to cut a text into words that need no other package."""

    v13a = "13a"
    intl = "intl"
    char = "char"
    zh = "zh"
    none = "none"


Models = Annotated[
    list[Path], typer.Argument(metavar="RUN|DIR...", help="Run directories or exports, seeds of one variant.")
]
Seeds = Annotated[int, typer.Option(min=1, help="Fine-tunings of each model: seeds 1 … this.")]
Baseline = Annotated[
    str | None, typer.Option(help="Variant or run the others are compared with; default: the first's.")
]
Out = Annotated[
    Path, typer.Option(help="Directory for report.md, report.json, a plot and finished trainings.")
]
LearningRate = Annotated[float, typer.Option(min=1e-12, help="Peak learning rate of AdamW.")]
Epochs = Annotated[int, typer.Option(min=1, help="Passes over the training examples, at most.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Examples of a step.")]
Patience = Annotated[
    int, typer.Option(min=0, help="Looks without a better one that end a training; 0: none do.")
]
MaxLength = Annotated[
    int | None, typer.Option(min=8, help="Tokens of an example at most; default: the model's own.")
]
TrainQueryKey = Annotated[
    bool, typer.Option("--train-query-key", help="Let Q and K train too, where they were frozen.")
]
Tolerance = Annotated[
    float, typer.Option(min=0, max=1, help="Criterion: largest relative loss to the baseline's score.")
]
TrustCode = Annotated[bool, typer.Option("--trust-code", help="Run code that lies in a DIR.")]


def glue(
    models: Models,
    data: Annotated[Path, typer.Option(help="Directory of GLUE, with a folder for each task.")],
    tasks: Annotated[
        str, typer.Option(help="Of cola, sst2, mrpc, qqp, stsb, mnli, qnli, rte, wnli.")
    ] = "sst2",
    seeds: Seeds = 3,
    baseline: Baseline = None,
    out: Out = Path("evaluation/glue"),
    train_query_key: TrainQueryKey = False,
    learning_rate: LearningRate = 5e-5,
    epochs: Epochs = 5,
    batch_size: BatchSize = 32,
    patience: Patience = 3,
    max_length: MaxLength = None,
    tolerance: Tolerance = 0.05,
    trust_code: TrustCode = False,
) -> None:
    """E3: fine-tuning on GLUE's tasks with Q and K frozen again, several seeds, beside a baseline.

    Example: python -m pretrain evaluate glue runs/vanilla runs/orthogonal --data glue --tasks sst2,rte
    """
    from pretrain.finetuning.classification_data import find_tasks, read_task

    data_of_tasks = [read_task(task, data) for task in find_tasks(tasks)]
    opened, groups = _open("evaluate glue", ("accelerate", "sklearn"), models, trust_code, baseline)
    from pretrain.finetuning.glue import glue_fine_tunings
    from pretrain.finetuning.plan import Plan, run_on_exports
    from pretrain.finetuning.training import Settings
    from pretrain.reporting.progress import WorkDisplay

    settings = Settings(learning_rate, epochs, batch_size, patience=patience)
    plan = Plan(opened, list(map(groups.name_of, opened)), settings, seeds, max_length, train_query_key)
    with WorkDisplay(len(opened) * len(data_of_tasks) * seeds) as work:
        done = run_on_exports(glue_fine_tunings(plan, data_of_tasks), seeds, out, work.begin)
    notes = [*_constant_scores(data_of_tasks), *_notes(plan)]
    _publish("E3", "Fine-tuning on GLUE", plan, groups.baseline, done, tolerance, notes, out)


def translation(
    models: Models,
    train: Annotated[
        list[Path],
        typer.Option(help="Pairs: TSV, JSONL or parquet, repeatable; or two texts: sources, translations."),
    ],
    test: Annotated[list[Path], typer.Option(help="What is translated and compared, in the same form.")],
    source: Annotated[str, typer.Option(help="Column of the sources.")] = "source",
    target: Annotated[str, typer.Option(help="Column of the translations.")] = "target",
    prompt: Annotated[
        str, typer.Option(help="The text before a translation; {source} is what to translate.")
    ] = "{source}\\n",
    words: Annotated[Words, typer.Option(help="How sacreBLEU cuts texts into words.")] = Words.v13a,
    seeds: Seeds = 3,
    baseline: Baseline = None,
    out: Out = Path("evaluation/translation"),
    train_query_key: TrainQueryKey = False,
    learning_rate: LearningRate = 5e-5,
    epochs: Epochs = 5,
    batch_size: BatchSize = 32,
    patience: Patience = 3,
    max_length: MaxLength = None,
    tolerance: Tolerance = 0.05,
    trust_code: TrustCode = False,
) -> None:
    """Fine-tuning on translation with Q and K frozen again: greedy decoding, sacreBLEU, beside a baseline.

    Example: python -m pretrain evaluate translation runs/orthogonal --train train.tsv --test test.tsv
    """
    from pretrain.finetuning.translation_data import read_pairs

    learned = read_pairs("--train", train, source, target)
    translated = read_pairs("--test", test, source, target)
    opened, groups = _open("evaluate translation", ("accelerate", "sacrebleu"), models, trust_code, baseline)
    from pretrain.finetuning.plan import Plan, run_on_exports
    from pretrain.finetuning.training import Settings
    from pretrain.finetuning.translation import Texts, translation_fine_tunings
    from pretrain.reporting.progress import WorkDisplay

    settings = Settings(learning_rate, epochs, batch_size, patience=patience)
    plan = Plan(opened, list(map(groups.name_of, opened)), settings, seeds, max_length, train_query_key)
    texts = Texts(learned, translated, prompt.replace("\\n", "\n"), words.value)
    with WorkDisplay(len(opened) * seeds) as work:
        done = run_on_exports(translation_fine_tunings(plan, texts), seeds, out, work.begin)
    first = done[1][0]
    notes = [f"sacreBLEU's signature: {first['signature']}", *_notes(plan)]
    if untranslated := first["untranslated"]:
        notes.append(f"{untranslated} texts were too long to translate and count as empty translations")
    _publish("translation", "Translation", plan, groups.baseline, done, tolerance, notes, out)


def _open(
    verb: str, packages: tuple[str, ...], paths: list[Path], trust_code: bool, baseline: str | None
) -> tuple[list[Pretrained], Groups[Pretrained]]:
    """Open and group the models, and refuse before anything is trained."""
    from megatron_patches.engine.compat import silence_expected_warnings

    silence_expected_warnings()
    from pretrain.finetuning.packages import require_packages
    from pretrain.finetuning.pretrained import group_models, open_pretrained

    require_packages(verb, *packages)
    opened = [open_pretrained(path, trust_code) for path in paths]
    return opened, group_models(opened, baseline)


def _publish(
    experiment: str,
    title: str,
    plan: Plan,
    baseline: str,
    done: tuple[list[Trial], list[dict[str, Any]]],
    tolerance: float,
    notes: list[str],
    out: Path,
) -> None:
    """Write and print the report; the predictions themselves are in OUT/trials."""
    from pretrain.finetuning.report import fine_tuned_report
    from pretrain.study.report import finish

    trials, details = done
    content = {
        "settings": plan.settings.as_dict(),
        "models": [_model_facts(model, group) for model, group in zip(plan.models, plan.groups, strict=True)],
        "trainings": [
            {key: value for key, value in one.items() if key not in ("predictions", "translations")}
            for one in details
        ],
    }
    kept = sum(bool(one["kept"]) for one in details)
    remark = f" ({kept} of {len(details)} trainings were there)" if kept else ""
    report = fine_tuned_report(experiment, title, trials, baseline, tolerance, notes, content)
    finish(report, out, remark=remark)


def _model_facts(model: Pretrained, group: str) -> dict[str, object]:
    return {
        "name": model.name,
        "group": group,
        "seed": model.seed,
        "sha256": model.digest,
        "frozen_rows": {name: [list(rows) for rows in ranges] for name, ranges in model.frozen_rows.items()},
        "folded": model.facts.get("folded", []),
    }


def _constant_scores(tasks: list[TaskData]) -> list[str]:
    import numpy as np

    from pretrain.finetuning.metrics import constant_score

    notes = []
    for data in tasks:
        labels = np.array([example.label for example in data.validation])
        value = 100 * constant_score(data.task, labels)
        notes.append(f"{data.task.name}: the most frequent label, given always, scores {value:.2f}")
    return notes


def _notes(plan: Plan) -> list[str]:
    """Return notes about Q and K."""
    if plan.train_query_key:
        return ["--train-query-key: Q and K trained like everything else"]
    notes = [
        "Q and K rows that were frozen when the pretraining ended stayed so, with their biases: their bits "
        "were compared before and after every training"
    ]
    if folded := sorted({model.name for model in plan.models if model.facts.get("folded")}):
        notes.append(
            f"{', '.join(folded)}: adapters are folded into these rows, which are frozen as folded: the "
            "adapters do not train any more"
        )
    if free := [model.name for model in plan.models if not model.frozen_rows]:
        notes.append(f"{', '.join(free)}: nothing was frozen, so everything trains")
    return notes
