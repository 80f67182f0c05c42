"""The runs whose exports test_export.py looks at, and the class that each is loaded by."""

from __future__ import annotations

from typing import Any

QUIET = {"telemetry__tensorboard": "false", "optimizer__learning_rate": 2e-2, "schedule__steps": 4}
PARALLEL = {"parallel__tensor_model_parallel_size": 2, "parallel__sequence_parallel": True}
LEARNED = {"model__position_embedding": "learned"}
MODERN = {"model__norm": "rmsnorm", "model__mlp": "swiglu"}
GROUPED = {"model__num_query_groups": 2}
GROUPED_RANKS = {**PARALLEL, **GROUPED}
TWO_RANKS: dict[str, dict[str, Any]] = {
    "vanilla": {
        **GROUPED_RANKS,
        **LEARNED,
        "attention__variant": "vanilla",
        "model__vocab_multiple": 96,  # 576 rows for 512 pieces
    },
    "hybrid": {
        **PARALLEL,
        "attention__variant": "hybrid",
        "attention__frozen_heads": "{'0': 0.5, '1': 0.75}",
        "attention__adapters": "[channel_scale, low_rank]",
    },
    "penalty": {
        "attention__variant": "orthogonal_penalty",
        "deepspeed__config": "zero3",
        "precision__dtype": "bf16",
    },
    "unfreeze": {"attention__variant": "unfreeze"},
    "monarch": {
        **GROUPED_RANKS,
        "attention__variant": "monarch",
        "attention__frozen_heads": "{'0': 1, '1': 0.5}",
        "precision__dtype": "bf16",
    },
    "shared": {
        **GROUPED_RANKS,
        "attention__variant": "orthogonal_shared",
        "attention__frozen_heads": "{'0': 0.5, '1': 1}",
        "attention__adapters": "[low_rank, channel_scale]",
    },
    "monarch-trained": {
        **GROUPED_RANKS,
        "attention__variant": "monarch_trainable",
        "attention__phases": "[{at: 0.5, freeze: 1}]",
    },
    "llama": {
        **GROUPED_RANKS,
        **MODERN,
        "attention__variant": "monarch",
        "attention__frozen_heads": "{'0': 1, '1': 0.5}",
        "model__tied_embeddings": "false",
    },
    "qwen3": {
        **GROUPED_RANKS,
        **MODERN,
        "model__qk_norm": "true",
        "model__rotary_base": 1_000_000,
        "attention__adapters": "[low_rank]",
    },
    "convolved": {
        **GROUPED_RANKS,
        "attention__adapters": "[short_convolution, query_key_bias, channel_scale]",
        "attention__frozen_heads": "{'0': 0.5, '1': 1}",
        "attention__taps": 3,
    },
}
ONE_RANK: dict[str, dict[str, Any]] = {
    "orthogonal": {"checkpoint__every": 2},
    "learned": {**LEARNED, **GROUPED, "precision__dtype": "bf16"},
    "folded": {
        **GROUPED,
        "attention__adapters": "[channel_scale, low_rank]",
        "model__head_dim": 16,
        "model__tied_embeddings": "false",
        "model__vocab_multiple": 1000,
    },
    "normed": {
        **GROUPED,
        "attention__adapters": "[query_key_bias, channel_scale, low_rank]",
        "attention__frozen_heads": "{'0': 0.5, '1': 1}",
    },
    "normed-learned": {
        **GROUPED,
        **LEARNED,
        "precision__dtype": "bf16",
        "attention__adapters": "[query_key_bias, channel_scale]",
        "attention__frozen_heads": "{'1': 0.5}",
    },
    "shared-vanilla": {
        **LEARNED,
        **GROUPED,
        "attention__variant": "vanilla",
        "attention__shared": "true",
    },
    "low-rank": {
        **GROUPED,
        "attention__variant": "low_rank",
        "attention__adapters": "[channel_scale]",
        "precision__dtype": "bf16",
    },
    "frozen-query": {
        **GROUPED,
        "attention__frozen_roles": "query",
        "attention__adapters": "[low_rank]",
    },
    "early": {
        "attention__variant": "gaussian",
        "attention__frozen_heads": "{50%-100%: 1.0}",
        "attention__unfreeze": "[{at: 0.5, layers: 50%-100%}]",
    },
    "convolved-learned": {
        **GROUPED,
        **LEARNED,
        "attention__adapters": "[channel_scale, short_convolution, query_key_bias, low_rank]",
        "attention__frozen_heads": "{'1': 0.5}",
        "attention__convolved": "value",
        "precision__dtype": "bf16",
    },
    "biased": {
        "attention__variant": "vanilla",
        "attention__adapters": "[query_key_bias]",
        "attention__phases": "[{at: 0.5, freeze: 1}]",
        "precision__dtype": "bf16",
    },
    "qwen3-whole": {**MODERN, "model__qk_norm": "true", "precision__dtype": "bf16"},
    "llama-convolved": {
        **GROUPED,
        **MODERN,
        "attention__variant": "monarch_shared_conv",
        "model__qk_norm": "true",
    },
    "modern-learned": {**LEARNED, **GROUPED, **MODERN, "model__qk_norm": "true"},
    "half-modern": {
        **GROUPED,
        "model__norm": "rmsnorm",
        "model__mlp": "relu2",
        "model__logit_softcap": 2.0,
        "attention__adapters": "[query_key_bias]",
    },
}
REFUSED: dict[str, dict[str, Any]] = {
    "scores": {
        "attention__variant": "synthesizer_random",
        "schedule__steps": 1,
        "schedule__warmup_steps": 1,
    },
    "wide": {**LEARNED, "model__head_dim": 16, "schedule__steps": 1, "schedule__warmup_steps": 1},
}
OTHER_CLASSES = {
    **dict.fromkeys(("learned", "shared-vanilla", "vanilla"), "GPT2LMHeadModel"),
    "llama": "LlamaForCausalLM",
    **dict.fromkeys(("qwen3", "qwen3-whole"), "Qwen3ForCausalLM"),
    **dict.fromkeys(("biased", "convolved", "normed"), "OraRotaryForCausalLM"),
    **dict.fromkeys(("half-modern", "llama-convolved"), "OraLlamaForCausalLM"),
    **dict.fromkeys(
        ("convolved-learned", "modern-learned", "normed-learned"), "OraLearnedForCausalLM"
    ),
}
CLASSES = dict.fromkeys((*ONE_RANK, *TWO_RANKS), "Starcoder2ForCausalLM") | OTHER_CLASSES
