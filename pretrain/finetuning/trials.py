"""Fine-tunings: one procedure for every kind of task, and the loop over them that keeps each result on disk.

set aside → seed → load → freeze → remember → train → compare with what was remembered → judge
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from torch import nn

import pretrain
from pretrain.finetuning.encoding import ASIDE, MOST_ASIDE, Collate, Encoded, set_aside
from pretrain.finetuning.frozen_rows import Rows, freeze, remember, what_changed
from pretrain.finetuning.packages import package_versions
from pretrain.finetuning.training import Examples, Judge, Outcome, Settings, begin, fine_tune
from pretrain.ranks.devices import use_cuda
from pretrain.study.cache import ResultCache


@dataclass(frozen=True)
class FineTuned:
    """Model after its training, with everything that the result is made of.

    Attributes:
        facts: as `FineTuning.load` returned them.
        trained, set_aside: numbers of examples.
        outputs: {name: `[items, …]`} of the judged examples.
        weights: the proof of what stayed frozen and what changed, as `what_changed` returns it.
    """

    model: Any
    facts: Mapping[str, Any]
    trained: int
    set_aside: int
    outcome: Outcome
    outputs: Mapping[str, np.ndarray]
    weights: dict[str, Any]


@dataclass(frozen=True)
class FineTuning(ABC):
    """Fine-tuning of a model on a task, without the seed.

    Attributes:
        identity: everything that decides the result, beside the seed; as JSON gives it back.
        train: examples to train on, of which each seed sets some aside.
        judged: examples to compute the outputs of, after the training.
        pad_id: fills up `input_ids`.
        head: first letters of the names of the new head's tensors; None: there is no new head.
    """

    identity: Mapping[str, Any]
    settings: Settings
    frozen_rows: Rows
    train: Encoded
    judged: Mapping[str, Encoded]
    pad_id: int

    head: ClassVar[str | None] = None

    @abstractmethod
    def title(self, seed: int) -> str:
        """Return the name to show while the training of this seed runs."""

    @abstractmethod
    def file_name(self, seed: int) -> str:
        """Return the name of the kept result, without a suffix."""

    @abstractmethod
    def load(self, seed: int) -> tuple[nn.Module, dict[str, Any]]:
        """Return the model before the training, and facts about it for `result`.

        A new head is drawn from torch's generator, which is seeded already.
        """

    @property
    def judge(self) -> Judge | None:
        """Return the score of the examples set aside; None: their loss."""
        return None

    @abstractmethod
    def result(self, seed: int, tuned: FineTuned) -> dict[str, Any]:
        """Return the result of the training, as JSON."""


F = TypeVar("F", bound=FineTuning)


@dataclass(frozen=True)
class Finished(Generic[F]):
    """Result of a fine-tuning with one seed. `kept`: its result was on disk already."""

    fine_tuning: F
    seed: int
    result: dict[str, Any]
    kept: bool


def run_trials(
    trials: Iterable[tuple[F, int]], out: Path, begin_piece: Callable[[str], None]
) -> list[Finished[F]]:
    """Fine-tune with every seed, one after the other, but for results that `out`/trials has.

    Args:
        trials: fine-tunings with a seed each.
        begin_piece: called with the title of each before it begins.

    Raises:
        UserError: a result cannot be written, or as `fine_tune_once`.
        RuntimeError: frozen rows changed, which is a defect.
    """
    cache = ResultCache(out / "trials")
    finished = []
    for one, seed in trials:
        begin_piece(one.title(seed))
        content, kept = cache.read_or_make(
            one.file_name(seed).replace("/", "_"),
            {**one.identity, "seed": seed},
            partial(_content, one, seed),
        )
        finished.append(Finished(one, seed, content["result"], kept))
    return finished


def _content(one: FineTuning, seed: int) -> dict[str, Any]:
    return {"result": fine_tune_once(one, seed)}


def fine_tune_once(one: FineTuning, seed: int) -> dict[str, Any]:
    """Fine-tune with one seed, check what stayed frozen, and return the result.

    Raises:
        UserError: too few examples, a model that cannot be loaded, a loss that is not finite, or weights
            that should have changed and did not.
        RuntimeError: frozen rows changed, which is a defect.
    """
    train, aside = set_aside(one.train.items, ASIDE, MOST_ASIDE, seed)
    begin(seed)
    model, facts = one.load(seed)
    freeze(model, one.frozen_rows)
    before = remember(model, one.frozen_rows)
    outcome, outputs = fine_tune(
        model,
        Examples(train, aside, Collate(one.pad_id), one.judge),
        one.settings,
        seed,
        {name: encoded.items for name, encoded in one.judged.items()},
    )
    weights = what_changed(model, one.frozen_rows, before, one.head)
    return one.result(seed, FineTuned(model, facts, len(train), len(aside), outcome, outputs, weights))


def environment(*packages: str) -> dict[str, Any]:
    """Return the part of an identity that is of the program and the machine.

    Args:
        packages: keys of `pretrain.finetuning.packages.PACKAGES`.
    """
    return {
        "program": pretrain.__version__,
        "packages": package_versions(*packages),
        "device": "cuda" if use_cuda() else "cpu",
    }
