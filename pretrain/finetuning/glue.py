"""Fine-tuning on GLUE: every model and task, with Q and K frozen as they were in the pretraining."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from torch import nn
from transformers import DataCollatorWithPadding

from pretrain.finetuning.classification_data import MISMATCHED, TRAIN, VALIDATION, Task, TaskData
from pretrain.finetuning.encoding import encode_examples
from pretrain.finetuning.metrics import classified, measure, predictions_of, score
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
        self.collator = DataCollatorWithPadding(tokenizer.program)
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
        return load_classifier(self.model, self.glue_task, self.tokenizer.start), {}

    def result(self, seed: int, tuned: FineTuned) -> dict[str, Any]:
        """Return the result; of two validation sets the score is the mean."""
        predictions = {name: predictions_of(self.glue_task, made) for name, made in tuned.outputs.items()}
        each = {
            name: classified(self.glue_task, self.judged[name].labels, predicted)
            for name, predicted in predictions.items()
        }
        metrics = {
            metric + name.removeprefix(VALIDATION): value
            for name, one in each.items()
            for metric, value in one["metrics"].items()
        }
        return {
            "metrics": metrics,
            "score": score(metrics),
            "standard_error": math.hypot(*(one["standard_error"] for one in each.values())) / len(each),
            "items": sum(map(len, self.judged.values())),
            "examples": {
                "trained": tuned.trained,
                "set_aside": tuned.set_aside,
                "shortened": self.train.shortened,
            },
            **self.training(tuned),
            "predictions": {name: predicted.tolist() for name, predicted in predictions.items()},
        }


def glue_fine_tunings(plan: Plan, tasks: Sequence[TaskData]) -> Iterator[tuple[GlueFineTuning, int]]:
    """Yield every model of the plan with every task, encoded when its turn comes, and every seed.

    Raises UserError as `load_tokenizer`.
    """
    for model in plan.models:
        tokenizer = load_tokenizer(model)
        for data in tasks:
            one = GlueFineTuning(plan, model, tokenizer, data)
            yield from ((one, seed) for seed in range(1, plan.seeds + 1))


def task_judge(task: Task) -> Judge:
    """Return the judge of examples that are set aside: the task's score."""
    return lambda labels, outputs: score(measure(task, labels, predictions_of(task, outputs)))
