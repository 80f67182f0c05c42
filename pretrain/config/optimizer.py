"""The optimizer section of the configuration: its keys, and the rule and rate of each tensor."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from megatron_patches.recipe.matrices import has_matrices
from megatron_patches.recipe.optimizers import ADAMW, Rule, factor_of_name, muon
from megatron_patches.recipe.parts import Tensor
from pretrain.config.sections import EVERY_STEP, MODEL
from pretrain.config.types import Betas, DecayFactors, Int, RateFactors, Section, setting

MUON_KEYS = (
    "embedding_learning_rate",
    "output_learning_rate",
    "vector_learning_rate",
    "momentum",
    "nesterov",
    "newton_schulz_steps",
    "newton_schulz_dtype",
    "update_scale",
)
"""Keys of `optimizer` that have an effect with kind muon only."""


class OptimizerSection(Section):
    """AdamW, or Muon for the matrices of the layers and AdamW for the rest."""

    kind: Literal["adamw", "muon"] = setting(
        "adamw",
        "adamw: every weight by AdamW; muon: the matrices of the layers by Muon, the rest by "
        "AdamW.",
        MODEL,
    )
    learning_rate: float = setting(
        ...,
        "Peak learning rate, reached at the end of warmup; Muon's where kind is muon.",
        EVERY_STEP,
        gt=0,
    )
    learning_rate_factors: RateFactors = setting(
        {},
        "Per-parameter learning-rate factors, {name pattern: factor}; the first matching pattern "
        "applies; * stands for any text, as in '*_taps'.",
        EVERY_STEP,
    )
    embedding_learning_rate: float | None = setting(
        None,
        "Peak learning rate of embeddings (kind muon only); unset: learning_rate.",
        EVERY_STEP,
        gt=0,
    )
    output_learning_rate: float | None = setting(
        None,
        "Peak learning rate of an untied output layer (kind muon only); unset: learning_rate.",
        EVERY_STEP,
        gt=0,
    )
    vector_learning_rate: float | None = setting(
        None,
        "Peak learning rate of all else that AdamW updates, norms and adapters (kind muon only); "
        "unset: learning_rate.",
        EVERY_STEP,
        gt=0,
    )
    betas: Betas = setting(
        (0.9, 0.98), "AdamW's decay rates of the first and second moment.", EVERY_STEP
    )
    eps: float = setting(1e-8, "AdamW's epsilon.", EVERY_STEP, gt=0)
    momentum: float = setting(
        0.95, "Muon's decay rate of the momentum (kind muon only).", EVERY_STEP, ge=0, lt=1
    )
    nesterov: bool = setting(
        True, "Muon looks one gradient ahead of the momentum (kind muon only).", EVERY_STEP
    )
    newton_schulz_steps: Int = setting(
        5, "Newton-Schulz iterations of an update (kind muon only).", EVERY_STEP, ge=1, le=99
    )
    newton_schulz_dtype: Literal["auto", "fp32", "bf16"] = setting(
        "auto",
        "Type of the Newton-Schulz iterations (kind muon only); auto: fp32 on the CPU, bf16 on "
        "GPUs.",
        EVERY_STEP,
    )
    update_scale: Literal["match_adamw", "spectral"] = setting(
        "match_adamw",
        "Factor of a matrix [out, in] in Muon (kind muon only); match_adamw: 0.2 sqrt(max(out, "
        "in)), for rates of AdamW; spectral: sqrt(max(1, out / in)).",
        EVERY_STEP,
    )
    weight_decay: float = setting(
        0.01,
        "Decoupled weight decay of matrices and embeddings (not of norms).",
        EVERY_STEP,
        ge=0,
    )
    weight_decay_factors: DecayFactors = setting(
        {},
        "Per-parameter factors of the weight decay, {name pattern: factor}; the first matching "
        "pattern applies, as in {'embedding.*': 0}.",
        EVERY_STEP,
    )
    gradient_clip: float = setting(
        1.0, "Clip gradients to this global norm; 0: no clipping.", EVERY_STEP, ge=0
    )

    qk_clip: float | None = setting(
        None,
        "After each update, scale W_Q and W_K of heads whose largest score in the step exceeded "
        "this by the root of limit / largest score (QK-Clip); unset: not.",
        EVERY_STEP,
        gt=0,
    )

    @property
    def rules(self) -> tuple[Rule, ...]:
        """Return the rules of the optimizer, in the order in which they choose their tensors."""
        if self.kind != "muon":
            return (ADAMW,)
        return muon(self.newton_schulz_steps, self.update_scale == "match_adamw"), ADAMW

    def rate_factor(self, tensor: Tensor) -> float:
        """Return the factor of a tensor's learning rate: of its kind, times that of its name."""
        rate = None
        if self.kind == "muon" and not has_matrices(tensor):
            outside = {"embedding": self.embedding_learning_rate}
            outside["output_layer"] = self.output_learning_rate
            rate = outside.get(tensor.name.partition(".")[0], self.vector_learning_rate)
        of_kind = 1.0 if rate is None else rate / self.learning_rate
        return of_kind * factor_of_name(tensor.name, self.learning_rate_factors)

    @model_validator(mode="after")
    def _consistent(self) -> OptimizerSection:
        if self.kind == "muon":
            return self
        for key in MUON_KEYS:
            value = getattr(self, key)
            if value != type(self).model_fields[key].default:
                raise ValueError(
                    f"optimizer.{key}={value} has no effect with optimizer.kind={self.kind}; use "
                    "kind muon"
                )
        return self
