"""The frozen output projection: drawn head by head, with a gain, and no weight of its own."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from megatron_patches.bank.orthonormal import BankRecipe, head_rows
from megatron_patches.engine.freeze import frozen_layers
from tests.megatron_patches.models import HEAD_DIM, HEADS, HIDDEN, LAYERS, SEED, SEQ, STD, build

WIDTH = HEADS * HEAD_DIM
RECIPE = BankRecipe(SEED, HIDDEN, HEAD_DIM, num_attention_heads=HEADS, num_query_groups=HEADS)


def test_its_columns_are_the_banks_and_it_does_not_train(one_rank: dist.ProcessGroup) -> None:
    model = build("vanilla", frozen_roles="output")
    trained = dict(model.named_parameters())
    for number, layer in enumerate(model.decoder.layers):
        module = layer.self_attention.linear_proj
        for head, columns in enumerate(module.weight.split(HEAD_DIM, dim=1)):
            rows = torch.from_numpy(head_rows(RECIPE, number, "output", head)).float()
            assert torch.equal(columns.t(), rows)
            assert not torch.equal(rows, torch.from_numpy(head_rows(RECIPE, number, "query", head)))
        name = f"decoder.layers.{number}.self_attention.linear_proj"
        assert f"{name}.gain" in trained and f"{name}.weight" not in trained
        assert f"{name}.weight" not in model.state_dict()
    assert [len(list(one.frozen_shards())) for _, one in frozen_layers(model)] == [1] * LAYERS


def test_of_a_layer_it_is_an_isometry_of_the_size_of_a_trained_one(
    one_rank: dist.ProcessGroup,
) -> None:
    module = build("vanilla", frozen_roles="output", scope="layer").decoder.layers[0]
    weight = module.self_attention.linear_proj.weight.double()
    assert (weight.t() @ weight - torch.eye(WIDTH)).abs().max() < 1e-6
    usual = STD / math.sqrt(2 * LAYERS) * math.sqrt(HIDDEN * WIDTH)
    whole = module.self_attention.linear_proj.gain.double()[:, None] * weight
    assert whole.norm().item() == pytest.approx(usual, rel=1e-6)


@pytest.mark.parametrize("variant", ["vanilla", "orthogonal"])
def test_it_computes_and_learns_as_the_matrix_that_it_is(
    variant: str, one_rank: dist.ProcessGroup
) -> None:
    usual = build(variant)
    frozen = build(variant, frozen_roles="output" if variant == "vanilla" else "all")
    own = dict(frozen.named_parameters())
    for name, weight in usual.named_parameters():
        if name in own:
            assert torch.equal(weight, own[name]), name  # the bank and all else start as before
    tokens = torch.arange(2 * SEQ).view(2, SEQ)
    losses = []
    for model in (frozen, usual):
        for ours, theirs in zip(frozen.decoder.layers, usual.decoder.layers, strict=True):
            module = ours.self_attention.linear_proj
            theirs.self_attention.linear_proj.weight.data = (
                module.gain.data[:, None] * module.weight
            )
        loss = model(tokens, torch.arange(SEQ).expand(2, -1), None, labels=tokens).mean()
        loss.backward()
        losses.append(loss)
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
    for ours, theirs in zip(frozen.decoder.layers, usual.decoder.layers, strict=True):
        module = ours.self_attention.linear_proj
        dense = theirs.self_attention.linear_proj.weight.grad
        assert torch.allclose(
            module.gain.grad, (dense * module.weight).sum(1), rtol=1e-3, atol=1e-6
        )
        for one, other in ((ours.mlp, theirs.mlp),):
            pairs = zip(one.parameters(), other.parameters(), strict=True)
            assert all(torch.allclose(a.grad, b.grad, rtol=1e-3, atol=1e-6) for a, b in pairs)
