"""Training with the Trainer of transformers: early stopping, and nothing left on disk.

The Trainer would keep the best weights in checkpoints. Here they are copied in memory, and its bars
and logs are switched off.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import (
    EvalPrediction,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

from laboratory.finetuning.encoding import Item
from pretrain.errors import UserError
from pretrain.ranks.devices import use_cuda
from pretrain.ranks.gpu_settings import use_arithmetic

Collator = Callable[[list[Any]], Any]
"""Items to a padded batch: a data collator of transformers."""
Judge = Callable[[np.ndarray, np.ndarray], float]
"""(labels, outputs) -> a score; more is better."""


@dataclass(frozen=True)
class Settings:
    """Hyperparameters of a fine-tuning: AdamW with a linear warmup and a linear decay to zero.

    Attributes:
        learning_rate: Peak learning rate.
        epochs: Passes over the training examples, at most.
        batch_size: Examples of a step.
        warmup: The part of all steps in which the rate rises.
        weight_decay: Weight decay of matrices.
        evaluate_every: Steps between two evaluations of the examples set aside; every epoch has at
            least one.
        patience: Evaluations without a better one that end the training; 0: none do.
    """

    learning_rate: float = 5e-5
    epochs: int = 5
    batch_size: int = 32
    warmup: float = 0.06
    weight_decay: float = 0.01
    evaluate_every: int = 500
    patience: int = 3


def begin(seed: int) -> None:
    """Seed all random numbers: of the new head first, then of the data's order and dropout.

    Call it before the model is made.
    """
    if use_cuda():
        use_arithmetic(deterministic=True, reduced_precision_reduction=False)
    set_seed(seed)


def fine_tune(
    model: nn.Module,
    train: Sequence[Item],
    aside: Sequence[Item],
    collator: Collator,
    settings: Settings,
    seed: int,
    judge: Judge,
    judged: Mapping[str, Sequence[Item]],
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Train the model, and leave it with its best weights in evaluation mode.

    In float32 on the CPU; on a GPU with products in bf16 from weights in float32.

    Args:
        train: Examples to train on.
        aside: Examples that decide when the training ends, and which weights are the best.
        collator: Function that makes batches.
        settings: hyperparameters.
        seed: Seed of the order of the data, and of dropout.
        judge: Function that scores the examples set aside.
        judged: {name: examples} to compute the outputs of, after the training.

    Returns:
        The course of the training, as report.json has it, with (step, judge's value) of every
        evaluation of the examples set aside in `looks`; and {name: outputs `[items, …]` float32} of
        what is judged.

    Raises:
        UserError: a loss was not finite.
    """
    best = _BestWeights(settings.patience)
    began = time.monotonic()
    # The Trainer insists on a directory, though it saves nothing here.
    with tempfile.TemporaryDirectory() as nothing:
        trainer = Trainer(
            model=model,  # type: ignore[arg-type]
            args=_arguments(settings, len(train), seed, nothing),
            train_dataset=list(train),  # type: ignore[arg-type]
            eval_dataset=list(aside),  # type: ignore[arg-type]
            data_collator=collator,
            compute_metrics=partial(_metrics, judge),
            callbacks=[best],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.remove_callback(ProgressCallback)
        trainer.train()
        # The last steps after a regular evaluation may have given the best weights.
        if not best.looks or best.looks[-1][0] != trainer.state.global_step:
            trainer.evaluate()
        best.restore(model)
        outputs = {
            name: np.asarray(trainer.predict(list(items)).predictions)  # type: ignore[arg-type]
            for name, items in judged.items()
        }
    model.eval()
    course = {
        "steps": trainer.state.global_step,
        "best_step": best.step,
        "best": best.value,
        "looks": best.looks,
        "seconds": time.monotonic() - began,
        "device": str(trainer.args.device),
    }
    return course, outputs


class _BestWeights(TrainerCallback):
    """Callback that keeps the best weights, and ends the training when none are better."""

    def __init__(self, patience: int) -> None:
        self.looks: list[tuple[int, float]] = []
        self.value, self.step = -math.inf, 0
        self._patience = patience
        self._weights: dict[str, torch.Tensor] = {}

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        metrics, model = kwargs["metrics"], kwargs["model"]
        loss = metrics["eval_loss"]
        if not math.isfinite(loss):
            raise UserError(
                f"the loss of step {state.global_step} of a fine-tuning is {loss}; lower "
                "--learning-rate"
            )
        value = metrics["eval_judged"]
        self.looks.append((state.global_step, value))
        if value > self.value or not self._weights:
            self.value, self.step = value, state.global_step
            self._weights = {
                name: weight.detach().cpu().clone()
                for name, weight in model.named_parameters()
                if weight.requires_grad
            }
        elif self._patience and sum(step > self.step for step, _ in self.looks) >= self._patience:
            control.should_training_stop = True

    def restore(self, model: nn.Module) -> None:
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name in self._weights:
                    weight.copy_(self._weights[name])


def _metrics(judge: Judge, predicted: EvalPrediction) -> dict[str, float]:
    return {"judged": judge(np.asarray(predicted.label_ids), np.asarray(predicted.predictions))}


def _arguments(settings: Settings, examples: int, seed: int, folder: str) -> TrainingArguments:
    cuda = use_cuda()
    arguments = TrainingArguments(
        output_dir=folder,
        num_train_epochs=settings.epochs,
        per_device_train_batch_size=settings.batch_size,
        per_device_eval_batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        warmup_steps=settings.warmup,
        weight_decay=settings.weight_decay,
        optim="adamw_torch",
        bf16=cuda,
        use_cpu=not cuda,
        seed=seed,
        eval_strategy="steps",
        eval_steps=min(settings.evaluate_every, -(-examples // settings.batch_size)),
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        label_names=["labels"],
        dataloader_pin_memory=cuda,
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # several GPUs would make one batch of as many
    return arguments
