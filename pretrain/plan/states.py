"""What DeepSpeed makes of a rank's tensors at each ZeRO stage, in bytes: what the audit of an engine finds.

Leans on how DeepSpeed 0.19 cuts and pads: stages 1 and 2 flatten each group of the optimizer and round it up
to 2 × the data-parallel ranks, stage 3 cuts every tensor for itself. A test compares each number with the
audit of live engines.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from pretrain.plan.tensors import RankTensors, Weight

BYTES = {"fp32": 4, "bf16": 2}
FP32 = 4


@dataclass(frozen=True)
class Layout:
    """How a run is spread, and in which types.

    Attributes:
        immediate_grad_update: the BF16 optimizer takes each gradient away as soon as backward has made it.
        overlap_reduction: as in section `performance`.
    """

    zero_stage: int
    dtype: str
    grad_accum_dtype: str
    data_parallel_size: int
    immediate_grad_update: bool = False
    overlap_reduction: bool = False

    @property
    def bf16_optimizer(self) -> bool:
        """Whether DeepSpeed takes its BF16 optimizer, which adds up gradients in a flat fp32 copy."""
        return self.zero_stage == 1 and self.dtype == "bf16" and self.grad_accum_dtype == "fp32"

    @property
    def reduces_in_backward(self) -> bool:
        """Whether `training.reduction` sums gradients over ranks, where they lie, while backward runs."""
        whole = self.zero_stage == 0 and self.dtype == "fp32"
        return self.overlap_reduction and (whole or (self.bf16_optimizer and self.immediate_grad_update))


@dataclass(frozen=True)
class States:
    """Bytes of one rank that last from step to step.

    Attributes:
        gradients: what gradients are added up in, over micro batches and ranks.
        autograd_gradients: what backward writes before that, where it is not the same tensor.
        own_elements: trainable elements that this rank updates.
    """

    weights: int
    frozen_bank: int
    gradients: int
    autograd_gradients: int
    master_weights: int
    adam_moments: int
    own_elements: int

    @property
    def total(self) -> int:
        return (
            self.weights
            + self.frozen_bank
            + self.gradients
            + self.autograd_gradients
            + self.master_weights
            + self.adam_moments
        )


def rank_states(tensors: RankTensors, layout: Layout) -> States:
    """The bytes of a rank; all data-parallel ranks hold equally much."""
    size, trainable = BYTES[layout.dtype], tensors.trainable
    own = _own_elements(tensors.weights, layout)
    held = own if layout.zero_stage == 3 else trainable
    keeps_masters = layout.zero_stage > 0 or layout.dtype == "bf16"
    return States(
        weights=held * size,
        frozen_bank=tensors.frozen * size,
        gradients=_gradients(trainable, own, layout),
        autograd_gradients=_as_backward_writes(tensors, layout),
        master_weights=own * FP32 if keeps_masters else 0,
        adam_moments=2 * own * FP32,
        own_elements=own,
    )


def _own_elements(weights: Iterable[Weight], layout: Layout) -> int:
    """Elements that one data-parallel rank updates, with the padding that makes all ranks' shares equal."""
    ranks = layout.data_parallel_size
    if layout.zero_stage == 3:
        return sum(-(-weight.elements // ranks) for weight in weights)
    if layout.zero_stage == 0:
        return sum(weight.elements for weight in weights)
    groups: defaultdict[tuple[int, bool], int] = defaultdict(int)
    for weight in weights:
        groups[weight.group] += weight.elements
    return sum(2 * -(-elements // (2 * ranks)) for elements in groups.values())


def _as_backward_writes(tensors: RankTensors, layout: Layout) -> int:
    """Gradients that are not yet added to their sum: all of them, or one at a time."""
    if not layout.bf16_optimizer:
        return 0
    largest = max(weight.elements for weight in tensors.weights)
    return (largest if layout.immediate_grad_update else tensors.trainable) * BYTES[layout.dtype]


def _gradients(trainable: int, own: int, layout: Layout) -> int:
    if layout.bf16_optimizer:
        return own * layout.data_parallel_size * FP32
    if layout.zero_stage >= 2:
        return own * BYTES[layout.grad_accum_dtype]
    return trainable * BYTES[layout.dtype]
