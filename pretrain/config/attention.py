"""The attention section of the configuration; what it means is in `megatron_patches.policy`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from pretrain.config.types import Int, Layers, LayerShares, Names, Number, Section, as_tuple


class UnfreezeEntry(Section):
    """One entry of attention.unfreeze."""

    at: Number = Field(gt=0, lt=1, description="Part of the run's steps after which it applies.")
    layers: Layers = Field(description="Layers that become trainable: 4, 4-7 or 50%-100%, counted from 0.")
    learning_rate_factor: Number = Field(
        default=1.0,
        gt=0,
        description="Of the learning-rate schedule from there on, in place of the last one.",
    )


class AttentionSection(Section):
    variant: str = Field(description="Query/Key policy: a name in megatron_patches.policy.VARIANTS.")
    seed: Int | None = Field(default=None, ge=0, description="Seed of the Query/Key bank; unset: run.seed.")
    scope: Literal["head", "layer"] | None = Field(
        default=None,
        description="Rows orthonormal within each head or across the layer; unset: the variant's own.",
    )
    construction: str | None = Field(
        default=None,
        description="How orthonormal rows are made: qr, svd, householder, cayley, hadamard, dct; unset: the "
        "variant's own.",
    )
    gaussian_std: float | None = Field(
        default=None,
        gt=0,
        description="Standard deviation of Gaussian Q/K; unset: the variant's own, or 1/sqrt(hidden_size).",
    )
    penalty: float | None = Field(
        default=None,
        gt=0,
        description="Factor of the orthogonality penalty, for the variant that has one; unset: its own.",
    )
    frozen_heads: LayerShares | None = Field(
        default=None,
        description="Layers (4, 4-7 or 0%-50%) and the fraction of their heads that is frozen; the other "
        "heads train, as vanilla's. Unset: the variant's own, mostly all.",
    )
    adapters: Names | None = Field(
        default=None,
        description="Small trainable corrections of frozen Q/K: logit_scale, qk_norm, core, low_rank.",
    )
    low_rank: Int | None = Field(default=None, ge=1, description="Rank of the adapter low_rank; unset: 8.")
    trainable: bool | None = Field(
        default=None,
        description="Whether a synthesizer's score matrices learn (synthesizers only); unset: they do.",
    )
    synthesizer_rank: Int | None = Field(
        default=None, ge=1, description="Rank of a factorized synthesizer's score matrices; unset: 8."
    )
    unfreeze: Annotated[tuple[UnfreezeEntry, ...], BeforeValidator(as_tuple)] | None = Field(
        default=None,
        min_length=1,
        description="When which frozen layers become trainable: a list of {at, layers, "
        "learning_rate_factor}; unset: the variant's own.",
    )
