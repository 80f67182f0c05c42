"""Head-wise test: one BERT, fine-tuned with queries and keys replaced in several ways, paired by seed.

The seed decides the new head, the order of the data, the examples set aside, dropout, and the bank. All arms
of a seed share all of these: the surgery has random streams of its own, so no other random number moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from data_pipeline.io.files import sha256_file
from pretrain.errors import UserError
from pretrain.finetuning.bert.arms import Arm, Norm, Result
from pretrain.finetuning.bert.directory import BertDirectory
from pretrain.finetuning.bert.surgery import frozen_rows, install
from pretrain.finetuning.classification_data import TASKS, read_examples
from pretrain.finetuning.glue import task_judge
from pretrain.finetuning.metrics import measure, predictions_of, standard_error
from pretrain.finetuning.training import Judge, Settings
from pretrain.finetuning.trials import FineTuned, FineTuning, environment, run_trials

TASK = TASKS["sst2"]
HEADS = ("bert.pooler.", "classifier.")
"""Tensors that begin anew, or have to learn anew, and must therefore have changed."""
_JUDGED = "validation"


@dataclass(frozen=True)
class ReservoirTest:
    """Settings of the test: everything that a fine-tuning depends on, but for its arm and seed.

    Attributes:
        longest: ids of an example.
    """

    bert: BertDirectory
    train: Path
    validation: Path
    settings: Settings
    norm: Norm = Norm.unit
    longest: int = 128

    def identity(self) -> dict[str, Any]:
        """Return the identity that all fine-tunings of the test share."""
        return {
            **environment("accelerate", "sklearn"),
            "model": self.bert.digest,
            "train": sha256_file(self.train),
            "validation": sha256_file(self.validation),
            "norm": self.norm.value,
            "max_length": self.longest,
            "settings": self.settings.as_dict(),
        }


@dataclass(frozen=True)
class ArmFineTuning(FineTuning):
    """Fine-tuning of the BERT in one arm of the test."""

    test: ReservoirTest
    arm: Arm

    head = HEADS[-1]

    def title(self, seed: int) -> str:
        return f"{self.arm.name}, seed {seed}"

    def file_name(self, seed: int) -> str:
        return f"{self.arm.file_name}-seed-{seed}"

    def load(self, seed: int) -> tuple[nn.Module, dict[str, Any]]:
        model, made_anew = self.test.bert.classifier()
        replaced = install(model, self.arm, seed, self.test.norm)
        return model, {"made_anew": made_anew, "replaced": [asdict(part) for part in replaced]}

    @property
    def judge(self) -> Judge:
        return task_judge(TASK)

    def result(self, seed: int, tuned: FineTuned) -> dict[str, Any]:
        judged, outcome = self.judged[_JUDGED], tuned.outcome
        labels, predictions = judged.labels, predictions_of(TASK, tuned.outputs[_JUDGED])
        result = Result(
            condition=self.arm.condition.value,
            layers=self.arm.layers,
            seed=seed,
            accuracy=measure(TASK, labels, predictions)["accuracy"],
            standard_error=standard_error(TASK, labels, predictions),
            majority=float(np.bincount(labels).max() / len(labels)),
            items=len(labels),
            shortened=self.train.shortened + judged.shortened,
            steps=outcome.steps,
            best_step=outcome.best_step,
            seconds=outcome.seconds,
            device=outcome.device,
            trainable_parameters=sum(p.numel() for p in tuned.model.parameters() if p.requires_grad),
            proof=check_heads(tuned.weights),
            **tuned.facts,
        )
        return asdict(result)


def run_test(
    test: ReservoirTest,
    arms: Sequence[Arm],
    seeds: Sequence[int],
    out: Path,
    begin_piece: Callable[[str], None],
) -> dict[Arm, list[Result]]:
    """Fine-tune all arms with all seeds, those that `out`/trials does not have; return every arm's results.

    Raises:
        UserError: a file has no examples, or as `BertDirectory` and `run_trials`.
        RuntimeError: frozen rows changed, which is a defect.
    """
    bert = test.bert
    train, validation = (
        bert.encode(read_examples(TASK, [path]), test.longest) for path in (test.train, test.validation)
    )
    bert.classifier()  # weights that cannot be read are refused before anything is written
    identity = test.identity()
    fine_tunings = [
        ArmFineTuning(
            identity={**identity, "arm": arm.name},
            settings=test.settings,
            frozen_rows=frozen_rows(arm, bert.config),
            train=train,
            judged={_JUDGED: validation},
            pad_id=bert.tokenizer.pad_token_id,
            test=test,
            arm=arm,
        )
        for arm in arms
    ]
    results: dict[Arm, list[Result]] = {arm: [] for arm in arms}
    for done in run_trials(((one, seed) for seed in seeds for one in fine_tunings), out, begin_piece):
        results[done.fine_tuning.arm].append(Result(**done.result))
    return results


def check_heads(changed: dict[str, Any]) -> dict[str, Any]:
    """Check that weights and biases of pooler and classifier have changed; return `changed` with that.

    Raises:
        UserError: one of them is as it was.
    """
    unmoved = [name for name in changed["unchanged_tensors"] if name.startswith(HEADS)]
    if unmoved:
        raise UserError(f"fine-tuning did not change {unmoved[0]}: raise --learning-rate or --epochs")
    return {**changed, "pooler_changed": True, "classifier_changed": True}
