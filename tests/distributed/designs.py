"""Every kind of model that a config can ask for: for the tests that must hold for all.

A key without a section is one of `attention`.
"""

from __future__ import annotations

from pathlib import Path

from tests.tiny import tiny_overrides

STEPS = 10
MODERN = {
    "model.norm": "rmsnorm",
    "model.mlp": "swiglu",
    "model.qk_norm": "true",
    "model.init": "fan_in",
}
DESIGNS: dict[str, dict[str, str]] = {
    "vanilla": {"variant": "vanilla"},
    "orthogonal": {"variant": "orthogonal"},
    "orthogonal-layer-scope": {"variant": "orthogonal", "scope": "layer"},
    "orthogonal_trainable": {"variant": "orthogonal_trainable"},
    "gaussian": {"variant": "gaussian"},
    "hadamard": {"variant": "hadamard"},
    "dct": {"variant": "dct", "scope": "layer"},
    "monarch": {"variant": "monarch"},
    "monarch-hybrid-low_rank": {
        "variant": "monarch",
        "frozen_heads": "{0: 1.0, 1: 0.5}",
        "adapters": "[low_rank]",
    },
    "orthogonal_penalty": {"variant": "orthogonal_penalty", "penalty": "0.3"},
    "unfreeze": {
        "variant": "unfreeze",
        "phases": "[{at: 0.3, train: 1, learning_rate_factor: 0.5}, "
        "{at: 0.6, train: 0, freeze: 1, learning_rate_factor: 0.2}]",
    },
    "hybrid": {"variant": "hybrid", "frozen_heads": "{0: 1.0, 1: 0.5}"},
    "low_rank": {"variant": "gaussian", "adapters": "[low_rank]", "low_rank": "3"},
    "hybrid-three-adapters": {
        "variant": "hybrid",
        "frozen_heads": "{0: 0.5}",
        "adapters": "[channel_scale, query_key_bias, low_rank]",
    },
    "orthogonal_shared": {"variant": "orthogonal_shared"},
    "monarch_shared_conv": {"variant": "monarch_shared_conv"},
    "shared-trained-convolution": {
        "variant": "vanilla",
        "shared": "true",
        "adapters": "[short_convolution]",
        "taps": "2",
        "convolved": "key",
    },
    "vanilla-convolution": {
        "variant": "vanilla",
        "adapters": "[short_convolution, query_key_bias]",
    },
    "hybrid-shared-adapters": {
        "variant": "orthogonal",
        "shared": "true",
        "frozen_heads": "{0: 1.0, 1: 0.5}",
        "adapters": "[short_convolution, low_rank]",
        "low_rank": "3",
    },
    "thin": {
        "variant": "low_rank",
        "low_rank": "3",
        "adapters": "[short_convolution, channel_scale]",
    },
    "monarch_trainable": {"variant": "monarch_trainable"},
    "frozen-query": {"variant": "orthogonal", "frozen_roles": "query", "adapters": "[low_rank]"},
    "frozen-key-monarch": {"variant": "monarch", "frozen_roles": "key"},
    "synthesizer_random": {"variant": "synthesizer_random"},
    "synthesizer_random-frozen": {"variant": "synthesizer_random", "trainable": "false"},
    "synthesizer_factorized": {"variant": "synthesizer_factorized", "synthesizer_rank": "3"},
    "synthesizer_factorized-frozen": {"variant": "synthesizer_factorized", "trainable": "false"},
    "modern": {"variant": "vanilla", **MODERN},
    "modern-monarch_shared_conv": {"variant": "monarch_shared_conv", **MODERN},
    "modern-hybrid": {
        "variant": "hybrid",
        "frozen_heads": "{0: 1.0, 1: 0.5}",
        "adapters": "[low_rank]",
        **MODERN,
    },
    "relu2": {
        "variant": "orthogonal",
        "model.mlp": "relu2",
        "model.norm": "rmsnorm",
        "model.logit_softcap": "2",
        "model.z_loss": "0.01",
    },
    "vanilla-freezes": {
        "variant": "vanilla",
        "phases": "[{at: 0.2, freeze: 1}, {at: 0.5, freeze: all, learning_rate_factor: 0.5}]",
    },
    "monarch-freezes": {
        "variant": "monarch_trainable",
        "shared": "true",
        "adapters": "[short_convolution, query_key_bias, channel_scale]",
        "phases": "[{at: 0.4, freeze: all}]",
    },
}
PHASED = ("unfreeze", "vanilla-freezes", "monarch-freezes")
"""Designs that train other parameters as the run goes on: under ZeRO-1 and ZeRO-2 alone."""

EIGHT_HEADS = {
    "run.device": "cpu",
    "model.num_layers": 2,
    "model.head_dim": 4,
    "model.ffn_hidden_size": 64,
    "model.num_attention_heads": 8,
    "model.num_query_groups": 4,
    "model.vocab_size": 128,
    "data.sequence_length": 16,
    "data.micro_batch_size": 1,
    "schedule.steps": 10,
    "schedule.warmup_steps": 1,
}
"""A small model that four tensor-parallel ranks can share, without its width and batch."""


def design_keys(design: str, dot: str = ".") -> dict[str, str]:
    """Return {key: value} of a design, with a separator between section and name."""
    full = {
        key if "." in key else f"attention.{key}": value for key, value in DESIGNS[design].items()
    }
    return {key.replace(".", dot): value for key, value in full.items()}


def design_overrides(
    design: str, shards: Path, runs: Path, name: str, zero_stage: int = 1, **changes: object
) -> list[str]:
    """Ten steps of a design; `changes` are section__key=value, as for `tiny_overrides`."""
    values: dict[str, object] = {
        **design_keys(design, "__"),
        "deepspeed__config": f"zero{zero_stage}",
        "schedule__steps": STEPS,
        # A high rate would let Adam amplify rounding differences between layouts from step to step.
        "optimizer__learning_rate": 3e-4,
        "data__global_batch_size": 4,
        "data__sequence_length": 16,
        "data__validation_samples": 2,
        "telemetry__tensorboard": "false",
        **changes,
    }
    return tiny_overrides(shards, runs, name, **values)
