"""The head-wise test: one BERT, fine-tuned with queries and keys replaced in several ways, paired by seed.

Seed s decides the new head, the order of the data, what is set aside, dropout, and the bank. All arms of a
seed share all of these: the surgery draws from streams of its own, so it moves no other random number.
A fine-tuning that is done is a file in OUT/trials; the same command again goes on with those that are not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import pretrain
from data_pipeline.io.files import sha256_file
from pretrain.errors import UserError
from pretrain.finetuning.bert.arms import Arm, Norm
from pretrain.finetuning.bert.directory import BertDirectory
from pretrain.finetuning.bert.surgery import frozen_rows, install
from pretrain.finetuning.classification_data import TASKS, Example, read_examples, set_aside
from pretrain.finetuning.encoding import Collate, Encoded
from pretrain.finetuning.frozen_rows import freeze, remember, what_changed
from pretrain.finetuning.metrics import measure, predictions_of, standard_error
from pretrain.finetuning.packages import package_versions
from pretrain.finetuning.plan import ASIDE, MOST_ASIDE
from pretrain.finetuning.settings import Settings
from pretrain.finetuning.trials import TrialFiles
from pretrain.ranks.devices import use_cuda

TASK = TASKS["sst2"]
HEADS = ("bert.pooler.", "classifier.")
"""What begins anew, or has to learn anew, and must therefore have changed."""


@dataclass(frozen=True)
class Experiment:
    """All that a fine-tuning depends on, but for its arm and seed.

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
        """What fine-tunings that are compared have in common, as JSON gives it back."""
        return {
            "program": pretrain.__version__,
            "packages": package_versions("accelerate", "sklearn"),
            "device": "cuda" if use_cuda() else "cpu",
            "model": self.bert.identity(),
            "train": sha256_file(self.train),
            "validation": sha256_file(self.validation),
            "norm": self.norm.value,
            "max_length": self.longest,
            "settings": self.settings.as_dict(),
        }


@dataclass(frozen=True)
class Result:
    """One fine-tuning.

    Attributes:
        accuracy, standard_error: on the validation examples, which nothing was chosen by.
        majority: the accuracy of always saying the most frequent label.
        best_step: of the look at the examples set aside whose weights are judged.
        proof: what was frozen and is the same bit for bit, and what changed.
        made_anew: tensors that the directory does not have.
    """

    condition: str
    layers: str
    seed: int
    accuracy: float
    standard_error: float
    majority: float
    items: int
    shortened: int
    steps: int
    best_step: int
    seconds: float
    device: str
    trainable_parameters: int
    proof: dict[str, Any]
    made_anew: list[str]
    replaced: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class _Data:
    """Examples as ids; `train` is split by each seed."""

    train: Sequence[Example]
    validation: Sequence[Example]
    encoded: Encoded


def run_experiment(
    experiment: Experiment,
    arms: Sequence[Arm],
    seeds: Sequence[int],
    out: Path,
    begin_piece: Callable[[str], None],
) -> dict[Arm, list[Result]]:
    """All fine-tunings of these arms and seeds, those that OUT/trials has not; one after the other.

    Raises:
        UserError: `out` cannot be written; a file has no examples; as `BertDirectory`.
        RuntimeError: what was frozen changed, which is a defect.
    """
    data = _read(experiment)
    experiment.bert.classifier()  # weights that cannot be read are refused before anything is written
    identity, files = experiment.identity(), TrialFiles(out)
    found: dict[Arm, list[Result]] = {arm: [] for arm in arms}
    for seed in seeds:
        for arm in arms:
            begin_piece(f"{arm.name}, seed {seed}")
            made, _ = files.find_or_make(
                f"{arm.file_name}-seed-{seed}",
                {**identity, "arm": arm.name, "seed": seed},
                partial(_fine_tune_to_json, experiment, data, arm, seed),
            )
            found[arm].append(Result(**made))
    return found


def _fine_tune_to_json(experiment: Experiment, data: _Data, arm: Arm, seed: int) -> dict[str, Any]:
    return asdict(fine_tune_arm(experiment, data, arm, seed))


def _read(experiment: Experiment) -> _Data:
    train, validation = (read_examples(TASK, [path]) for path in (experiment.train, experiment.validation))
    return _Data(train, validation, experiment.bert.encode(validation, experiment.longest))


def fine_tune_arm(experiment: Experiment, data: _Data, arm: Arm, seed: int) -> Result:
    """One fine-tuning, with the proof that it left alone what was frozen.

    Raises:
        As `run_experiment`.
    """
    from pretrain.finetuning.training import Examples, begin, fine_tune

    bert = experiment.bert
    begin(seed)
    model, made_anew = bert.classifier()
    replaced = install(model, arm, seed, experiment.norm)
    rows = frozen_rows(arm, model.config)
    freeze(model, rows)
    before = remember(model, rows)
    train, aside = set_aside(data.train, ASIDE, MOST_ASIDE, seed)
    first, second = (bert.encode(part, experiment.longest) for part in (train, aside))
    examples = Examples(first.items, second.items, Collate(bert.tokenizer.pad_token_id), _accuracy)
    judged = {"validation": data.encoded.items}
    outcome, outputs = fine_tune(model, examples, experiment.settings, seed, judged)
    labels = np.array([example.label for example in data.validation])
    predictions = predictions_of(TASK, outputs["validation"])
    return Result(
        arm.condition.value,
        arm.layers,
        seed,
        measure(TASK, labels, predictions)["accuracy"],
        standard_error(TASK, labels, predictions),
        float(np.bincount(labels).max() / len(labels)),
        len(labels),
        first.shortened + second.shortened + data.encoded.shortened,
        outcome.steps,
        outcome.best_step,
        outcome.seconds,
        outcome.device,
        sum(p.numel() for p in model.parameters() if p.requires_grad),
        check_heads(what_changed(model, rows, before, HEADS[-1])),
        made_anew,
        [asdict(part) for part in replaced],
    )


def check_heads(changed: dict[str, Any]) -> dict[str, Any]:
    """The same, after a look at pooler and classifier: weights and biases of both have to be others now.

    Raises:
        UserError: one of them is as it was.
    """
    unmoved = [name for name in changed["unchanged_tensors"] if name.startswith(HEADS)]
    if unmoved:
        raise UserError(f"fine-tuning did not change {unmoved[0]}: raise --learning-rate or --epochs")
    return {**changed, "pooler_changed": True, "classifier_changed": True}


def _accuracy(labels: np.ndarray, outputs: np.ndarray) -> float:
    return measure(TASK, labels, predictions_of(TASK, outputs))["accuracy"]
