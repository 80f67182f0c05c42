"""Fine-tuning on GLUE: every model, task and seed, with Q and K frozen as they were in the pretraining."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from pretrain.finetuning.classification_data import MISMATCHED, VALIDATION, Task, TaskData, set_aside
from pretrain.finetuning.encoding import Collate, Encoded, encode_examples
from pretrain.finetuning.frozen_rows import freeze, remember, what_changed
from pretrain.finetuning.metrics import measure, predictions_of, score, standard_error
from pretrain.finetuning.models import HEAD, Tokenizer, load_classifier, load_tokenizer
from pretrain.finetuning.plan import ASIDE, MOST_ASIDE, Plan
from pretrain.finetuning.pretrained import Pretrained
from pretrain.finetuning.report import Trial
from pretrain.finetuning.training import Examples, begin, fine_tune
from pretrain.finetuning.trials import TrialFiles, content_digest

PACKAGES = ("accelerate", "sklearn")


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
    plan: Plan, tasks: Sequence[TaskData], files: TrialFiles, begins: Callable[[str], None]
) -> tuple[list[Trial], list[dict[str, Any]]]:
    """Every training, or its kept result; and what report.json has of each.

    Args:
        begins: is told of each before it begins.

    Raises:
        UserError: as `load_classifier` and `fine_tune`.
    """
    trials, details = [], []
    for model, group in zip(plan.models, plan.groups, strict=True):
        tokenizer = load_tokenizer(model)
        for data in tasks:
            both = _encode(plan, model, tokenizer, data)
            for seed in range(1, plan.seeds + 1):
                name = f"{model.name}-{data.task.name}-{seed}"
                begins(name)
                result, kept = files.find_or_make(
                    f"{name}-{model.place}",
                    {**both.identity, "seed": seed},
                    partial(_train, plan, both, seed),
                )
                trials.append(_trial(data.task, group, model, seed, result))
                details.append({"name": name, "kept": kept, **result})
    return trials, details


def _encode(plan: Plan, model: Pretrained, tokenizer: Tokenizer, data: TaskData) -> _ModelOnTask:
    longest = plan.longest(tokenizer.longest)
    splits = {VALIDATION: data.validation, MISMATCHED: data.mismatched}
    train, *judged = (
        encode_examples(data.task, examples, tokenizer.ids, tokenizer.start, longest)
        for examples in (data.train, *splits.values())
    )
    identity = {
        **plan.identity(model, PACKAGES),
        "task": data.task.name,
        "examples": content_digest(
            [[asdict(example) for example in split] for split in (data.train, *splits.values())]
        ),
        "longest": longest,
    }
    named = {name: found for name, found in zip(splits, judged, strict=True) if len(found)}
    return _ModelOnTask(model, tokenizer, data.task, train, named, identity)


def _train(plan: Plan, both: _ModelOnTask, seed: int) -> dict[str, Any]:
    """One training, from its seed to its numbers."""
    task, rows = both.task, plan.frozen_rows(both.model)
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
        plan.settings,
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
        "query_key": "trained" if plan.train_query_key else "as in the pretraining",
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
        score=result["score"],
        metrics=result["metrics"],
        standard_error=result["standard_error"],
        items=result["items"],
    )
