"""How a step is computed, where several ways give the same result up to rounding."""

from __future__ import annotations

from pydantic import Field

from pretrain.config.types import Section


class PerformanceSection(Section):
    overlap_reduction: bool = Field(
        default=True,
        description="Reduce gradients over data-parallel ranks during the backward pass where DeepSpeed "
        "does it afterwards: stage 0 in fp32, stage 1 in bf16.",
    )
    reduced_precision_reduction: bool = Field(
        default=False,
        description="On GPUs: let a bf16 product whose sum is split add up its parts in bf16, not in fp32.",
    )
