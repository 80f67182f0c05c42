"""What DeepSpeed gets to see of a model."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_patches.engine.freeze import (
    frozen_layers,
    frozen_weights,
    model_parameter_counts,
    parameter_groups,
)
from tests.megatron_patches.models import HEAD_DIM, HEADS, HIDDEN, LAYERS, build


def test_groups_hold_each_trainable_parameter_once_and_matrices_alone_decay(
    one_rank: dist.ProcessGroup,
) -> None:
    model = build("orthogonal", adapters=("short_convolution", "low_rank"))
    decayed, undecayed = parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], undecayed["weight_decay"]) == (0.1, 0.0)
    ids = [id(parameter) for group in (decayed, undecayed) for parameter in group["params"]]
    assert sorted(ids) == sorted(id(parameter) for parameter in model.parameters())
    taps = [layer.self_attention.linear_qkv.adapters.key_taps for layer in model.decoder.layers]
    assert {id(weight) for weight in taps} <= {id(parameter) for parameter in undecayed["params"]}
    assert all(parameter.ndim == 2 for parameter in decayed["params"])
    names = {id(parameter): name.rpartition(".")[2] for name, parameter in model.named_parameters()}
    matrices = {names[id(weight)] for weight in undecayed["params"] if weight.ndim == 2}
    assert matrices == {"key_taps", "value_taps"}


def test_what_does_not_require_a_gradient_is_in_no_group(one_rank: dist.ProcessGroup) -> None:
    model = build("vanilla")
    model.decoder.layers[0].mlp.linear_fc1.weight.requires_grad_(False)
    ids = {id(parameter) for group in parameter_groups(model, 0.1) for parameter in group["params"]}
    assert id(model.decoder.layers[0].mlp.linear_fc1.weight) not in ids and len(ids) > 5


def test_frozen_weights_are_found_and_counted_and_never_trained(
    one_rank: dist.ProcessGroup,
) -> None:
    model = build("orthogonal")
    vanilla = build("vanilla")
    assert [layer.layer for _, layer in frozen_layers(model)] == list(range(LAYERS))
    frozen = LAYERS * 2 * HEADS * HEAD_DIM * HIDDEN
    counts, plain = (
        model_parameter_counts(counted_model, one_rank) for counted_model in (model, vanilla)
    )
    assert counts["model_frozen_parameters"] == frozen and plain["model_frozen_parameters"] == 0
    total = sum(parameter.numel() for parameter in vanilla.parameters())
    assert plain["model_trainable_parameters"] == total
    assert counts["model_trainable_parameters"] == total - frozen
    initial_weights = [weight.clone() for weight in frozen_weights(model)]
    tokens = torch.arange(10).view(1, 10)
    model(tokens, tokens, None, labels=tokens).mean().backward()
    assert all(weight.grad is None for weight in frozen_weights(model))
    assert all(
        torch.equal(a, b) for a, b in zip(initial_weights, frozen_weights(model), strict=True)
    )
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_partial_gradients_are_known_by_their_mark() -> None:
    def marks(model: torch.nn.Module) -> int:
        return sum(getattr(p, "partial_gradient", False) for p in model.parameters())

    assert marks(build("orthogonal")) == 0
    assert marks(build("orthogonal", adapters=("low_rank",))) == LAYERS


def test_a_weight_has_the_rate_of_the_first_pattern_that_its_name_matches(
    one_rank: dist.ProcessGroup,
) -> None:
    model = build("orthogonal", adapters=("short_convolution", "low_rank"))
    groups = parameter_groups(model, 0.1, {"*.key_taps": 3.0, "*_taps": 2.0, "*.low_rank_*": 0.5})
    rates = {id(weight): group["rate_factor"] for group in groups for weight in group["params"]}
    for name, parameter in model.named_parameters():
        expected = {"key_taps": 3.0, "value_taps": 2.0, "low_rank_down": 0.5}.get(
            name.rpartition(".")[2], 1.0
        )
        assert rates[id(parameter)] == expected, name
    assert len(rates) == len(list(model.parameters()))
