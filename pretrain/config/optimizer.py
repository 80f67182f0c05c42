"""The optimizer section of the configuration: its keys, and the rule and rate of each tensor."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Literal, TypeVar, get_type_hints

from pydantic import Field, create_model, model_validator

from megatron_patches.recipe.optimizers import KINDS, Kind, Rule, factor_of_name
from megatron_patches.recipe.parts import Tensor
from pretrain.config.sections import EVERY_STEP, MODEL
from pretrain.config.types import Betas, DecayFactors, Int, RateFactors, Section, setting

_SectionType = TypeVar("_SectionType", bound=type[Section])


def _section_of(name: str, kind: type[Kind]) -> type[Section]:
    """Return the section of a kind's own settings, the fields of its declaration."""
    types = get_type_hints(kind)
    keys: dict[str, Any] = {}
    for declared in fields(kind):
        meaning, limits = declared.metadata["meaning"], declared.metadata["limits"]
        written = Int if types[declared.name] is int else types[declared.name]
        keys[declared.name] = (written, setting(declared.default, meaning, EVERY_STEP, **limits))
    return create_model(
        f"{kind.__name__}Section",
        __base__=Section,
        __doc__=f"Settings of `optimizer.kind={name}` alone.",
        __module__=__name__,
        **keys,
    )


def _with_kinds(section: _SectionType) -> _SectionType:
    """Return the section with `kind`, and an inner section for each kind with settings of its own.

    A decorator, so that the type checker still sees the class as it is written below.
    """
    meanings = "; ".join(f"{name}: {kind.meaning}" for name, kind in KINDS.items())
    keys: dict[str, Any] = {
        "kind": (Literal[tuple(KINDS)], setting("adamw", f"{meanings}.", MODEL))
    }
    for name, kind in KINDS.items():
        if fields(kind):
            inner = _section_of(name, kind)
            keys[name] = (inner, Field(default=inner()))
    with_kinds: Any = create_model(
        section.__name__, __base__=section, __module__=section.__module__, **keys
    )
    return with_kinds


@_with_kinds
class OptimizerSection(Section):
    """AdamW, or Muon for the matrices of the layers and AdamW for the rest."""

    kind: str = "adamw"
    learning_rate: float = setting(
        ...,
        "Peak learning rate; Muon's where kind is muon.",
        EVERY_STEP,
        gt=0,
    )
    learning_rate_factors: RateFactors = setting(
        {},
        "Per-parameter learning-rate factors, {name pattern: factor}; the first matching pattern "
        "applies; * stands for any text, as in '*_taps'.",
        EVERY_STEP,
    )
    betas: Betas = setting(
        (0.9, 0.98), "AdamW's decay rates of the first and second moment.", EVERY_STEP
    )
    eps: float = setting(1e-8, "AdamW's epsilon.", EVERY_STEP, gt=0)
    weight_decay: float = setting(
        0.01,
        "Decoupled weight decay of matrices and embeddings (not of norms).",
        EVERY_STEP,
        ge=0,
    )
    weight_decay_factors: DecayFactors = setting(
        {},
        "Weight-decay factors, written as learning_rate_factors: {'embedding.*': 0}, say.",
        EVERY_STEP,
    )
    gradient_clip: float = setting(
        1.0, "Clip gradients to this global norm; 0: no clipping.", EVERY_STEP, ge=0
    )

    qk_clip: float | None = setting(
        None,
        "Limit of attention scores (QK-Clip). If a head's largest score in a step exceeds it, W_Q "
        "and W_K of the head are scaled by sqrt(limit / largest score); unset: no limit.",
        EVERY_STEP,
        gt=0,
    )

    @property
    def of_kind(self) -> Kind:
        """Return the declaration of the kind, with the kind's own settings."""
        return KINDS[self.kind](**dict(getattr(self, self.kind, {})))

    @property
    def rules(self) -> tuple[Rule, ...]:
        """Return the rules of the optimizer, in the order in which they choose their tensors."""
        return self.of_kind.rules

    def rate_factor(self, tensor: Tensor) -> float:
        """Return the factor of a tensor's learning rate: its kind's factor times its name's."""
        rate = self.of_kind.rate(tensor)
        factor = 1.0 if rate is None else rate / self.learning_rate
        return factor * factor_of_name(tensor.name, self.learning_rate_factors)

    def decay_factor(self, tensor: Tensor) -> float:
        """Return the factor of a tensor's weight decay: its name's for matrices that decay."""
        return factor_of_name(tensor.name, self.weight_decay_factors) if tensor.decays else 0.0

    @model_validator(mode="after")
    def _consistent(self) -> OptimizerSection:
        for kind, declaration in KINDS.items():
            for key, value in getattr(self, kind, ()):
                if kind != self.kind and value != getattr(declaration, key):
                    raise ValueError(
                        f"optimizer.{kind}.{key}={value} has no effect with "
                        f"optimizer.kind={self.kind}; use kind {kind}"
                    )
        return self
