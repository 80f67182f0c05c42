"""Fine-tuning on GLUE: every model, task and seed, with Q and K frozen as they were in the pretraining."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

import pretrain
from pretrain.evaluation.fine_tuned_report import Trial
from pretrain.finetuning.classification_data import MISMATCHED, VALIDATION, Task, TaskData, set_aside
from pretrain.finetuning.encoding import Collate, Encoded, encode_examples
from pretrain.finetuning.frozen_rows import freeze, remember, what_changed
from pretrain.finetuning.metrics import measure, predictions_of, score, standard_error
from pretrain.finetuning.models import HEAD, Tokenizer, load_classifier, load_tokenizer
from pretrain.finetuning.packages import package_versions
from pretrain.finetuning.pretrained import Pretrained
from pretrain.finetuning.settings import Settings
from pretrain.finetuning.training import Examples, begin, fine_tune
from pretrain.finetuning.trials import TrialFiles, content_digest
from pretrain.ranks.devices import use_cuda

PACKAGES = ("accelerate", "sklearn")
ASIDE, MOST_ASIDE = 0.1, 1000
"""Of the training examples, those by which training is ended: this part of them, but no more than so many."""


@dataclass(frozen=True)
class GlueExperiment:
    """What is trained.

    Attributes:
        groups: of the models.
        seeds: 1 … this: of the head, the order of examples, dropout, and which examples are set aside.
        max_length: ids of an example at most; None: as long as the model's own sequences.
        train_query_key: Q and K train like everything else.
    """

    models: Sequence[Pretrained]
    groups: Sequence[str]
    tasks: Sequence[TaskData]
    settings: Settings
    seeds: int = 3
    max_length: int | None = None
    train_query_key: bool = False

    @property
    def pieces(self) -> int:
        return len(self.models) * len(self.tasks) * self.seeds


@dataclass(frozen=True)
class _ModelOnTask:
    """A model and the examples of a task as its ids."""

    model: Pretrained
    tokenizer: Tokenizer
    task: Task
    train: Encoded
    judged: dict[str, Encoded]
    identity: dict[str, Any]


def run_glue(
    experiment: GlueExperiment, files: TrialFiles, begins: Callable[[str], None]
) -> tuple[list[Trial], list[dict[str, Any]]]:
    """Every training, or its kept result; and what report.json has of each.

    Args:
        begins: is told of each before it begins.

    Raises:
        UserError: as `load_classifier` and `fine_tune`.
    """
    trials, details = [], []
    for model, group in zip(experiment.models, experiment.groups, strict=True):
        tokenizer = load_tokenizer(model)
        for data in experiment.tasks:
            both = _encode(experiment, model, tokenizer, data)
            for seed in range(1, experiment.seeds + 1):
                name = f"{model.name}-{data.task.name}-{seed}"
                begins(name)
                identity = {**both.identity, "seed": seed}
                result, kept = files.find_or_make(
                    f"{name}-{content_digest(str(model.directory.resolve()))[:8]}",
                    identity,
                    partial(_train, experiment, both, seed),
                )
                trials.append(_trial(data.task, group, model, seed, result))
                details.append({"name": name, "kept": kept, **result})
    return trials, details


def _encode(
    experiment: GlueExperiment, model: Pretrained, tokenizer: Tokenizer, data: TaskData
) -> _ModelOnTask:
    longest = min(experiment.max_length or tokenizer.longest, tokenizer.longest)
    splits = {VALIDATION: data.validation, MISMATCHED: data.mismatched}
    train, *judged = (
        encode_examples(data.task, examples, tokenizer.ids, tokenizer.start, longest)
        for examples in (data.train, *splits.values())
    )
    identity = {
        "program": pretrain.__version__,
        "packages": package_versions(*PACKAGES),
        "device": "cuda" if use_cuda() else "cpu",
        "model": model.digest,
        "frozen_rows": content_digest({} if experiment.train_query_key else model.frozen_rows),
        "task": data.task.name,
        "examples": content_digest(
            [[asdict(example) for example in split] for split in (data.train, *splits.values())]
        ),
        "longest": longest,
        "settings": experiment.settings.as_dict(),
    }
    named = {name: found for name, found in zip(splits, judged, strict=True) if len(found)}
    return _ModelOnTask(model, tokenizer, data.task, train, named, identity)


def _train(experiment: GlueExperiment, both: _ModelOnTask, seed: int) -> dict[str, Any]:
    """One training, from its seed to its numbers."""
    task, rows = both.task, {} if experiment.train_query_key else both.model.frozen_rows
    train, aside = set_aside(both.train.items, ASIDE, MOST_ASIDE, seed)
    begin(seed)
    model = load_classifier(both.model, task, both.tokenizer.start)
    freeze(model, rows)
    before = remember(model, rows)
    outcome, outputs = fine_tune(
        model,
        Examples(
            train,
            aside,
            Collate(both.tokenizer.start),
            lambda labels, found: score(measure(task, labels, predictions_of(task, found))),
        ),
        experiment.settings,
        seed,
        {name: encoded.items for name, encoded in both.judged.items()},
    )
    weights = what_changed(model, rows, before, HEAD)
    labels = {name: np.array([i["labels"] for i in encoded.items]) for name, encoded in both.judged.items()}
    predictions = {name: predictions_of(task, found) for name, found in outputs.items()}
    return {
        **_judge(task, labels, predictions),
        "items": sum(map(len, labels.values())),
        "examples": {"trained": len(train), "set_aside": len(aside), "shortened": both.train.shortened},
        "training": outcome.as_dict(),
        "query_key": "trained" if experiment.train_query_key else "as in the pretraining",
        "weights": weights,
        "predictions": {name: found.tolist() for name, found in predictions.items()},
    }


def _judge(task: Task, labels: dict[str, Any], predictions: dict[str, Any]) -> dict[str, Any]:
    """Metrics, score and standard error; of two validation sets the score is the mean."""
    metrics, errors = {}, []
    for name, found in predictions.items():
        suffix = name.removeprefix(VALIDATION)
        for metric, value in measure(task, labels[name], found).items():
            metrics[f"{metric}{suffix}"] = value
        errors.append(standard_error(task, labels[name], found))
    error = math.sqrt(sum(one**2 for one in errors)) / len(errors)
    return {"metrics": metrics, "score": score(metrics), "standard_error": error}


def _trial(task: Task, group: str, model: Pretrained, seed: int, result: dict[str, Any]) -> Trial:
    return Trial(
        task=task.name,
        group=group,
        model=model.name,
        pretraining_seed=model.seed,
        seed=seed,
        score=100 * result["score"],
        metrics={name: 100 * value for name, value in result["metrics"].items()},
        standard_error=100 * result["standard_error"],
        items=result["items"],
    )
