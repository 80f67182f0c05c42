"""The adapters: each starts as what it says, and computes its formula, head by head."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from typing_extensions import override

import megatron_patches.attention.adapters as adapters_module
from megatron_patches.attention.adapters import (
    FORMULAS,
    HeadAdapters,
    Heads,
    Weights,
    fill_evenly,
    require_effect,
)
from megatron_patches.errors import MethodError
from megatron_patches.recipe.adapters import (
    ADAPTERS,
    Adapter,
    AdapterSizes,
    AdapterWeight,
    Corrections,
    in_order,
)
from megatron_patches.recipe.parts import ModelShape, Place

SEQ, BATCH, HEADS, GROUPS, HEAD_DIM, RANK, HIDDEN = 5, 2, 4, 2, 6, 3, 10
TAPS = 3
LOW_RANK = "low_rank_down"
SHAPE = ModelShape(
    1,
    HIDDEN,
    num_attention_heads=HEADS,
    num_query_groups=GROUPS,
    head_dim=HEAD_DIM,
    ffn_hidden_size=4 * HIDDEN,
    vocab_size=8,
    sequence_length=SEQ,
    learned_positions=True,
    tied_embeddings=True,
)
Inputs = tuple[Heads, dict[str, torch.Tensor]]


def adapters(*names: str) -> HeadAdapters:
    sizes = AdapterSizes(HIDDEN, HEAD_DIM, RANK, taps=TAPS)
    module = HeadAdapters(
        in_order(names),
        HEADS,
        num_groups=GROUPS,
        sizes=sizes,
        dtype=torch.float64,
        device=torch.device("cpu"),
    )
    starts = {
        weight.name: weight.start
        for adapter in in_order(names)
        for weight in adapter.weights(sizes)
    }
    for name, parameter in module.named_parameters():
        fill_evenly(parameter, starts[name], HEAD_DIM)
    return module


def inputs(seed: int = 1) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    rows = ((HEADS, HEAD_DIM), (GROUPS, HEAD_DIM), (GROUPS, HEAD_DIM), (2 * RANK,))
    query, key, value, low_rank = (
        torch.randn((SEQ, BATCH, *shape), generator=generator, dtype=torch.float64)
        for shape in rows
    )
    return Heads(query, key, value), {LOW_RANK: low_rank}


@pytest.mark.parametrize("name", [name for name in ADAPTERS if name != "short_convolution"])
def test_all_but_the_convolution_start_as_the_identity(name: str) -> None:
    heads, shared = inputs()
    ours = adapters(name)(heads, shared)
    for corrected, original in zip(ours[:3], heads[:3], strict=True):
        assert torch.equal(corrected, original)


def test_the_convolution_starts_with_the_token_before_in_odd_channels_of_keys() -> None:
    heads, _ = inputs()
    ours = adapters("short_convolution")(heads, {})
    assert torch.equal(ours.query, heads.query) and torch.equal(ours.value, heads.value)
    assert torch.equal(ours.key[..., ::2], heads.key[..., ::2])
    assert torch.equal(ours.key[1:, ..., 1::2], heads.key[:-1, ..., 1::2])
    assert not ours.key[0, ..., 1::2].any()
    taps = torch.empty(12, TAPS)
    fill_evenly(taps, "half_previous", 3)
    assert taps[:, 0].tolist() == [1, 0, 1] * 4  # heads of odd size too start alike


def test_all_of_them_together_are_their_formulas_in_order() -> None:
    module = adapters(*ADAPTERS)
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            generator = torch.Generator().manual_seed(number)
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    heads, shared = inputs()
    ours = module(heads, shared)

    def close(mine: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(mine, expected.double(), rtol=1e-5, atol=1e-6)

    def mixed(steps: list[torch.Tensor], taps: torch.Tensor) -> torch.Tensor:
        return sum(steps[-1 - j] * taps[:, j] for j in range(TAPS) if j < len(steps))

    for head in range(HEADS):
        rows = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
        for step in range(SEQ):
            vector = (
                heads.query[step, 0, head]
                + module.up_query[rows] @ shared[LOW_RANK][step, 0, :RANK]
            )
            vector += module.query_bias[rows]
            close(ours.query[step, 0, head], vector * module.log_scale[rows].exp())
    for group in range(GROUPS):
        rows = slice(group * HEAD_DIM, (group + 1) * HEAD_DIM)
        keys, values = [], []
        for step in range(SEQ):
            vector = (
                heads.key[step, 0, group] + module.up_key[rows] @ shared[LOW_RANK][step, 0, RANK:]
            )
            keys.append(vector + module.key_bias[rows])
            values.append(heads.value[step, 0, group])
            close(ours.key[step, 0, group], mixed(keys, module.key_taps[rows]))
            close(ours.value[step, 0, group], mixed(values, module.value_taps[rows]))


def test_every_declared_adapter_has_a_formula_and_every_formula_a_declaration() -> None:
    assert FORMULAS.keys() == ADAPTERS.keys()


def test_no_two_adapters_have_a_tensor_of_the_same_name() -> None:
    """A layer has them in one module, where the later one would take the place of the other."""
    sizes = AdapterSizes(HIDDEN, HEAD_DIM, RANK)
    names = [weight.name for adapter in ADAPTERS.values() for weight in adapter.weights(sizes)]
    assert sorted(names) == sorted(set(names))


def test_an_adapter_that_is_folded_is_linear() -> None:
    """Export applies them to the columns of frozen rows, token by token."""
    (first, products) = inputs(1)
    (second, products_2) = inputs(2)
    added = Heads(
        *(heads_1 + heads_2 for heads_1, heads_2 in zip(first[:3], second[:3], strict=True))
    )
    for name, declared in ADAPTERS.items():
        module = adapters(name)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.normal_(generator=torch.Generator().manual_seed(3))

        def applied(
            heads: Heads, shared: dict[str, torch.Tensor], module: HeadAdapters = module
        ) -> torch.Tensor:
            return torch.cat(module(heads, shared)[:3], dim=2)

        together = applied(added, {name: products[name] + products_2[name] for name in products})
        linear = torch.allclose(applied(first, products) + applied(second, products_2), together)
        # One that is linear may have to stay outside the rows: a convolution mixes tokens.
        assert linear or not declared.folded, name
        if declared.folded:  # into rows of queries and keys alone
            assert module(first, products).value is first.value, name
    assert not ADAPTERS["short_convolution"].folded


def test_what_starts_as_the_identity_is_not_decayed_and_all_is_sharded_by_heads() -> None:
    groups = (True,) * GROUPS
    corrections = Corrections(
        in_order(ADAPTERS), AdapterSizes(HIDDEN, HEAD_DIM, RANK, taps=TAPS), groups
    )
    declared = {
        tensor.name: tensor for tensor in corrections.tensors(Place("linear", "layer.0", 0), SHAPE)
    }
    decayed = {name for name, tensor in declared.items() if tensor.decay}
    assert decayed == {"linear.adapters.up_query", "linear.adapters.up_key", "linear.low_rank_down"}
    shared = declared.pop("linear.low_rank_down")
    assert shared.cut is None and shared.partial == "heads"
    assert all(tensor.cut == 0 and tensor.partial is None for tensor in declared.values())


@dataclass(frozen=True)
class HeadScale(Adapter):
    """q_h ← exp(s_h) q_h: a scale of each head, as somebody may add it."""

    name = "head_scale"

    @override
    def weights(self, sizes: AdapterSizes) -> tuple[AdapterWeight, ...]:
        return (AdapterWeight("log_head_scale", "query", (1,), "zeros"),)


def test_a_tensor_that_can_change_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def head_scale(heads: Heads, weights: Weights) -> Heads:
        return heads._replace(query=heads.query * weights["log_head_scale"].exp().view(-1, 1))

    monkeypatch.setitem(adapters_module.FORMULAS, "head_scale", head_scale)  # type: ignore[arg-type]
    sizes = AdapterSizes(HIDDEN, HEAD_DIM, RANK, taps=TAPS)
    require_effect([HeadScale()], sizes, qk_norm=False)
    # Followed by a bias it changes the direction of a query, too.
    require_effect([HeadScale(), ADAPTERS["query_key_bias"]], sizes, qk_norm=True)
    with pytest.raises(MethodError, match=r"head_scale, whose tensor log_head_scale .*qk_norm"):
        require_effect([HeadScale()], sizes, qk_norm=True)
    with pytest.raises(MethodError, match="log_head_scale"):
        require_effect([ADAPTERS["query_key_bias"], HeadScale()], sizes, qk_norm=True)


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("alone", [False, True])
def test_every_tensor_of_ours_can_change_something(qk_norm: bool, alone: bool) -> None:
    sizes = AdapterSizes(HIDDEN, HEAD_DIM, RANK, alone=alone, taps=TAPS)
    chosen = in_order(ADAPTERS)
    require_effect(chosen, sizes, qk_norm=qk_norm)
    state = torch.random.get_rng_state()
    require_effect(chosen, sizes, qk_norm=qk_norm)
    assert torch.equal(torch.random.get_rng_state(), state)
