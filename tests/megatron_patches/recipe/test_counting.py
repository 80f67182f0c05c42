"""Parameter and FLOP formulas against published sizes, torch modules, and the method's shares."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_patches.recipe.counting import (
    count_parameters,
    executed_flops_per_token,
    forward_flops_per_token,
    model_flops_per_token,
)
from megatron_patches.recipe.parts import ModelShape
from megatron_patches.recipe.variants import VARIANTS
from pretrain.config.load import load_config

VANILLA, ORTHOGONAL, MONARCH = (VARIANTS[name] for name in ("vanilla", "orthogonal", "monarch"))
TINY = ModelShape(
    num_layers=3,
    hidden_size=48,
    num_attention_heads=4,
    num_query_groups=2,
    head_dim=8,
    ffn_hidden_size=100,
    vocab_size=64,
    sequence_length=16,
    learned_positions=True,
    tied_embeddings=True,
)


@pytest.mark.parametrize(
    ("name", "millions", "frozen", "saved_percent"),
    [
        ("small", 35.5, 3_145_728, 2.85),
        ("base", 109.9, 14_155_776, 4.13),
        ("large", 335.4, 50_331_648, 4.83),
    ],
)
def test_the_sizes_of_the_paper_configurations(
    name: str, millions: float, frozen: int, saved_percent: float
) -> None:
    shape = load_config(name).shape
    count = count_parameters(shape, ORTHOGONAL)
    assert round(count.total / 1e6, 1) == millions
    assert count.frozen == frozen
    assert count.trainable == count.total - frozen
    full = model_flops_per_token(shape)
    saved = full - executed_flops_per_token(shape, ORTHOGONAL)
    assert round(100 * saved / full, 2) == saved_percent
    assert saved == 4 * shape.num_layers * shape.hidden_size**2


def test_vanilla_freezes_nothing() -> None:
    assert count_parameters(TINY, VANILLA).frozen == 0
    assert executed_flops_per_token(TINY, VANILLA) == model_flops_per_token(TINY)


def test_totals_match_the_modules_of_a_model() -> None:
    d, heads, groups = (
        TINY.hidden_size,
        TINY.num_attention_heads * TINY.head_dim,
        TINY.num_query_groups * TINY.head_dim,
    )
    layer = [
        torch.nn.LayerNorm(d),
        *(torch.nn.Linear(d, width, bias=False) for width in (heads, groups, groups)),
        torch.nn.Linear(heads, d, bias=False),
        torch.nn.LayerNorm(d),
        torch.nn.Linear(d, TINY.ffn_hidden_size, bias=False),
        torch.nn.Linear(TINY.ffn_hidden_size, d, bias=False),
    ]
    around = [
        torch.nn.Embedding(TINY.vocab_size, d),
        torch.nn.Embedding(TINY.sequence_length, d),
        torch.nn.LayerNorm(d),
    ]

    def size(modules: list[torch.nn.Module]) -> int:
        return sum(parameter.numel() for module in modules for parameter in module.parameters())

    total = TINY.num_layers * size(layer) + size(around)
    assert count_parameters(TINY, VANILLA).total == total
    assert count_parameters(TINY, ORTHOGONAL).frozen == TINY.num_layers * size(layer[1:3])
    rope = replace(TINY, learned_positions=False)
    assert count_parameters(rope, VANILLA).total == total - TINY.sequence_length * d
    untied = replace(TINY, tied_embeddings=False)
    assert count_parameters(untied, VANILLA).total == total + TINY.vocab_size * d


def test_forward_flops_reduce_to_the_textbook_formula() -> None:
    shape = load_config("base").shape
    d, s, layers, vocab, f = 768, 512, 12, 32000, 4
    for share in (0.5, 1.0):
        textbook = layers * (8 * d**2 + 4 * f * d**2 + 4 * share * s * d) + 2 * d * vocab
        assert forward_flops_per_token(shape, VANILLA, causal_share=share) == textbook
        assert model_flops_per_token(shape, causal_share=share) == 3 * textbook


def test_forward_flops_are_twice_the_weights_of_the_gemms_plus_the_scores() -> None:
    d = TINY.hidden_size
    count = count_parameters(replace(TINY, learned_positions=False), VANILLA)
    norms = TINY.num_layers * 4 * d + 2 * d
    scores = (
        TINY.num_layers * 4 * 0.5 * TINY.sequence_length * TINY.num_attention_heads * TINY.head_dim
    )
    assert forward_flops_per_token(TINY, VANILLA) == 2 * (count.total - norms) + scores


def test_grouped_queries_save_the_key_gemm_of_the_groups_only() -> None:
    saved = model_flops_per_token(TINY) - executed_flops_per_token(TINY, ORTHOGONAL)
    assert saved == 2 * TINY.num_layers * TINY.hidden_size * (4 + 2) * 8


def test_structured_rows_are_two_factors_in_all_counts() -> None:
    shape = load_config("large").shape  # 1024 = 32 · 32: 2 · 1024^1.5 numbers a layer and role
    count, dense = (count_parameters(shape, policy) for policy in (MONARCH, ORTHOGONAL))
    assert count.trainable == dense.trainable and count.frozen == 24 * 2 * 2 * 1024 * 32
    dense_products, factors = 2 * 1024**2, 2 * 1024 * (32 + 32)  # FLOPs of one role's product
    saved = model_flops_per_token(shape) - executed_flops_per_token(shape, MONARCH)
    assert saved == 24 * 2 * (3 * dense_products - 2 * factors)
    grouped = count_parameters(TINY, MONARCH)  # 48 = 8 · 6 or 4 · 12; of 4 + 2 heads of 8 rows
    assert grouped.frozen == 3 * (4 + 2) * 8 * (8 + 6)
