"""What is trained: which models, how, with how many seeds. The same for every kind of task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pretrain
from pretrain.finetuning.frozen_rows import Rows
from pretrain.finetuning.packages import package_versions
from pretrain.finetuning.pretrained import Pretrained
from pretrain.finetuning.settings import Settings
from pretrain.finetuning.trials import content_digest
from pretrain.ranks.devices import use_cuda

ASIDE, MOST_ASIDE = 0.1, 1000
"""Of the training examples, those by which a training is ended: this part, but no more than so many."""


@dataclass(frozen=True)
class Plan:
    """Models, their groups, and how each is trained on a task.

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
        """What stays as it is in the fine-tuning."""
        return {} if self.train_query_key else model.frozen_rows

    def longest(self, own: int) -> int:
        """Ids of an example at most, for a model whose own sequences are that long."""
        return min(self.max_length or own, own)

    def identity(self, model: Pretrained, packages: Sequence[str]) -> dict[str, Any]:
        """What a kept training of this model must have been made with, beside its task and its seed.

        Args:
            packages: keys of `pretrain.finetuning.packages.PACKAGES`.
        """
        return {
            "program": pretrain.__version__,
            "packages": package_versions(*packages),
            "device": "cuda" if use_cuda() else "cpu",
            "model": model.digest,
            "frozen_rows": content_digest(self.frozen_rows(model)),
            "settings": self.settings.as_dict(),
        }
