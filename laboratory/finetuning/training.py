"""Fine-tuning of classifiers by the Trainer of transformers, with Q and K frozen or not.

    encoder     as its tokenizer joins texts: [CLS] first [SEP] second [SEP]
    decoder     [end of document] first sentence [newline] second sentence

A decoder's classifier reads the last token, which has seen all others; a document's end is what
every text of its pretraining began after.

| arm of `reservoir` | query and key rows, with their biases |
| --- | --- |
| trained | as pretrained, and they train |
| frozen | as pretrained, frozen |
| per head | of our bank, orthonormal within each head, frozen; biases 0 |
| one matrix | of our bank, orthonormal over all heads of a layer, frozen; biases 0 |
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
from transformers import (
    DataCollatorWithPadding,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)

import pretrain
from laboratory.finetuning.glue_data import TRAIN, Task, measure
from laboratory.finetuning.models import Pretrained, load_classifier, load_tokenizer
from laboratory.finetuning.query_key import Rows, all_rows, freeze, query_key, replace_rows
from laboratory.finetuning.report import RESULT, Result, Trial
from laboratory.reporting.progress import WorkDisplay
from laboratory.study.cache import content_digest, read_or_make
from pretrain.errors import UserError
from pretrain.ranks.devices import use_cuda
from pretrain.ranks.gpu_settings import use_arithmetic

ASIDE, MOST_ASIDE = 0.1, 1000
"""Share of the training examples that chooses the best epoch, and their largest number."""
WARMUP = 0.1
"""The part of all steps in which the learning rate rises."""
TRAINED = "trained"
"""Name of the arm that the others of `reservoir` are compared with."""


@dataclass(frozen=True)
class Settings:
    """Hyperparameters of a fine-tuning: AdamW with a linear warmup and a linear decay to zero.

    Attributes:
        learning_rate: Peak learning rate.
        epochs: Passes over the training examples.
        batch_size: Examples of a step.
        max_length: Tokens of an example at most; None: as many as the model has positions.
    """

    learning_rate: float
    epochs: int
    batch_size: int
    max_length: int | None


@dataclass(frozen=True)
class Arm:
    """Variant of a fine-tuning: a model, and what becomes of its query and key rows.

    Attributes:
        group: Name in the report.
        rows: Rows that are frozen, with their biases; None: all of the queries and keys.
        replaced: Before they are frozen, the rows become those of our bank, orthonormal within each
            head or over a layer, and their biases 0; None: they stay as they are.
    """

    group: str
    model: Pretrained
    rows: Rows | None = None
    replaced: Literal["head", "layer"] | None = None

    def prepare(self, classifier: Any, seed: int) -> Rows:
        """Replace rows of a classifier where the arm says so, and return the rows to freeze."""
        if self.rows is not None:
            return self.rows
        projections = query_key(classifier)
        if self.replaced:
            replace_rows(projections, seed, self.replaced)
        return all_rows(projections)


def reservoir_arms(model: Pretrained) -> list[Arm]:
    """Return the four arms of the reservoir test."""
    return [
        Arm(TRAINED, model, rows={}),
        Arm("frozen", model),
        Arm("per head", model, replaced="head"),
        Arm("one matrix", model, replaced="layer"),
    ]


def run_trials(
    arms: Sequence[Arm],
    data: Mapping[Task, Mapping[str, Any]],
    settings: Settings,
    seeds: int,
    out: Path,
) -> list[Trial]:
    """Fine-tune every arm on every task with the seeds 1 … `seeds`; what is on disk is reused.

    Args:
        data: {task: {split: `datasets.Dataset`}}.
        out: Directory, whose `trials` has the results.

    Raises:
        UserError: a result cannot be written, or as `load_tokenizer` and `fine_tune`.
    """
    environment = {
        "program": pretrain.__version__,
        "packages": {name: version(name) for name in ("torch", "transformers", "accelerate")},
        "device": "cuda" if use_cuda() else "cpu",
        "settings": asdict(settings),
    }
    trials = []
    with WorkDisplay(len(arms) * len(data) * seeds) as work:
        for arm, (task, rows) in product(arms, data.items()):
            tokenizer = load_tokenizer(arm.model)
            splits = {
                split: encode(task, split_rows, tokenizer, settings.max_length)
                for split, split_rows in rows.items()
            }
            examples = content_digest([split.to_dict() for split in splits.values()])
            for seed in range(1, seeds + 1):
                work.begin(f"{arm.model.name}, {arm.group}, {task.name}, seed {seed}")
                identity = {
                    **environment,
                    "model": arm.model.digest,
                    "frozen_rows": arm.rows,
                    "replaced": arm.replaced,
                    "task": task.name,
                    "examples": examples,
                    "seed": seed,
                }
                name = f"{task.name}-{seed}-{content_digest(identity)[:16]}"
                train = partial(
                    fine_tune, arm, task, splits, tokenizer=tokenizer, settings=settings, seed=seed
                )
                path = out / "trials" / f"{name}.json"
                result, kept = read_or_make(path, identity, RESULT, train)
                names = (task.name, arm.group, arm.model.name)
                trials.append(Trial(*names, arm.model.seed, seed=seed, kept=kept, result=result))
    return trials


def encode(task: Task, rows: Any, tokenizer: Any, max_length: int | None) -> Any:
    """Encode the rows of a split.

    Args:
        rows: `datasets.Dataset` with the task's columns.
        max_length: Tokens of an example at most; longer ones are cut.

    Returns:
        `datasets.Dataset` of `input_ids`, `labels` and what else the tokenizer gives.
    """
    longest = min(max_length or tokenizer.model_max_length, tokenizer.model_max_length)
    decoder = tokenizer.cls_token_id is None
    label_type = int if task.labels else float

    def encoded(batch: Mapping[str, Any]) -> dict[str, Any]:
        texts = [batch[column] for column in task.columns]
        if decoder:
            joined = list(map("\n".join, zip(*texts, strict=True)))
            cut = {"add_special_tokens": False, "truncation": True, "max_length": longest - 1}
            start = tokenizer.pad_token_id
            columns = {"input_ids": [[start, *ids] for ids in tokenizer(joined, **cut).input_ids]}
        else:
            columns = tokenizer(*texts, truncation=True, max_length=longest)
        return {**columns, "labels": [label_type(label) for label in batch["label"]]}

    return rows.map(
        encoded,
        batched=True,
        remove_columns=rows.column_names,
        keep_in_memory=True,
        load_from_cache_file=False,
    )


def fine_tune(
    arm: Arm, task: Task, splits: Mapping[str, Any], tokenizer: Any, settings: Settings, seed: int
) -> Result:
    """Fine-tune with one seed: of the new head, the examples' order, dropout, those set aside.

    Weights are in float32; on a GPU products are in bf16.

    Args:
        splits: {split: encoded examples}.

    Raises:
        UserError: too few examples, a model that cannot be loaded, a loss that is not finite.
        RuntimeError: frozen rows changed, which is a defect.
    """
    train = splits[TRAIN]
    aside = min(MOST_ASIDE, max(1, round(ASIDE * len(train))))
    if len(train) < 2 * aside:
        raise UserError(f"{len(train)} training examples are too few to set some aside; give more")
    halves = train.train_test_split(test_size=aside, seed=seed)
    if use_cuda():
        use_arithmetic(deterministic=True, reduced_precision_reduction=False)
    set_seed(seed)  # before the new head is drawn
    model = load_classifier(arm.model, task, tokenizer)
    frozen = freeze(model, arm.prepare(model, seed))

    def scores(predicted: Any) -> dict[str, float]:
        labels, outputs = map(np.asarray, (predicted.label_ids, predicted.predictions))
        return measure(task, labels, outputs)

    with tempfile.TemporaryDirectory() as directory:
        trainer = Trainer(
            model=model,
            args=_arguments(settings, seed, directory),
            train_dataset=halves["train"],
            eval_dataset=halves["test"],
            data_collator=DataCollatorWithPadding(tokenizer),
            compute_metrics=scores,
        )
        trainer.remove_callback(PrinterCallback)
        outcome = trainer.train()
        if not math.isfinite(outcome.training_loss):
            raise UserError(
                f"the loss of a fine-tuning is {outcome.training_loss}; lower --learning-rate"
            )
        frozen.check()
        reported = [scores(trainer.predict(splits[split])) for split in task.validation]
    history = trainer.state.log_history
    by_epoch = [record["eval_score"] for record in history if "eval_score" in record]
    return {
        "metrics": {name: float(np.mean([one[name] for one in reported])) for name in reported[0]},
        "items": sum(len(splits[split]) for split in task.validation),
        "best_epoch": 1 + by_epoch.index(max(by_epoch)),
        "score_aside_by_epoch": by_epoch,
        "frozen_parameters": frozen.entries,
        "parameters": model.num_parameters(),
        "seconds": round(outcome.metrics["train_runtime"], 1),
    }


def _arguments(settings: Settings, seed: int, directory: str) -> TrainingArguments:
    cuda = use_cuda()
    arguments = TrainingArguments(
        output_dir=directory,
        num_train_epochs=settings.epochs,
        per_device_train_batch_size=settings.batch_size,
        per_device_eval_batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        warmup_steps=WARMUP,
        weight_decay=0.0,  # else it would shrink frozen rows of weights that train in part
        optim="adamw_torch",
        bf16=cuda,
        use_cpu=not cuda,
        dataloader_pin_memory=cuda,
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
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # several GPUs would make one batch of as many
    return arguments
