"""The named variants of attention: a table of policies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_patches.errors import MethodError
from megatron_patches.recipe.phases import PhaseStart
from megatron_patches.recipe.policy import AXES, DEFAULT_PENALTY, QKPolicy

_MONARCH = QKPolicy(init="orthogonal", trainable=False, scope="layer", construction="monarch")
_LOOK_BACK = ("short_convolution", "query_key_bias", "channel_scale")

VARIANTS: dict[str, QKPolicy] = {
    "vanilla": QKPolicy(init="default", trainable=True),
    "orthogonal": QKPolicy(init="orthogonal", trainable=False),
    "orthogonal_trainable": QKPolicy(init="orthogonal", trainable=True),
    "gaussian": QKPolicy(init="gaussian", trainable=False),
    "orthogonal_penalty": QKPolicy(init="orthogonal", trainable=True, penalty=DEFAULT_PENALTY),
    "pretrained": QKPolicy(init="pretrained", trainable=False),
    "hadamard": QKPolicy(init="orthogonal", trainable=False, construction="hadamard"),
    "dct": QKPolicy(init="orthogonal", trainable=False, construction="dct"),
    "monarch": _MONARCH,
    "monarch_trainable": replace(_MONARCH, trainable=True, trains_factors=True),
    "low_rank": QKPolicy(init="low_rank", trainable=True),
    "orthogonal_shared": QKPolicy(init="orthogonal", trainable=False, shared=True),
    "monarch_shared_conv": replace(_MONARCH, shared=True, adapters=_LOOK_BACK),
    "unfreeze": QKPolicy(
        init="orthogonal",
        trainable=False,
        phases=(
            PhaseStart(0.3, train="50%-100%", learning_rate_factor=0.5),
            PhaseStart(0.6, train="0%-100%", learning_rate_factor=0.2),
        ),
    ),
    "hybrid": QKPolicy(
        init="orthogonal", trainable=False, frozen_heads=(("0%-33%", 1.0), ("33%-67%", 0.5))
    ),
    "synthesizer_random": QKPolicy(init="default", trainable=True, scores="synthesizer_random"),
    "synthesizer_factorized": QKPolicy(
        init="default", trainable=True, scores="synthesizer_factorized"
    ),
}

PURPOSES: dict[str, str] = {
    "vanilla": "the ordinary Transformer, the baseline",
    "orthogonal": "orthonormal rows of each head: ORA",
    "orthogonal_trainable": "starts as orthogonal: separates freezing from the initialisation",
    "gaussian": "Gaussian rows of the same scale: separates orthogonality from freezing",
    "orthogonal_penalty": "a penalty pulls rows back to orthonormal ones",
    "pretrained": "a trained model continues with its own queries and keys",
    "hadamard": "rows of a Hadamard matrix: structured",
    "dct": "rows of the DCT-II matrix: structured",
    "monarch": "rows of a layer as two factors: structured, at a fraction of the FLOPs",
    "monarch_trainable": "the factors train: separates structure from freezing",
    "low_rank": "queries and keys of low rank",
    "orthogonal_shared": "W_K = W_Q: scores compare tokens with tokens",
    "monarch_shared_conv": "monarch, W_K = W_Q, a short convolution: the variant of the findings",
    "unfreeze": "frozen layers begin to train during the run",
    "hybrid": "some layers and heads are frozen",
    "synthesizer_random": "a score matrix of its own: attention that cannot look at content",
    "synthesizer_factorized": "the same with fewer parameters",
}
"""{variant: what it is for}, as `list variants` prints it."""

ORDINARY = "vanilla"
"""The variant that the others are compared with."""
LEADING = "monarch_shared_conv"
"""The frozen variant of the findings, which is tried first on another text."""


def policy_for(variant: str, axes: Mapping[str, Any] | None = None) -> QKPolicy:
    """Return the policy of a named variant, with the given axes (not None) replaced.

    Axes are checked and replaced in the order of AXES, each against the policy with the earlier
    ones replaced.

    Args:
        axes: {axis: value}; None: the variant's own.

    Raises:
        MethodError: unknown variant, or axes that contradict each other.
    """
    if variant not in VARIANTS:
        raise MethodError(
            f"attention.variant is '{variant}'; known variants: {', '.join(VARIANTS)}"
        )
    policy = VARIANTS[variant]
    requested = {name: value for name, value in (axes or {}).items() if value is not None}
    unknown = [name for name in requested if name not in AXES]
    if unknown:
        raise MethodError(f"there is no axis '{unknown[0]}'; known axes: {', '.join(AXES)}")
    for name in sorted(requested, key=list(AXES).index):
        AXES[name].check(policy, requested[name], variant)
        policy = replace(policy, **{name: requested[name]})
    return policy
