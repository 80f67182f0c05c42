"""Norms of weights and of their updates, and spectral norms, at any layout.

Ranks have slices of the fp32 weights (`checkpoint.slices`), some of them alike: an element counts
once, however many ranks have it, because sums are divided by how often elements were counted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist

from megatron_patches.recipe.parts import Tensor
from pretrain.checkpoint.format import MASTER
from pretrain.checkpoint.slices import Slice, slices_of_rank
from pretrain.ranks.groups import ParallelContext
from pretrain.telemetry.records import WeightNorms

ITERATIONS = 30
"""Power iterations; the estimate is low, for a random matrix by some 3 %."""


def kind_of(name: str) -> str:
    """Return the name of a weight without the number of its layer, which layers have in common."""
    return re.sub(r"^decoder\.(layers\.\d+\.)?", "", name)


@dataclass(frozen=True)
class WeightsBefore:
    """This rank's slices of the weights, and a copy of their values before an update."""

    slices: Sequence[Slice]
    values: Sequence[torch.Tensor]

    @classmethod
    def of(cls, engine: Any) -> WeightsBefore:
        """Copy the weights in an engine's optimizer.

        Args:
            engine: a deepspeed.DeepSpeedEngine.
        """
        slices = slices_of_rank(engine)
        return cls(slices, [own.values(MASTER).clone() for own in slices])

    def norms(
        self, inventory: Sequence[Tensor], patterns: Sequence[str], context: ParallelContext
    ) -> WeightNorms:
        """Return the norms after the update (collective).

        Args:
            inventory: every parameter of the model.
            patterns: of the names of matrices whose spectral norms are asked for.
            context: this rank's place in the layout.
        """
        elements: dict[str, int] = {}
        for tensor in inventory:
            if tensor.trains:
                kind = kind_of(tensor.name)
                elements[kind] = elements.get(kind, 0) + tensor.elements
        numbers = {kind: number for number, kind in enumerate(elements)}
        sums = torch.zeros(len(elements), 3, dtype=torch.float64, device=context.device)
        for own, before in zip(self.slices, self.values, strict=True):
            now = own.values(MASTER)
            lengths = [torch.linalg.vector_norm(one).double() for one in (now, now - before)]
            row = sums[numbers[kind_of(own.name)]]
            row[:2] += torch.stack(lengths).square()
            row[2] += own.length
        dist.all_reduce(sums)
        whole = torch.tensor(list(elements.values()), dtype=torch.float64, device=context.device)
        norms = (sums[:, :2] * (whole / sums[:, 2])[:, None]).sqrt().tolist()
        matrices = [one for one in inventory if is_measured(one, patterns)]
        found = [self._spectral_norm(matrix, context) for matrix in matrices]
        spectral = torch.stack(found).tolist() if found else []
        return WeightNorms(
            weights={kind: norm for kind, (norm, _) in zip(elements, norms, strict=True)},
            updates={kind: norm for kind, (_, norm) in zip(elements, norms, strict=True)},
            spectral=dict(zip([one.name for one in matrices], spectral, strict=True)),
        )

    def _spectral_norm(self, tensor: Tensor, context: ParallelContext) -> torch.Tensor:
        """Return the largest singular value of a matrix, by power iteration."""
        rank, size = context.tensor_parallel_rank, context.tensor_parallel_size
        rows, columns = tensor.rank_shape(rank, size)
        flat = torch.zeros(rows * columns + 1, device=context.device)
        for own in self.slices:
            if own.name == tensor.name:
                flat[own.start : own.start + own.length] = own.values(MASTER)
                flat[-1] += own.length / max(1, rows * columns)  # 0 of a rank without these heads
        dist.all_reduce(flat, group=context.mpu.get_data_parallel_group())
        matrix = (flat[:-1] / flat[-1]).view(rows, columns)
        if tensor.cut == 1:  # then its transpose is cut along its rows, and has the same norm
            matrix = matrix.t()
        start = torch.randn(matrix.size(1), generator=torch.Generator().manual_seed(0))
        vector = start.to(context.device)
        length = vector.norm()
        for _ in range(ITERATIONS):
            vector = matrix.t() @ (matrix @ (vector / length))
            if tensor.cut is not None:
                dist.all_reduce(vector, group=context.tensor_parallel_group)
            length = vector.norm().clamp(min=torch.finfo(vector.dtype).tiny)
        return length.sqrt()


def is_measured(tensor: Tensor, patterns: Sequence[str]) -> bool:
    """Return whether a tensor's spectral norm is asked for: a trained matrix that a pattern names.

    Args:
        tensor: of the model.
        patterns: of names, in which * stands for any text.
    """
    is_matrix = tensor.trains and len(tensor.shape) == 2
    return is_matrix and any(fnmatchcase(tensor.name, pattern) for pattern in patterns)
