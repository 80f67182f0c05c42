"""How a step is computed, where several ways give the same result up to rounding."""

from __future__ import annotations

from typing import Literal

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
    cross_entropy: Literal["in_place", "chunked", "megatron"] = Field(
        default="in_place",
        description="Logits in the loss. in_place: kept in precision.dtype; chunked: never whole, and "
        "made twice; megatron: all of them in fp32.",
    )
    compile: Literal["auto", "layers", "none"] = Field(
        default="auto",
        description="torch.compile of each layer. auto: on GPUs, but not under ZeRO stage 3 nor with "
        "recompute=query_key; layers: always; none: never.",
    )
    document_attention: Literal["flash", "mask"] = Field(
        default="flash",
        description="With data.reset_at_document_end. flash: each document by itself, where there is a "
        "kernel for it (on GPUs in bf16); mask: all pairs of a sample, most of them masked.",
    )
    structured_products: Literal["auto", "kernel", "products"] = Field(
        default="auto",
        description="Q and K of a structured bank. products: two batched products; kernel: one Triton "
        "kernel for both, on GPUs; auto: what a short measurement at the start finds faster there.",
    )
    recompute: Literal["none", "query_key", "attention", "full"] = Field(
        default="none",
        description="Activations of a layer made again in backward instead of kept: queries and keys of a "
        "structured bank, those of the attention with its norm, or all.",
    )

    def compiles(self, on_cuda: bool, zero_stage: int) -> bool:
        """Whether layers run compiled: what `compile` says, or stands for."""
        possible = on_cuda and zero_stage < 3 and self.recompute != "query_key"
        return possible if self.compile == "auto" else self.compile == "layers"
