"""Fine-tunings of exports: models, seeds and settings that GLUE and translation have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.finetuning.frozen_rows import Rows
from pretrain.finetuning.pretrained import Pretrained
from pretrain.finetuning.report import Trial
from pretrain.finetuning.training import Settings
from pretrain.finetuning.trials import FineTuned, FineTuning, environment, run_trials
from pretrain.study.cache import content_digest


@dataclass(frozen=True)
class Plan:
    """Plan of all fine-tunings: models, their groups, seeds and settings.

    Attributes:
        seeds: 1 … this: of a new head, the order of examples, dropout, and which examples are set aside.
        max_length: ids of an example at most; None: as long as the model's own sequences.
        train_query_key: Q and K train like everything else.
    """

    models: Sequence[Pretrained]
    groups: Sequence[str]
    settings: Settings
    seeds: int = 3
    max_length: int | None = None
    train_query_key: bool = False

    def frozen_rows(self, model: Pretrained) -> Rows:
        """Return the rows that stay as they are in the fine-tuning."""
        return {} if self.train_query_key else model.frozen_rows

    def longest(self, own: int) -> int:
        """Return the most ids of an example, for a model whose own sequences have `own` ids."""
        return min(self.max_length or own, own)

    def identity(self, model: Pretrained, packages: Sequence[str]) -> dict[str, Any]:
        """Return the identity of all trainings of a model, beside task and seed.

        Args:
            packages: keys of `pretrain.finetuning.packages.PACKAGES`.
        """
        return {
            **environment(*packages),
            "model": model.digest,
            "frozen_rows": content_digest(self.frozen_rows(model)),
            "settings": self.settings.as_dict(),
        }


@dataclass(frozen=True)
class ExportFineTuning(FineTuning):
    """Fine-tuning of an export on a task.

    Attributes:
        task: name in the report.
        train_query_key: Q and K train like everything else.
    """

    model: Pretrained
    group: str
    task: str
    train_query_key: bool

    def title(self, seed: int) -> str:
        return f"{self.model.name}-{self.task}-{seed}"

    def file_name(self, seed: int) -> str:
        return f"{self.title(seed)}-{self.model.place}"

    @abstractmethod
    def scores(self, result: Mapping[str, Any]) -> tuple[float, Mapping[str, float], float]:
        """Return score, metrics and standard error of a result, 1 the best."""

    def training(self, tuned: FineTuned) -> dict[str, Any]:
        """Return the part of a result that says how the model was trained."""
        return {
            "training": tuned.outcome.as_dict(),
            "query_key": "trained" if self.train_query_key else "as in the pretraining",
            "weights": tuned.weights,
        }


def run_on_exports(
    fine_tunings: Iterable[ExportFineTuning], seeds: int, out: Path, begin_piece: Callable[[str], None]
) -> tuple[list[Trial], list[dict[str, Any]]]:
    """Fine-tune with the seeds 1 … `seeds`; return the scores, and what report.json has of each.

    Raises:
        As `run_trials`.
    """
    pairs = ((one, seed) for one in fine_tunings for seed in range(1, seeds + 1))
    trials, details = [], []
    for done in run_trials(pairs, out, begin_piece):
        one, model = done.fine_tuning, done.fine_tuning.model
        score, metrics, error = one.scores(done.result)
        trials.append(
            Trial(
                task=one.task,
                group=one.group,
                model=model.name,
                pretraining_seed=model.seed,
                seed=done.seed,
                score=score,
                metrics=metrics,
                standard_error=error,
                items=done.result["items"],
            )
        )
        details.append({"name": one.title(done.seed), "kept": done.kept, **done.result})
    return trials, details
