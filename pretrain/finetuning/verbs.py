"""Verbs `evaluate glue`, `evaluate translation` and `evaluate bert-reservoir`."""

from __future__ import annotations

import os
from dataclasses import asdict
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pretrain.errors import UserError
from pretrain.finetuning.bert.arms import Norm, arms, find_conditions, layers_of

if TYPE_CHECKING:
    from pretrain.finetuning.classification_data import TaskData
    from pretrain.finetuning.models import Pretrained
    from pretrain.finetuning.report import Trial
    from pretrain.finetuning.training import Settings
    from pretrain.finetuning.trials import Plan


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
    require_packages("evaluate glue", "accelerate", "sklearn")
    from pretrain.finetuning.glue import glue_fine_tunings
    from pretrain.finetuning.training import Settings
    from pretrain.finetuning.trials import run_trials
    from pretrain.reporting.progress import WorkDisplay

    settings = Settings(learning_rate, epochs, batch_size, patience=patience)
    plan = _plan(models, baseline, trust_code, settings, seeds, max_length, train_query_key)
    with WorkDisplay(len(models) * len(data_of_tasks) * seeds) as work:
        done = run_trials(glue_fine_tunings(plan, data_of_tasks), out, work.begin)
    notes = [*map(_constant_score, data_of_tasks), *_notes(plan)]
    _publish("E3", "Fine-tuning on GLUE", plan, *done, tolerance, notes, out)


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
    from pretrain.finetuning.records import read_pairs

    learned = read_pairs("--train", train, source, target)
    translated = read_pairs("--test", test, source, target)
    require_packages("evaluate translation", "accelerate", "sacrebleu")
    from pretrain.finetuning.training import Settings
    from pretrain.finetuning.translation import Texts, translation_fine_tunings
    from pretrain.finetuning.trials import run_trials
    from pretrain.reporting.progress import WorkDisplay

    settings = Settings(learning_rate, epochs, batch_size, patience=patience)
    plan = _plan(models, baseline, trust_code, settings, seeds, max_length, train_query_key)
    texts = Texts(learned, translated, prompt.replace("\\n", "\n"), words.value)
    with WorkDisplay(len(models) * seeds) as work:
        trials, details = run_trials(translation_fine_tunings(plan, texts), out, work.begin)
    notes = [f"sacreBLEU's signature: {details[0]['signature']}", *_notes(plan)]
    if untranslated := details[0]["untranslated"]:
        notes.append(f"{untranslated} texts were too long to translate and count as empty translations")
    _publish("translation", "Translation", plan, trials, details, tolerance, notes, out)


def bert_reservoir(
    model: Annotated[Path, typer.Option(help="A directory of Hugging Face with a BERT and its tokenizer.")],
    train: Annotated[
        Path, typer.Option(help="Examples as SST-2 has them, sentence and label 0 or 1: TSV, JSONL, parquet.")
    ],
    validation: Annotated[Path, typer.Option(help="Examples of the same form that are only judged.")],
    out: Annotated[
        Path,
        typer.Option(help="Directory for the report; the same again goes on.", show_default="in evaluation"),
    ] = Path("evaluation/bert-reservoir"),
    conditions: Annotated[
        str, typer.Option(help="Beside unfrozen, which is the baseline and always there.", show_default="all")
    ] = "frozen,orthonormal,gaussian,reorthonormalized",
    layers: Annotated[
        list[str] | None,
        typer.Option(help="4, 4-7, 50%-100%; default: all; repeatable, every condition with each."),
    ] = None,
    norm: Annotated[
        Norm, typer.Option(help="unit: rows of length 1; match: each head with the norm of what it replaces.")
    ] = Norm.unit,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds 1 … this; 5 at least for a claim.")] = 5,
    learning_rate: Annotated[float, typer.Option(min=0, help="Peak, of every arm.")] = 2e-5,
    epochs: Annotated[int, typer.Option(min=1)] = 3,
    batch_size: Annotated[int, typer.Option(min=1)] = 32,
    warmup: Annotated[float, typer.Option(min=0, max=0.99, help="Part of the steps.")] = 0.1,
    max_length: Annotated[int, typer.Option(min=4, help="Pieces of an example.")] = 128,
    tolerance: Annotated[
        float, typer.Option(min=0, help="Criterion: largest relative loss to the baseline's accuracy.")
    ] = 0.05,
) -> None:
    """Fine-tune a BERT whose queries and keys are replaced by frozen orthonormal rows, beside controls.

    Example: python -m pretrain evaluate bert-reservoir --model bert --train train.tsv --validation dev.tsv
    """
    require_packages("evaluate bert-reservoir", "accelerate", "sklearn")
    from pretrain.finetuning.bert.directory import open_bert
    from pretrain.finetuning.bert.experiment import ReservoirTest, run_test
    from pretrain.finetuning.bert.report import reservoir_report
    from pretrain.finetuning.training import Settings
    from pretrain.reporting.progress import WorkDisplay
    from pretrain.study.report import finish

    settings = Settings(learning_rate, epochs, batch_size, warmup, patience=0)
    bert = open_bert(model, max_length)
    ranges = layers or ["all"]
    for text in ranges:
        layers_of(text, bert.config.num_hidden_layers)
    test = ReservoirTest(bert, train, validation, settings, norm, max_length)
    chosen = arms(find_conditions(conditions), ranges)
    with WorkDisplay(len(chosen) * seeds) as work:
        trials, results = run_test(test, chosen, seeds, out, work.begin)
    finish(reservoir_report(test, chosen, trials, results, tolerance), out)


def require_packages(verb: str, *names: str) -> None:
    """Import transformers and other packages of the verb, quietly.

    `names`: by which they are imported. Raises UserError: one is not installed.
    """
    from megatron_patches.engine.compat import silence_expected_warnings
    from pretrain.export.packages import require_transformers
    from pretrain.ranks.devices import use_cuda

    silence_expected_warnings()
    # Transformers imports DeepSpeed where it is installed, which would print the accelerator it detects.
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if use_cuda() else "cpu")
    require_transformers(verb)
    for name in names:
        try:
            import_module(name)
        except ImportError as error:
            package = {"sklearn": "scikit-learn"}.get(name, name)
            raise UserError(
                f"{verb} needs the package {package} ({error}): pip install 'ora-pretrain[eval]'"
            ) from error


def _plan(
    models: list[Path], baseline: str | None, trust_code: bool, settings: Settings, *options: Any
) -> Plan:
    """Open the models, group them and return the plan; `options` are the further fields of `Plan`."""
    from pretrain.finetuning.models import group_models, open_pretrained
    from pretrain.finetuning.trials import Plan

    opened = [open_pretrained(path, trust_code) for path in models]
    return Plan(opened, group_models(opened, baseline), settings, *options)


def _publish(
    experiment: str,
    title: str,
    plan: Plan,
    trials: list[Trial],
    details: list[dict[str, Any]],
    tolerance: float,
    notes: list[str],
    out: Path,
) -> None:
    """Write and print the report; the predictions themselves are in OUT/trials."""
    from pretrain.finetuning.report import fine_tuned_report
    from pretrain.study.report import finish

    left_out = ("predictions", "translations")
    content = {
        "settings": asdict(plan.settings),
        "models": [_model_facts(model, plan.groups.name_of(model)) for model in plan.models],
        "trainings": [{key: value for key, value in one.items() if key not in left_out} for one in details],
    }
    kept = sum(bool(one["kept"]) for one in details)
    remark = f" ({kept} of {len(details)} trainings were there)" if kept else ""
    report = fine_tuned_report(experiment, title, trials, plan.groups.baseline, tolerance, notes, content)
    finish(report, out, remark=remark)


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
    from pretrain.finetuning.metrics import constant_score

    value = 100 * constant_score(data.task, [example.label for example in data.validation])
    return f"{data.task.name}: the most frequent label, given always, scores {value:.2f}"


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
