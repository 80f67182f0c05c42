"""Fine-tuning of a classifier by the Trainer of transformers, with Q and K frozen or not.

    encoder     as its tokenizer joins texts: [CLS] first [SEP] second [SEP]
    decoder     [end of document] first sentence [newline] second sentence

A decoder's classifier reads the last token, which has seen all others; a document's end is what
every text of its pretraining began after.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import (
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    EvalPrediction,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import PredictionOutput

from laboratory.finetuning.glue_data import TRAIN, Task, measure
from laboratory.finetuning.models import Pretrained, Tokenizer, load_classifier
from laboratory.finetuning.query_key import Rows, freeze
from pretrain.errors import UserError
from pretrain.ranks.devices import use_cuda
from pretrain.ranks.gpu_settings import use_arithmetic

ASIDE, MOST_ASIDE = 0.1, 1000
"""Share of the training examples that chooses the best epoch, and their largest number."""
Prepare = Callable[[Any, int], Rows]
"""(classifier, seed) -> rows to freeze; it may change weights first."""


@dataclass(frozen=True)
class Settings:
    """Hyperparameters of a fine-tuning: AdamW with a linear warmup and a linear decay to zero.

    Attributes:
        learning_rate: Peak learning rate.
        epochs: Passes over the training examples, at most.
        batch_size: Examples of a step.
        warmup: The part of all steps in which the rate rises.
        patience: Epochs without a better one that end the training; 0: none do.
        max_length: Tokens of an example at most; None: as many as the model has positions.
    """

    learning_rate: float = 5e-5
    epochs: int = 5
    batch_size: int = 32
    warmup: float = 0.1
    patience: int = 3
    max_length: int | None = None


def encode(task: Task, rows: Any, tokenizer: Tokenizer, max_length: int | None) -> Any:
    """Encode the rows of a split.

    Args:
        rows: `datasets.Dataset` with the task's columns.
        max_length: Tokens of an example at most; longer ones are cut.

    Returns:
        `datasets.Dataset` of `input_ids`, `labels` and what else the tokenizer gives.
    """
    longest = min(max_length or tokenizer.longest, tokenizer.longest)
    label_type = float if not task.labels else int

    def encoded(batch: Mapping[str, Any]) -> dict[str, Any]:
        labels = [label_type(label) for label in batch["label"]]
        texts = [batch[column] for column in task.columns]
        if not tokenizer.decoder:
            joined = tokenizer.program(*texts, truncation=True, max_length=longest)
            return {**joined, "labels": labels}
        joined = tokenizer.program(
            list(map("\n".join, zip(*texts, strict=True))),
            add_special_tokens=False,
            truncation=True,
            max_length=longest - 1,
        )
        return {
            "input_ids": [[tokenizer.start, *ids] for ids in joined["input_ids"]],
            "labels": labels,
        }

    return rows.map(
        encoded,
        batched=True,
        remove_columns=rows.column_names,
        keep_in_memory=True,
        load_from_cache_file=False,
    )


@dataclass(frozen=True)
class FineTuning:
    """Fine-tuning of one model on one task, whatever the seed.

    Attributes:
        task: The task.
        metrics: Metrics that are reported.
        splits: {split: encoded examples}.
        prepare: Function that chooses the rows to freeze.
    """

    pretrained: Pretrained
    tokenizer: Tokenizer
    task: Task
    metrics: tuple[str, ...]
    splits: Mapping[str, Any]
    prepare: Prepare
    settings: Settings

    def run(self, seed: int) -> dict[str, Any]:
        """Fine-tune with one seed: of the new head, the examples' order, dropout, those set aside.

        Weights are in float32; on a GPU products are in bf16.

        Raises:
            UserError: too few examples, a model that cannot be loaded, a loss that is not finite.
            RuntimeError: frozen rows changed, which is a defect.
        """
        started = time.monotonic()
        train = self.splits[TRAIN]
        aside = min(MOST_ASIDE, max(1, round(ASIDE * len(train))))
        if len(train) < 2 * aside:
            raise UserError(
                f"{len(train)} training examples are too few to set some aside; give more"
            )
        halves = train.train_test_split(test_size=aside, seed=seed)
        if use_cuda():
            use_arithmetic(deterministic=True, reduced_precision_reduction=False)
        set_seed(seed)  # before the new head is drawn
        model = load_classifier(self.pretrained, self.task, self.tokenizer)
        frozen = freeze(model, self.prepare(model, seed))
        total = sum(weight.numel() for weight in model.parameters())
        with tempfile.TemporaryDirectory() as directory:
            trainer = self._trainer(model, halves, seed, directory)
            outcome = trainer.train()
            if not math.isfinite(outcome.training_loss):
                raise UserError(
                    f"the loss of a fine-tuning is {outcome.training_loss}; lower --learning-rate"
                )
            frozen.check()
            values = [
                self._measure(trainer.predict(self.splits[split]))  # of the best epoch
                for split in self.task.validation
            ]
        epochs = {
            round(record["epoch"]): record["eval_score"]
            for record in trainer.state.log_history
            if "eval_score" in record
        }
        return {
            "metrics": {
                name: float(np.mean([split[name] for split in values])) for name in values[0]
            },
            "items": sum(len(self.splits[split]) for split in self.task.validation),
            "best_epoch": max(epochs, key=lambda epoch: epochs[epoch]),
            "score_aside_by_epoch": list(epochs.values()),
            "frozen_share": frozen.entries / total,
            "frozen_parameters": frozen.entries,
            "parameters": total,
            "seconds": round(time.monotonic() - started, 1),
        }

    def _measure(self, predicted: EvalPrediction | PredictionOutput) -> dict[str, float]:
        """Return the reported metrics, and GLUE's score: the mean of the task's own."""
        labels, outputs = map(np.asarray, (predicted.label_ids, predicted.predictions))
        names = dict.fromkeys([*self.task.metrics, *self.metrics])
        values = measure(tuple(names), labels, outputs)
        values["score"] = sum(values[name] for name in self.task.metrics) / len(self.task.metrics)
        return values

    def _trainer(self, model: Any, halves: Any, seed: int, directory: str) -> Trainer:
        cuda = use_cuda()
        settings = self.settings
        arguments = TrainingArguments(
            output_dir=directory,
            num_train_epochs=settings.epochs,
            per_device_train_batch_size=settings.batch_size,
            per_device_eval_batch_size=settings.batch_size,
            learning_rate=settings.learning_rate,
            warmup_steps=settings.warmup,
            weight_decay=0.0,  # else it would shrink frozen rows of weights that train in part
            optim="adamw_torch",
            bf16=cuda,
            use_cpu=not cuda,
            seed=seed,
            eval_strategy="epoch",
            save_strategy="epoch",
            save_only_model=True,
            save_total_limit=1,
            load_best_model_at_end=True,
            metric_for_best_model="score",
            logging_strategy="no",
            logging_nan_inf_filter=False,
            report_to="none",
            disable_tqdm=True,
            label_names=["labels"],
            dataloader_pin_memory=cuda,
        )
        arguments._n_gpu = min(arguments.n_gpu, 1)  # several GPUs would make one batch of as many
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=halves["train"],
            eval_dataset=halves["test"],
            data_collator=DataCollatorWithPadding(self.tokenizer.program),
            compute_metrics=self._measure,
            callbacks=[EarlyStoppingCallback(settings.patience)] if settings.patience else [],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.remove_callback(ProgressCallback)
        return trainer


def device_name() -> str:
    """Return the device that fine-tunings use."""
    return "cuda" if use_cuda() else "cpu"
