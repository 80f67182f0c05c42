"""Training samples as a dataset of torch, in the order in which a run takes them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from data_pipeline.shards.blend import Blend, BlendedSamples, Member, make_blend
from data_pipeline.shards.manifest import read_manifest
from pretrain.config.load import load_config
from pretrain.data.open import read_blend
from pretrain.errors import UserError
from pretrain.runs.directory import RunDirectory
from pretrain.runs.facts import read_facts


class Samples(Dataset[torch.Tensor]):
    """Samples `[sequence_length + 1]`, int64: ids of a sample's tokens and of the one behind them.

    Each process opens the shards for itself, so a DataLoader may have workers of any kind.

    Args:
        sequence_length: Tokens that a sample predicts.
        seed: Seed of the order.
        count: Number of samples; None: those of one epoch.
    """

    def __init__(
        self, blend: Blend, sequence_length: int, seed: int, count: int | None = None
    ) -> None:
        self._blend = blend
        self._sequence_length = sequence_length
        self._seed = seed
        epoch = sum(member.samples_per_epoch for member in self._opened.members)
        self._count = epoch if count is None else count

    @cached_property
    def _opened(self) -> BlendedSamples:
        return self._blend.training_samples(self._sequence_length, self._seed)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_opened"}

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> torch.Tensor:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[torch.Tensor]:
        """Read the samples of a batch in one call, as torch's DataLoader asks for them."""
        for number in numbers:
            if not 0 <= number < len(self):
                raise IndexError(f"sample {number} of {len(self)}")
        blocks = self._opened.blocks(np.array(numbers, dtype=np.int64))
        return [*torch.from_numpy(blocks)]


def samples_of_run(directory: Path) -> Samples:
    """Return the samples that a run takes, from its first step to its last.

    Raises:
        UserError: the run's shards are not those it was trained on.
        DataError: a shard directory is missing or damaged.
    """
    files = RunDirectory(directory)
    config = load_config(str(files.config))
    blend = read_blend(config.data)
    if files.data.is_file():
        recorded = read_facts(files.data)["fingerprint"]
        if recorded != blend.fingerprint:
            raise UserError(
                f"the shards that {files.config} names are not those the run was trained on (data "
                f"fingerprint {blend.fingerprint[:12]}, in {files.data.name} {recorded[:12]}); "
                f"restore them"
            )
    count = config.total_steps * config.data.global_batch_size
    return Samples(blend, config.data.sequence_length, config.data_seed, count)


def samples_of_shards(directory: Path, sequence_length: int, seed: int) -> Samples:
    """Return the samples of one epoch of a shard directory.

    Args:
        sequence_length: Tokens that a sample predicts.
        seed: Seed of the order, `data.seed` or `run.seed` of a run.

    Raises:
        DataError: the directory is not a finished shard directory, or too small for a sample.
    """
    return Samples(make_blend([Member(read_manifest(directory))]), sequence_length, seed)
