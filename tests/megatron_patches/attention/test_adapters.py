"""The adapters: each starts as what it says, and computes its formula, head by head."""

from __future__ import annotations

import pytest
import torch

from megatron_patches.attention.adapters import FORMULAS, QK_NORM_EPSILON, QueryKeyAdapters
from megatron_patches.recipe.adapters import ADAPTERS, AdapterSizes

SEQ, BATCH, HEADS, GROUPS, HEAD_DIM, RANK, HIDDEN = 5, 2, 4, 2, 6, 3, 10
SHARED = "low_rank_down"


def adapters(*names: str) -> QueryKeyAdapters:
    sizes = AdapterSizes(HIDDEN, HEAD_DIM, RANK)
    made = QueryKeyAdapters(names, HEADS, GROUPS, sizes, torch.float64, torch.device("cpu"))
    made.fill()
    return made


def inputs(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((SEQ, BATCH, HEADS, HEAD_DIM), (SEQ, BATCH, GROUPS, HEAD_DIM), (SEQ, BATCH, 2 * RANK))
    query, key, low_rank = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return query, key, low_rank


@pytest.mark.parametrize("name", [name for name in ADAPTERS if name != "qk_norm"])
def test_all_but_the_norm_start_as_the_identity(name: str) -> None:
    query, key, low_rank = inputs()
    ours = adapters(name)(query, key, {SHARED: low_rank})
    assert torch.equal(ours[0], query) and torch.equal(ours[1], key)


def test_the_norm_gives_every_head_a_root_mean_square_of_one() -> None:
    query, key, _ = inputs()
    for vectors in adapters("qk_norm")(10 * query, key, {}):
        root_mean_square = vectors.square().mean(-1).sqrt()
        ones = torch.ones_like(root_mean_square)
        torch.testing.assert_close(root_mean_square, ones, rtol=1e-5, atol=0)  # computed in fp32


def test_all_of_them_together_are_their_formulas_in_order() -> None:
    made = adapters(*ADAPTERS)
    with torch.no_grad():
        for number, parameter in enumerate(made.parameters()):
            generator = torch.Generator().manual_seed(number)
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    query, key, low_rank = inputs()
    ours_query, ours_key = made(query, key, {SHARED: low_rank})

    def norm(vector: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return gain * vector.float() / (vector.float().square().mean() + QK_NORM_EPSILON).sqrt()

    for step in range(SEQ):
        for head in range(HEADS):
            rows = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
            vector = query[step, 0, head] + made.up_query[rows] @ low_rank[step, 0, :RANK]
            vector = norm(made.core[head] @ vector, made.query_gain[rows]) * made.logit_scale[head]
            torch.testing.assert_close(ours_query[step, 0, head], vector.double(), rtol=1e-5, atol=1e-6)
        for group in range(GROUPS):
            rows = slice(group * HEAD_DIM, (group + 1) * HEAD_DIM)
            vector = norm(
                key[step, 0, group] + made.up_key[rows] @ low_rank[step, 0, RANK:], made.key_gain[rows]
            )
            torch.testing.assert_close(ours_key[step, 0, group], vector.double(), rtol=1e-5, atol=1e-6)


def test_every_declared_adapter_has_a_formula_and_every_formula_a_declaration() -> None:
    assert FORMULAS.keys() == ADAPTERS.keys()


def test_an_adapter_that_is_declared_linear_is_linear() -> None:
    """Export applies them to the columns of frozen rows."""
    (query, key, product), (query_2, key_2, product_2) = inputs(1), inputs(2)
    for name, declared in ADAPTERS.items():
        made = adapters(name)
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.normal_(generator=torch.Generator().manual_seed(3))

        def applied(*values: torch.Tensor, made: QueryKeyAdapters = made) -> torch.Tensor:
            return torch.cat(made(*values[:2], {SHARED: values[2]}), dim=2)

        first, second = applied(query, key, product), applied(query_2, key_2, product_2)
        both = applied(query + query_2, key + key_2, product + product_2)
        assert torch.allclose(first + second, both) == declared.linear, name


def test_what_starts_at_one_or_the_identity_is_not_decayed_and_all_is_sharded_by_heads() -> None:
    parameters = dict(adapters(*ADAPTERS).named_parameters())
    decayed = {name for name, one in parameters.items() if not one.no_weight_decay}
    assert decayed == {"up_query", "up_key"}
    assert all(one.tensor_model_parallel and one.partition_dim == 0 for one in parameters.values())
