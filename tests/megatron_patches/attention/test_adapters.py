"""The adapters: each starts as what it says, and computes its formula, head by head."""

from __future__ import annotations

import pytest
import torch

from megatron_patches.attention.adapters import QK_NORM_EPSILON, QueryKeyAdapters
from megatron_patches.recipe.policy import ADAPTERS

SEQ, BATCH, HEADS, GROUPS, HEAD_DIM, RANK = 5, 2, 4, 2, 6, 3


def adapters(*names: str) -> QueryKeyAdapters:
    made = QueryKeyAdapters(names, HEADS, GROUPS, HEAD_DIM, RANK, torch.float64, torch.device("cpu"))
    made.fill()
    return made


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((SEQ, BATCH, HEADS, HEAD_DIM), (SEQ, BATCH, GROUPS, HEAD_DIM), (SEQ, BATCH, 2 * RANK))
    query, key, low_rank = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return query, key, low_rank


@pytest.mark.parametrize("name", [name for name in ADAPTERS if name != "qk_norm"])
def test_all_but_the_norm_start_as_the_identity(name: str) -> None:
    query, key, low_rank = inputs()
    ours = adapters(name)(query, key, low_rank if name == "low_rank" else None)
    assert torch.equal(ours[0], query) and torch.equal(ours[1], key)


def test_the_norm_gives_every_head_a_root_mean_square_of_one() -> None:
    query, key, _ = inputs()
    for vectors in adapters("qk_norm")(10 * query, key, None):
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
    ours_query, ours_key = made(query, key, low_rank)

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


def test_what_starts_at_one_or_the_identity_is_not_decayed_and_all_is_sharded_by_heads() -> None:
    parameters = dict(adapters(*ADAPTERS).named_parameters())
    decayed = {name for name, one in parameters.items() if not one.no_weight_decay}
    assert decayed == {"up_query", "up_key"}
    assert all(one.tensor_model_parallel and one.partition_dim == 0 for one in parameters.values())
