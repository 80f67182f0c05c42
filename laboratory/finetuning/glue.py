"""Fine-tunings on GLUE, and the loop over models, tasks and seeds that keeps each result on disk.

set aside → seed → load → freeze → remember → train → compare with what was remembered → judge
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import FiniteFloat, TypeAdapter
from transformers import DataCollatorWithPadding
from typing_extensions import TypedDict

import pretrain
from data_pipeline.io.forms import Count
from laboratory.finetuning.classification_data import MISMATCHED, TRAIN, VALIDATION, TaskData
from laboratory.finetuning.encoding import ASIDE, MOST_ASIDE, encode_examples, set_aside
from laboratory.finetuning.frozen_rows import freeze, remember, what_changed
from laboratory.finetuning.metrics import measure, predictions_of, score, standard_error
from laboratory.finetuning.models import (
    HEAD,
    Pretrained,
    Tokenizer,
    load_classifier,
    load_tokenizer,
)
from laboratory.finetuning.report import Trial
from laboratory.finetuning.training import Settings, begin, fine_tune
from laboratory.study.cache import ResultCache, content_digest
from laboratory.study.seeds import Groups
from pretrain.ranks.devices import use_cuda


class _Result(TypedDict):
    score: FiniteFloat
    metrics: dict[str, FiniteFloat]
    standard_error: FiniteFloat
    items: Count


class _Kept(TypedDict):
    result: _Result


_KEPT = TypeAdapter(_Kept)


@dataclass(frozen=True)
class Plan:
    """Plan of fine-tunings of exports, each with the seeds 1 … `seeds`.

    Attributes:
        models: The exports.
        groups: The same by method.
        settings: hyperparameters.
        seeds: Number of seeds, each of a new head, the order of examples, dropout and the split.
        max_length: Ids of an example at most; None: as long as the model's own sequences.
        train_query_key: Whether Q and K train like everything else.
    """

    models: Sequence[Pretrained]
    groups: Groups[Pretrained]
    settings: Settings
    seeds: int = 3
    max_length: int | None = None
    train_query_key: bool = False


class GlueFineTuning:
    """Fine-tuning of an export on a task of GLUE, without the seed.

    Attributes:
        identity: Everything that decides the result, beside the seed; as JSON gives it back.
        train: Examples to train on, of which each seed sets some aside.
        judged: {name: examples} to compute the outputs of, after the training.
        name: Name of model and task.
    """

    def __init__(self, plan: Plan, model: Pretrained, tokenizer: Tokenizer, data: TaskData) -> None:
        self.plan, self.model, self.tokenizer, self.task = plan, model, tokenizer, data.task
        self.frozen_rows = {} if plan.train_query_key else model.frozen_rows
        self.name = f"{model.name}-{data.task.name}"
        longest = min(plan.max_length or tokenizer.longest, tokenizer.longest)
        splits = {TRAIN: data.train, VALIDATION: data.validation, MISMATCHED: data.mismatched}
        encoded = {
            name: encode_examples(
                data.task, examples, tokenizer.ids, start=tokenizer.start, longest=longest
            )
            for name, examples in splits.items()
        }
        self.train = encoded.pop(TRAIN)
        self.judged = {name: split for name, split in encoded.items() if len(split)}
        packages = ("torch", "transformers", "accelerate")
        self.identity = {
            "program": pretrain.__version__,
            "packages": {name: version(name) for name in packages},
            "device": "cuda" if use_cuda() else "cpu",
            "model": model.digest,
            "frozen_rows": content_digest(self.frozen_rows),
            "settings": asdict(plan.settings),
            "task": data.task.name,
            "examples": content_digest(
                [[asdict(example) for example in split] for split in splits.values()]
            ),
            "longest": longest,
        }

    def file_name(self, seed: int) -> str:
        """Return the file name of a result, unique among models of one name."""
        directory_digest = hashlib.sha256(str(self.model.directory.resolve()).encode()).hexdigest()[
            :8
        ]
        return f"{self.name}-{seed}-{directory_digest}".replace("/", "_")

    def run(self, seed: int) -> dict[str, Any]:
        """Fine-tune with one seed, and check what stayed frozen.

        Returns:
            {"result": the result}.

        Raises:
            UserError: too few examples, a model that cannot be loaded, a loss that is not finite,
                or weights that should have changed and did not.
            RuntimeError: frozen rows changed, which is a defect.
        """
        train, aside = set_aside(self.train.items, ASIDE, MOST_ASIDE, seed)
        # Before the model is loaded: its new head is the first thing drawn.
        begin(seed)
        model = load_classifier(self.model, self.task, self.tokenizer.start)
        freeze(model, self.frozen_rows)
        state = remember(model, self.frozen_rows)
        course, outputs = fine_tune(
            model,
            train,
            aside,
            collator=DataCollatorWithPadding(self.tokenizer.program),
            settings=self.plan.settings,
            seed=seed,
            judge=self._judge,
            judged={name: encoded.items for name, encoded in self.judged.items()},
        )
        predictions = {
            name: predictions_of(self.task, task_outputs) for name, task_outputs in outputs.items()
        }
        result = {
            **self._scores(predictions),
            "items": sum(map(len, self.judged.values())),
            "examples": {
                "trained": len(train),
                "set_aside": len(aside),
                "shortened": self.train.shortened,
                "shortened_judged": sum(split.shortened for split in self.judged.values()),
            },
            "training": course,
            "query_key": "trained" if self.plan.train_query_key else "as in the pretraining",
            "weights": what_changed(model, self.frozen_rows, state, HEAD),
            "predictions": {name: predicted.tolist() for name, predicted in predictions.items()},
        }
        return {"result": result}

    def _judge(self, labels: np.ndarray, outputs: np.ndarray) -> float:
        """Return the task's score on examples that are set aside."""
        return score(measure(self.task, labels, predictions_of(self.task, outputs)))

    def _scores(self, predictions: dict[str, np.ndarray]) -> dict[str, Any]:
        """Return metrics, score and standard error; two validation sets count equally."""
        metrics, errors = {}, []
        for name, predicted in predictions.items():
            labels = self.judged[name].labels
            for metric, value in measure(self.task, labels, predicted).items():
                metrics[metric + name.removeprefix(VALIDATION)] = value
            errors.append(standard_error(self.task, labels, predicted))
        return {
            "metrics": metrics,
            "score": score(metrics),
            "standard_error": math.hypot(*errors) / len(errors),
        }


def run_glue(
    plan: Plan, tasks: Sequence[TaskData], out: Path, begin_piece: Callable[[str], None]
) -> tuple[list[Trial], list[dict[str, Any]]]:
    """Fine-tune every model on every task with every seed, and reuse results on disk.

    Args:
        tasks: Tasks with their examples.
        out: directory, whose `trials` has the results.
        begin_piece: Called with the title of each fine-tuning before it begins.

    Returns:
        The scores, and what report.json has of each; `kept`: the result was on disk already.

    Raises:
        UserError: a result cannot be written, or as `load_tokenizer` and `GlueFineTuning.run`.
    """
    cache = ResultCache(out / "trials", _KEPT)
    scores, details = [], []
    for model in plan.models:
        tokenizer = load_tokenizer(model)
        for data in tasks:
            tuning = GlueFineTuning(plan, model, tokenizer, data)
            for seed in range(1, plan.seeds + 1):
                begin_piece(title := f"{tuning.name}-{seed}")
                identity = {**tuning.identity, "seed": seed}
                content, kept = cache.read_or_make(
                    tuning.file_name(seed), identity, partial(tuning.run, seed)
                )
                result = content["result"]
                scores.append(
                    Trial(
                        task=data.task.name,
                        group=plan.groups.name_of(model),
                        model=model.name,
                        pretraining_seed=model.seed,
                        seed=seed,
                        **{key: result[key] for key in Trial.MEASURED},
                    )
                )
                details.append({"name": title, "kept": kept, **result})
    return scores, details
