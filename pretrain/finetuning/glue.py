"""Fine-tuning on GLUE: every model and task, with Q and K frozen as they were in the pretraining."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from torch import nn

from pretrain.finetuning.classification_data import MISMATCHED, TRAIN, VALIDATION, Task, TaskData
from pretrain.finetuning.encoding import encode_examples
from pretrain.finetuning.metrics import measure, predictions_of, score, standard_error
from pretrain.finetuning.models import HEAD, Pretrained, Tokenizer, load_classifier, load_tokenizer
from pretrain.finetuning.training import Judge
from pretrain.finetuning.trials import ExportFineTuning, FineTuned, Plan
from pretrain.study.cache import content_digest


class GlueFineTuning(ExportFineTuning):
    """Fine-tuning of an export on a task of GLUE."""

    head = HEAD

    def __init__(self, plan: Plan, model: Pretrained, tokenizer: Tokenizer, data: TaskData) -> None:
        super().__init__(plan, model, tokenizer, data.task.name)
        self.glue_task, self.judge = data.task, task_judge(data.task)
        splits = {TRAIN: data.train, VALIDATION: data.validation, MISMATCHED: data.mismatched}
        encoded = {
            name: encode_examples(data.task, examples, tokenizer.ids, tokenizer.start, self.longest)
            for name, examples in splits.items()
        }
        self.train = encoded.pop(TRAIN)
        self.judged = {name: split for name, split in encoded.items() if len(split)}
        examples = [[asdict(example) for example in split] for split in splits.values()]
        self.identity = {
            **self.common_identity("accelerate", "scikit-learn"),
            "task": self.task,
            "examples": content_digest(examples),
            "longest": self.longest,
        }

    def load(self, seed: int) -> tuple[nn.Module, dict[str, Any]]:
        return load_classifier(self.model, self.glue_task, self.pad_id), {}

    def result(self, seed: int, tuned: FineTuned) -> dict[str, Any]:
        predictions = {
            name: predictions_of(self.glue_task, outputs) for name, outputs in tuned.outputs.items()
        }
        counts = {
            "trained": tuned.trained,
            "set_aside": tuned.set_aside,
            "shortened": self.train.shortened,
        }
        return {
            **self._judged(predictions),
            "items": sum(map(len, self.judged.values())),
            "examples": counts,
            **self.training(tuned),
            "predictions": {name: predicted.tolist() for name, predicted in predictions.items()},
        }

    def _judged(self, predictions: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Return metrics, score and standard error; of two validation sets the score is the mean."""
        metrics, errors = {}, []
        for name, predicted in predictions.items():
            labels = self.judged[name].labels
            for metric, value in measure(self.glue_task, labels, predicted).items():
                metrics[metric + name.removeprefix(VALIDATION)] = value
            errors.append(standard_error(self.glue_task, labels, predicted))
        error = math.sqrt(sum(one**2 for one in errors)) / len(errors)
        return {"metrics": metrics, "score": score(metrics), "standard_error": error}

    def scores(self, result: Mapping[str, Any]) -> tuple[float, Mapping[str, float], float]:
        return result["score"], result["metrics"], result["standard_error"]


def glue_fine_tunings(plan: Plan, tasks: Sequence[TaskData]) -> Iterator[GlueFineTuning]:
    """Yield every model of the plan with every task, encoded when its turn comes.

    Raises:
        UserError: as `load_tokenizer`.
    """
    for model in plan.models:
        tokenizer = load_tokenizer(model)
        for data in tasks:
            yield GlueFineTuning(plan, model, tokenizer, data)


def task_judge(task: Task) -> Judge:
    """Return the judge of examples that are set aside: the task's score."""
    return lambda labels, outputs: score(measure(task, labels, predictions_of(task, outputs)))
