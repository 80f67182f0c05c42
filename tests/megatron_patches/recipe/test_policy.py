"""Axes of the attention policy: declared once, judged by variant, and what follows."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_patches.errors import MethodError
from megatron_patches.recipe.axes import Axis, Rule, axes_of
from megatron_patches.recipe.phases import PhaseStart, layer_range, spread, training_begins
from megatron_patches.recipe.policy import AXES, QKPolicy
from megatron_patches.recipe.variants import VARIANTS, policy_for
from pretrain.config.attention import AttentionSection, written_axes
from pretrain.config.load import load_config, parse_config

GIVEN: dict[str, Any] = {
    "gaussian_std": 0.5,
    "shared": True,
    "frozen_roles": "key",
    "scope": "layer",
    "construction": "svd",
    "penalty": 0.5,
    "frozen_heads": (("0-1", 0.5),),
    "adapters": ("channel_scale",),
    "low_rank": 3,
    "taps": 3,
    "convolved": "key",
    "trainable": False,
    "synthesizer_rank": 3,
    "phases": (PhaseStart(0.5, freeze="1"),),
}
"""A value of each axis that is no variant's own."""

ORTHONORMAL = {
    "orthogonal",
    "orthogonal_shared",
    "orthogonal_trainable",
    "orthogonal_penalty",
    "unfreeze",
    "hybrid",
}
STRUCTURED = {"hadamard", "dct", "monarch", "monarch_shared_conv"}
STARTED = {"monarch_trainable", "low_rank", "vanilla", "orthogonal_trainable"}
FROZEN = {"orthogonal", "orthogonal_shared", "gaussian", "pretrained", "hybrid", *STRUCTURED}
APPLIES = {
    "gaussian_std": {"gaussian"},
    "shared": {*FROZEN, *STARTED} - {"pretrained", "low_rank"},
    "frozen_roles": FROZEN - {"orthogonal_shared", "monarch_shared_conv", "hybrid"},
    "scope": {*ORTHONORMAL, *STRUCTURED, "monarch_trainable"},
    "construction": ORTHONORMAL,
    "penalty": {"orthogonal_penalty"},
    "frozen_heads": FROZEN,
    "adapters": {*FROZEN, *STARTED},
    "low_rank": {"low_rank"},
    "taps": {"monarch_shared_conv"},
    "convolved": {"monarch_shared_conv"},
    "trainable": {"synthesizer_random", "synthesizer_factorized"},
    "synthesizer_rank": {"synthesizer_factorized"},
    "phases": {*FROZEN, *STARTED, "unfreeze"} - {"low_rank"},
}


@pytest.mark.parametrize("name", AXES)
def test_an_axis_is_taken_where_it_applies_and_refused_elsewhere(name: str) -> None:
    taken = set()
    for variant in VARIANTS:
        try:
            assert getattr(policy_for(variant, {name: GIVEN[name]}), name) == GIVEN[name]
            taken.add(variant)
        except MethodError as error:
            assert "attention." in str(error)
    assert taken == APPLIES[name]


def test_shared_monarch_rows_with_a_look_back_are_those_axes_by_one_name() -> None:
    helpers = ("short_convolution", "query_key_bias", "channel_scale")
    assert policy_for("monarch_shared_conv") == policy_for(
        "monarch", {"shared": True, "adapters": helpers}
    )
    assert policy_for("monarch_shared_conv", {"adapters": ()}) == policy_for(
        "monarch", {"shared": True}
    )


@pytest.mark.parametrize("name", AXES)
def test_an_axis_is_a_key_with_its_meaning(name: str) -> None:
    key = AttentionSection.model_fields[name]
    assert key.description == AXES[name].meaning
    assert key.default is None
    assert name in load_config("demo").as_dict()["attention"]


def test_the_section_has_its_own_keys_and_the_axes_in_their_order() -> None:
    assert list(AttentionSection.model_fields) == ["variant", "seed", *AXES]
    assert list(axes_of(QKPolicy)) == list(AXES) == list(APPLIES)


@pytest.mark.parametrize(
    "variant", [name for name in VARIANTS if VARIANTS[name].init != "pretrained"]
)
def test_what_is_written_of_a_policy_makes_the_same_policy(variant: str) -> None:
    config = load_config("demo", [f"attention.variant={variant}"])
    assert config.policy == VARIANTS[variant]
    written = written_axes(config.policy)
    assert written.items() <= config.as_dict()["attention"].items()
    for name, value in written.items():
        assert value is None or AXES[name].fits(config.policy, getattr(config.policy, name))
    assert parse_config(config.as_dict()).policy == config.policy


def test_low_rank_is_judged_with_the_adapters_that_are_given_beside_it() -> None:
    policy = policy_for("orthogonal", {"low_rank": 3, "adapters": ("low_rank",)})
    assert (policy.low_rank, policy.adapters) == (3, ("low_rank",))


def test_an_empty_list_asks_for_nothing() -> None:
    assert (
        policy_for("vanilla", {"adapters": (), "frozen_heads": (), "phases": ()})
        == VARIANTS["vanilla"]
    )
    assert policy_for("hybrid", {"frozen_heads": ()}).frozen_heads == ()


def test_the_first_rule_that_does_not_hold_speaks() -> None:
    axis = Axis(
        "x",
        (
            Rule(lambda policy, value: policy.trainable, "not for {variant}"),
            Rule(lambda policy, value: value > 1, "not {value}"),
        ),
    )
    axis.check(VARIANTS["vanilla"], 2, "vanilla")
    with pytest.raises(MethodError, match=r"^not 1$"):
        axis.check(VARIANTS["vanilla"], 1, "vanilla")
    with pytest.raises(MethodError, match=r"^not for orthogonal$"):
        axis.check(VARIANTS["orthogonal"], 1, "orthogonal")


def test_unknown_axes_and_variants() -> None:
    with pytest.raises(
        MethodError, match=r"attention\.variant is 'x'; known variants: vanilla, orthogonal"
    ):
        policy_for("x")
    with pytest.raises(
        MethodError, match="there is no axis 'init'; known axes: gaussian_std, shared"
    ):
        policy_for("vanilla", {"init": "orthogonal"})


# Which heads are frozen


def test_frozen_groups_of_each_layer() -> None:
    hybrid = policy_for("orthogonal", {"frozen_heads": (("0", 1.0), ("2-3", 0.5))})
    assert hybrid.frozen_groups(4, 4) == [(0, 1, 2, 3), (), (1, 3), (1, 3)]
    assert VARIANTS["vanilla"].frozen_groups(2, 4) == [(), ()]
    assert VARIANTS["orthogonal"].frozen_groups(2, 2) == [(0, 1), (0, 1)]


@pytest.mark.parametrize(
    ("text", "first", "stop"),
    [
        (" all ", 0, 200),
        ("4", 4, 5),
        ("4-199", 4, 200),
        ("0%-50%", 0, 100),
        ("33.4%-100%", 67, 200),
    ],
)
def test_layers_by_number_and_by_part_of_the_depth(text: str, first: int, stop: int) -> None:
    assert layer_range(text, 200) == range(first, stop)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("4-", "names no layers"),
        ("4-50%", "mixes layer numbers and percent"),
        ("50%", "is not a part of the depth"),
        ("50%-50%", "is not a part of the depth"),
        ("60%-101%", "is not a part of the depth"),
        ("1.5-2", "is not a range of whole layer numbers"),
        ("1-2.5", "is not a range of whole layer numbers"),
        ("7-4", "the model has layers 0 to 199"),
        ("4-200", "the model has layers 0 to 199"),
    ],
)
def test_texts_that_name_no_layers(text: str, said: str) -> None:
    with pytest.raises(MethodError, match=said):
        layer_range(text, 200)


def test_heads_are_spread_and_a_fraction_is_some_of_them() -> None:
    every = (0, 1, 2, 3)
    assert [spread(share, 4) for share in (0, 0.5, 0.75, 1)] == [(), (1, 3), (1, 2, 3), every]
    for fraction, said in (
        (-0.1, "is not a fraction"),
        (1.5, "is not a fraction"),
        (0.1, "rounds to none"),
        (0.9, "rounds to all"),
    ):
        with pytest.raises(MethodError, match=said):
            spread(fraction, 4)


def test_a_layer_may_be_named_once() -> None:
    twice = policy_for("orthogonal", {"frozen_heads": (("0-2", 1.0), ("2-3", 0.5))})
    with pytest.raises(MethodError, match=r"attention\.frozen_heads: layer 2 is named twice"):
        twice.frozen_groups(4, 4)


def test_frozen_groups_follow_the_phase() -> None:
    schedule = (PhaseStart(0.25, train="3"), PhaseStart(0.5, train="1-3"))
    policy = policy_for("unfreeze", {"phases": schedule})
    every = (0, 1)
    assert [policy.frozen_groups(4, 2, phase) for phase in range(3)] == [
        [every, every, every, every],
        [every, every, every, ()],
        [every, (), (), ()],
    ]
    assert training_begins(schedule, [every] * 4) == [None, 2, 2, 1]
    # Layers that train from the start do not begin to.
    assert training_begins(schedule, [every, (), every, every]) == [None, None, 2, 1]


def test_rows_are_kept_from_the_first_entry_that_freezes_what_trains() -> None:
    schedule = (
        PhaseStart(0.1, freeze="0-1"),
        PhaseStart(0.2, train="1-2"),
        PhaseStart(0.3, freeze="all"),
    )
    assert policy_for("orthogonal", {"phases": schedule}).kept_from(4, 2) == [None, 3, 3, None]
    frozen = {"phases": schedule[:1], "frozen_heads": (("0", 0.5), ("1", 1.0))}
    assert policy_for("hybrid", frozen).kept_from(4, 2) == [1, None, None, None]
    one_role = {"phases": schedule[:1], "frozen_roles": "key"}
    assert policy_for("orthogonal", one_role).kept_from(4, 2) == [1, 1, None, None]
