"""Fine-tunings: one procedure for every kind of task, and the loop over them that keeps each result on disk.

set aside → seed → load → freeze → remember → train → compare with what was remembered → judge
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

import pretrain
from pretrain.finetuning.encoding import ASIDE, MOST_ASIDE, Encoded, set_aside
from pretrain.finetuning.frozen_rows import Rows, freeze, remember, what_changed
from pretrain.finetuning.models import Pretrained, Tokenizer
from pretrain.finetuning.report import Trial
from pretrain.finetuning.training import Collator, Judge, Settings, begin, fine_tune
from pretrain.ranks.devices import use_cuda
from pretrain.study.cache import ResultCache, content_digest
from pretrain.study.seeds import Groups


@dataclass(frozen=True)
class FineTuned:
    """Model after its training, with everything that the result is made of.

    Attributes:
        facts: as `FineTuning.load` returned them.
        trained, set_aside: numbers of examples.
        course, outputs: as `fine_tune` returns them.
        weights: the proof of what stayed frozen and what changed, as `what_changed` returns it.
    """

    model: Any
    facts: Mapping[str, Any]
    trained: int
    set_aside: int
    course: dict[str, Any]
    outputs: Mapping[str, np.ndarray]
    weights: dict[str, Any]


class FineTuning(ABC):
    """Fine-tuning of a model on a task, without the seed.

    Attributes:
        identity: everything that decides the result, beside the seed; as JSON gives it back.
        train: examples to train on, of which each seed sets some aside.
        judged: examples to compute the outputs of, after the training.
        collator: items to a padded batch.
        head: first letters of the names of the new head's tensors; None: there is no new head.
        judge: score of the examples set aside; None: their loss.
    """

    task: str
    group: str
    model_name: str
    pretraining_seed: int | None = None
    identity: Mapping[str, Any]
    settings: Settings
    frozen_rows: Rows
    train: Encoded
    judged: Mapping[str, Encoded] = {}
    collator: Collator
    head: str | None = None
    judge: Judge | None = None

    @abstractmethod
    def title(self, seed: int) -> str:
        """Return the name to show while the training of this seed runs."""

    def file_name(self, seed: int) -> str:
        """Return the name of the kept result, without a suffix."""
        return self.title(seed)

    @abstractmethod
    def load(self, seed: int) -> tuple[nn.Module, dict[str, Any]]:
        """Return the model before the training, and facts about it for `result`.

        A new head is drawn from torch's generator, which is seeded already.
        """

    @abstractmethod
    def result(self, seed: int, tuned: FineTuned) -> dict[str, Any]:
        """Return the result of the training, as JSON, with what a `Trial` has of scores."""


def run_trials(
    trials: Iterable[tuple[FineTuning, int]], out: Path, begin_piece: Callable[[str], None]
) -> tuple[list[Trial], list[dict[str, Any]]]:
    """Fine-tune with every seed, one after the other, but for results that `out`/trials has.

    Args:
        trials: fine-tunings with a seed each.
        begin_piece: called with the title of each before it begins.

    Returns the scores, and what report.json has of each; `kept`: the result was on disk already. Raises
    UserError where a result cannot be written, and as `_fine_tune_once`.
    """
    cache = ResultCache(out / "trials")
    scores, details = [], []
    for one, seed in trials:
        begin_piece(one.title(seed))
        name, identity = one.file_name(seed).replace("/", "_"), {**one.identity, "seed": seed}
        content, kept = cache.read_or_make(name, identity, partial(_fine_tune_once, one, seed))
        result = content["result"]
        numbers = (result[key] for key in ("score", "metrics", "standard_error", "items"))
        scores.append(Trial(one.task, one.group, one.model_name, one.pretraining_seed, seed, *numbers))
        details.append({"name": one.title(seed), "kept": kept, **result})
    return scores, details


def _fine_tune_once(one: FineTuning, seed: int) -> dict[str, Any]:
    """Fine-tune with one seed, check what stayed frozen, and return {"result": the result}.

    Raises UserError: too few examples, a model that cannot be loaded, a loss that is not finite, or weights
    that should have changed and did not; RuntimeError: frozen rows changed, which is a defect.
    """
    train, aside = set_aside(one.train.items, ASIDE, MOST_ASIDE, seed)
    begin(seed)
    model, facts = one.load(seed)
    freeze(model, one.frozen_rows)
    before = remember(model, one.frozen_rows)
    judged = {name: encoded.items for name, encoded in one.judged.items()}
    course, outputs = fine_tune(model, train, aside, one.collator, one.settings, seed, one.judge, judged)
    weights = what_changed(model, one.frozen_rows, before, one.head)
    tuned = FineTuned(model, facts, len(train), len(aside), course, outputs, weights)
    return {"result": one.result(seed, tuned)}


def environment(*packages: str) -> dict[str, Any]:
    """Return the part of an identity that is of the program and the machine, with versions of packages."""
    return {
        "program": pretrain.__version__,
        "packages": {name: version(name) for name in ("torch", "transformers", *packages)},
        "device": "cuda" if use_cuda() else "cpu",
    }


@dataclass(frozen=True)
class Plan:
    """Plan of fine-tunings of exports, each with the seeds 1 … `seeds`.

    Attributes:
        seeds: of a new head, the order of examples, dropout, and which examples are set aside.
        max_length: ids of an example at most; None: as long as the model's own sequences.
        train_query_key: Q and K train like everything else.
    """

    models: Sequence[Pretrained]
    groups: Groups[Pretrained]
    settings: Settings
    seeds: int = 3
    max_length: int | None = None
    train_query_key: bool = False


class ExportFineTuning(FineTuning):
    """Fine-tuning of an export on a task of the name `task`."""

    def __init__(self, plan: Plan, model: Pretrained, tokenizer: Tokenizer, task: str) -> None:
        self.plan, self.model, self.tokenizer, self.task = plan, model, tokenizer, task
        self.group, self.model_name = plan.groups.name_of(model), model.name
        self.pretraining_seed, self.settings = model.seed, plan.settings
        self.frozen_rows = {} if plan.train_query_key else model.frozen_rows
        self.longest = min(plan.max_length or tokenizer.longest, tokenizer.longest)

    def title(self, seed: int) -> str:
        return f"{self.model.name}-{self.task}-{seed}"

    def file_name(self, seed: int) -> str:
        place = hashlib.sha256(str(self.model.directory.resolve()).encode()).hexdigest()[:8]
        return f"{self.title(seed)}-{place}"  # models of one name have results of their own

    def common_identity(self, *packages: str) -> dict[str, Any]:
        """Return the identity of all trainings of the model, beside task and seed."""
        return {
            **environment(*packages),
            "model": self.model.digest,
            "frozen_rows": content_digest(self.frozen_rows),
            "settings": asdict(self.settings),
        }

    def training(self, tuned: FineTuned) -> dict[str, Any]:
        """Return the part of a result that says how the model was trained."""
        return {
            "training": tuned.course,
            "query_key": "trained" if self.plan.train_query_key else "as in the pretraining",
            "weights": tuned.weights,
        }
