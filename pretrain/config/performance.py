"""How a step is computed, where several ways give the same result up to rounding."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pretrain.config.types import Section


class PerformanceSection(Section):
    cross_entropy: Literal["in_place", "chunked", "megatron"] = Field(
        default="in_place",
        description="Logits in the loss. in_place: kept in precision.dtype; chunked: never whole, and "
        "made twice; megatron: all of them in fp32.",
    )
