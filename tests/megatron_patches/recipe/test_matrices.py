"""The matrices that Muon orthogonalises: each element of them once, whatever the layout."""

from __future__ import annotations

from collections import Counter

import pytest

from megatron_patches.recipe.matrices import has_matrices, runs, stacks
from megatron_patches.recipe.optimizers import ADAMW, muon, rule_of, state_bytes
from megatron_patches.recipe.parts import Tensor
from pretrain.config.load import load_config
from tests.distributed.designs import DESIGNS, design_keys

SIZES = ["model.num_layers=2", "model.hidden_size=32", "model.num_attention_heads=8"]
SIZES += ["model.num_query_groups=4", "model.ffn_hidden_size=48", "model.vocab_size=128"]


def taken(design: str, *changes: str) -> dict[str, Tensor]:
    keys = [f"{key}={value}" for key, value in design_keys(design).items()]
    config = load_config("demo", [*SIZES, *keys, *changes])
    return {tensor.name: tensor for tensor in config.inventories[-1] if has_matrices(tensor)}


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("design", DESIGNS)
def test_ranks_have_each_element_of_each_matrix_once(design: str, size: int) -> None:
    for tensor in taken(design).values():
        counts: Counter[tuple[int, int, int]] = Counter()
        for rank in range(size):
            rank_runs = list(runs(tensor, rank, size))
            assert [run.rank_start for run in rank_runs] == [
                sum(run.length for run in rank_runs[:number]) for number in range(len(rank_runs))
            ]
            assert sum(run.length for run in rank_runs) == tensor.rank_elements(rank, size)
            for run in rank_runs:
                elements = range(run.start, run.start + run.length)
                counts.update((run.stack, run.matrix, element) for element in elements)
        every = {
            (number, matrix, element)
            for number, stack in enumerate(stacks(tensor))
            for matrix in range(stack.count)
            for element in range(stack.rows * stack.columns)
        }
        assert counts.keys() == every and set(counts.values()) == {1}, tensor.name


def test_values_are_one_matrix_wherever_they_are_stored_and_heads_are_one_each() -> None:
    value = stacks(taken("orthogonal")["decoder.layers.0.self_attention.linear_qkv.value_weight"])
    fused = stacks(taken("vanilla")["decoder.layers.0.self_attention.linear_qkv.weight"])
    assert value == fused[2:]
    assert [(stack.count, stack.rows, stack.columns) for stack in fused] == [
        (8, 4, 32),
        (4, 4, 32),
        (1, 16, 32),
    ]
    factors = taken("monarch_trainable", "model.head_dim=4")
    left = stacks(factors["decoder.layers.0.self_attention.linear_qkv.trained_left_query_key"])
    assert {(stack.rows, stack.columns) for stack in left} == {(4, 4)}


def test_muon_takes_the_layers_matrices_and_keeps_one_momentum() -> None:
    attention = ["attention.adapters=[low_rank, short_convolution]", "attention.variant=orthogonal"]
    config = load_config("demo", [*attention, "optimizer.kind=muon"])
    rules = config.optimizer.rules
    assert rules == (muon(5, True), ADAMW)
    assert [rule.whole_matrices for rule in rules] == [True, False]
    by_muon = {t.name.split(".", 3)[-1] for t in config.inventories[0] if rules[0].takes(t)}
    assert by_muon == {
        "self_attention.linear_qkv.value_weight",
        "self_attention.linear_proj.weight",
        "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight",
    }
    trained = [tensor for tensor in config.inventories[0] if tensor.trains]
    whole = sum(tensor.elements for tensor in trained if rule_of(tensor, rules) is rules[0])
    assert state_bytes(trained, rules) == state_bytes(trained, (ADAMW,)) - 4 * whole
    output = next(t for t in trained if t.name.endswith("0.self_attention.linear_proj.weight"))
    assert rules[0].products(output) == 5 * 6 * output.shape[0] ** 3


def test_each_kind_of_weight_has_its_rate() -> None:
    rates = {"embedding": 0.1, "output": 0.02, "vector": 0.004}
    changes = [f"optimizer.muon.{kind}_learning_rate={rate}" for kind, rate in rates.items()]
    changes += ["optimizer.kind=muon", "optimizer.learning_rate=0.01"]
    changes += ["optimizer.learning_rate_factors={'*input_layernorm*': 3}"]
    config = load_config("demo", [*changes, "model.tied_embeddings=false"])
    peak_rates = {
        tensor.name: config.optimizer.learning_rate * config.optimizer.rate_factor(tensor)
        for tensor in config.inventories[0]
    }
    layer = "decoder.layers.0"
    assert peak_rates["embedding.word_embeddings.weight"] == pytest.approx(0.1)
    assert peak_rates["output_layer.weight"] == pytest.approx(0.02)
    assert peak_rates["decoder.final_layernorm.weight"] == pytest.approx(0.004)
    assert peak_rates[f"{layer}.input_layernorm.weight"] == pytest.approx(0.012)
    assert peak_rates[f"{layer}.mlp.linear_fc1.weight"] == pytest.approx(0.01)
