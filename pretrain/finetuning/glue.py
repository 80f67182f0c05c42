"""Fine-tuning on GLUE: every model and task, with Q and K frozen as they were in the pretraining."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from torch import nn

from pretrain.finetuning.classification_data import MISMATCHED, TRAIN, VALIDATION, Task, TaskData
from pretrain.finetuning.encoding import encode_examples
from pretrain.finetuning.metrics import measure, predictions_of, score, standard_error
from pretrain.finetuning.models import HEAD, Tokenizer, load_classifier, load_tokenizer
from pretrain.finetuning.plan import ExportFineTuning, Plan
from pretrain.finetuning.pretrained import Pretrained
from pretrain.finetuning.training import Judge
from pretrain.finetuning.trials import FineTuned
from pretrain.study.cache import content_digest

PACKAGES = ("accelerate", "sklearn")


@dataclass(frozen=True)
class GlueFineTuning(ExportFineTuning):
    """Fine-tuning of an export on a task of GLUE."""

    glue_task: Task

    head = HEAD

    def load(self, seed: int) -> tuple[nn.Module, dict[str, Any]]:
        return load_classifier(self.model, self.glue_task, self.pad_id), {}

    @property
    def judge(self) -> Judge:
        return task_judge(self.glue_task)

    def result(self, seed: int, tuned: FineTuned) -> dict[str, Any]:
        labels = {name: encoded.labels for name, encoded in self.judged.items()}
        predictions = {
            name: predictions_of(self.glue_task, outputs) for name, outputs in tuned.outputs.items()
        }
        return {
            **_judge(self.glue_task, labels, predictions),
            "items": sum(map(len, labels.values())),
            "examples": {
                "trained": tuned.trained,
                "set_aside": tuned.set_aside,
                "shortened": self.train.shortened,
            },
            **self.training(tuned),
            "predictions": {name: predicted.tolist() for name, predicted in predictions.items()},
        }

    def scores(self, result: Mapping[str, Any]) -> tuple[float, Mapping[str, float], float]:
        return result["score"], result["metrics"], result["standard_error"]


def glue_fine_tunings(plan: Plan, tasks: Sequence[TaskData]) -> Iterator[GlueFineTuning]:
    """Yield every model of the plan with every task, encoded when its turn comes.

    Raises:
        UserError: as `load_tokenizer`.
    """
    for model, group in zip(plan.models, plan.groups, strict=True):
        tokenizer = load_tokenizer(model)
        for data in tasks:
            yield _encode(plan, model, group, tokenizer, data)


def _encode(
    plan: Plan, model: Pretrained, group: str, tokenizer: Tokenizer, data: TaskData
) -> GlueFineTuning:
    longest = plan.longest(tokenizer.longest)
    splits = {TRAIN: data.train, VALIDATION: data.validation, MISMATCHED: data.mismatched}
    encoded = {
        name: encode_examples(data.task, examples, tokenizer.ids, tokenizer.start, longest)
        for name, examples in splits.items()
    }
    identity = {
        **plan.identity(model, PACKAGES),
        "task": data.task.name,
        "examples": content_digest([[asdict(example) for example in split] for split in splits.values()]),
        "longest": longest,
    }
    return GlueFineTuning(
        identity=identity,
        settings=plan.settings,
        frozen_rows=plan.frozen_rows(model),
        train=encoded.pop(TRAIN),
        judged={name: split for name, split in encoded.items() if len(split)},
        pad_id=tokenizer.start,
        model=model,
        group=group,
        train_query_key=plan.train_query_key,
        task=data.task.name,
        glue_task=data.task,
    )


def task_judge(task: Task) -> Judge:
    """Return the judge of examples that are set aside: the task's score."""
    return lambda labels, outputs: score(measure(task, labels, predictions_of(task, outputs)))


def _judge(
    task: Task, labels: Mapping[str, np.ndarray], predictions: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    """Return metrics, score and standard error; of two validation sets the score is the mean."""
    metrics, errors = {}, []
    for name, predicted in predictions.items():
        suffix = name.removeprefix(VALIDATION)
        for metric, value in measure(task, labels[name], predicted).items():
            metrics[f"{metric}{suffix}"] = value
        errors.append(standard_error(task, labels[name], predicted))
    error = math.sqrt(sum(one**2 for one in errors)) / len(errors)
    return {"metrics": metrics, "score": score(metrics), "standard_error": error}
