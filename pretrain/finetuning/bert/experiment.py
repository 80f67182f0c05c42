"""Head-wise test: one BERT, fine-tuned with queries and keys replaced in several ways, paired by seed.

The seed decides the new head, the order of the data, the examples set aside, dropout, and the bank. All arms
of a seed share all of these: the surgery has random streams of its own, so no other random number moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn
from transformers import DataCollatorWithPadding

from data_pipeline.io.files import sha256_file
from pretrain.errors import UserError
from pretrain.finetuning.bert.arms import Arm, Norm
from pretrain.finetuning.bert.directory import BertDirectory
from pretrain.finetuning.bert.surgery import frozen_rows, install
from pretrain.finetuning.classification_data import TASKS, VALIDATION, read_examples
from pretrain.finetuning.encoding import Encoded
from pretrain.finetuning.glue import task_judge
from pretrain.finetuning.metrics import classified, constant_score, predictions_of
from pretrain.finetuning.report import Trial
from pretrain.finetuning.training import Settings
from pretrain.finetuning.trials import FineTuned, FineTuning, environment, run_trials
from pretrain.study.models import model_digest

TASK = TASKS["sst2"]
HEADS = ("bert.pooler.", "classifier.")
"""Tensors that begin anew, or have to learn anew, and must therefore have changed."""


@dataclass(frozen=True)
class ReservoirTest:
    """Settings of the test: everything that a fine-tuning depends on, but for its arm and seed.

    `longest`: ids of an example.
    """

    bert: BertDirectory
    train: Path
    validation: Path
    settings: Settings
    norm: Norm = Norm.unit
    longest: int = 128

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Return the identity that all fine-tunings of the test share."""
        return {
            **environment("accelerate", "scikit-learn"),
            "model": model_digest(self.bert.path),
            "train": sha256_file(self.train),
            "validation": sha256_file(self.validation),
            "norm": self.norm.value,
            "max_length": self.longest,
            "settings": asdict(self.settings),
        }


class ArmFineTuning(FineTuning):
    """Fine-tuning of the BERT in one arm of the test."""

    head = HEADS[-1]
    judge = staticmethod(task_judge(TASK))
    task = TASK.name

    def __init__(self, test: ReservoirTest, arm: Arm, train: Encoded, validation: Encoded) -> None:
        self.test, self.arm = test, arm
        self.group, self.model_name = arm.name, test.bert.path.name
        self.identity = {**test.identity, "arm": arm.name}
        self.settings = test.settings
        self.frozen_rows = frozen_rows(arm, test.bert.config)
        self.train, self.judged = train, {VALIDATION: validation}
        self.collator = DataCollatorWithPadding(test.bert.tokenizer)

    def title(self, seed: int) -> str:
        return f"{self.arm.name}, seed {seed}"

    def file_name(self, seed: int) -> str:
        return f"{self.arm.file_name}-seed-{seed}"

    def load(self, seed: int) -> tuple[nn.Module, dict[str, Any]]:
        model, made_anew = self.test.bert.classifier()
        replaced = install(model, self.arm, seed, self.test.norm)
        return model, {"made_anew": made_anew, "replaced": replaced}

    def result(self, seed: int, tuned: FineTuned) -> dict[str, Any]:
        judged = self.judged[VALIDATION]
        return {
            "arm": self.arm.name,
            "condition": self.arm.condition.value,
            "layers": self.arm.layers,
            "seed": seed,
            **classified(TASK, judged.labels, predictions_of(TASK, tuned.outputs[VALIDATION])),
            "majority": constant_score(TASK, judged.labels),
            "items": len(judged),
            "shortened": self.train.shortened + judged.shortened,
            **{key: tuned.course[key] for key in ("steps", "best_step", "seconds", "device")},
            "trainable_parameters": sum(p.numel() for p in tuned.model.parameters() if p.requires_grad),
            "proof": check_heads(tuned.weights),
            **tuned.facts,
        }


def run_test(
    test: ReservoirTest, arms: Sequence[Arm], seeds: int, out: Path, begin_piece: Callable[[str], None]
) -> tuple[list[Trial], list[dict[str, Any]]]:
    """Fine-tune all arms with the seeds 1 … `seeds`; return as `run_trials`.

    Raises UserError where a file has no examples, and as `BertDirectory` and `run_trials`.
    """
    paths = (test.train, test.validation)
    train, validation = (test.bert.encode(read_examples(TASK, [path]), test.longest) for path in paths)
    test.bert.classifier()  # weights that cannot be read are refused before anything is written
    fine_tunings = [ArmFineTuning(test, arm, train, validation) for arm in arms]
    pairs = [(one, seed) for seed in range(1, seeds + 1) for one in fine_tunings]
    return run_trials(pairs, out, begin_piece)


def check_heads(changed: dict[str, Any]) -> dict[str, Any]:
    """Check that weights and biases of pooler and classifier have changed; return `changed` with that.

    Raises UserError: one of them is as it was.
    """
    unmoved = [name for name in changed["unchanged_tensors"] if name.startswith(HEADS)]
    if unmoved:
        raise UserError(f"fine-tuning did not change {unmoved[0]}: raise --learning-rate or --epochs")
    return {**changed, "pooler_changed": True, "classifier_changed": True}
