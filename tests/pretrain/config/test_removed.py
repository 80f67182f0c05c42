"""Settings that are gone: one sentence each, and nothing where the value changed nothing."""

import pytest

from pretrain.config.load import load_config
from pretrain.config.removed import REMOVED_KEYS, removed_sentence
from pretrain.errors import UserError

PHASES = "attention.phases=[{{at: 0.5, freeze: 1, {}}}]"


@pytest.mark.parametrize(
    ("override", "instead"),
    [
        ("attention.score_bound=30", "hold scores by model.qk_norm=true, or by optimizer.qk_clip"),
        ("performance.structured_products=kernel", "two batched products are as fast or faster"),
    ],
)
def test_a_setting_that_is_gone_is_refused_with_the_tag_and_the_remedy(
    override: str, instead: str
) -> None:
    key = override.partition("=")[0]
    with pytest.raises(UserError, match=f"{key} was removed; tag v0.5-lab .* has it: {instead}"):
        load_config("demo", [override])


@pytest.mark.parametrize(
    ("override", "gone", "instead"),
    [
        ("attention.variant=gaussian_naive", "gaussian_naive", "use gaussian with attention.gauss"),
        ("attention.variant=early_freeze", "early_freeze", "use gaussian with .*frozen_heads="),
        ("attention.adapters=[logit_scale]", "logit_scale", "use channel_scale, which scales"),
        ("attention.adapters=[low_rank, qk_norm]", "qk_norm", "use model.qk_norm=true"),
        ("attention.frozen_roles=output", "output", "leave it out, the output projection trains"),
        ("attention.frozen_roles=all", "all", "leave it out, which freezes queries and keys"),
        (PHASES.format("heads: 0.5"), "heads", "freeze whole layers, or choose heads from the"),
        (PHASES.format("roles: key"), "roles", "freeze whole layers, or choose a role from the"),
        (PHASES.format("orthonormal: true"), "orthonormal", "rows are frozen as they are"),
    ],
)
def test_a_value_that_is_gone_is_refused_with_the_tag_and_the_remedy(
    override: str, gone: str, instead: str
) -> None:
    key = override.partition("=")[0]
    said = f"{key}: '{gone}' was removed; tag v0.5-lab .* has it: {instead}"
    with pytest.raises(UserError, match=said):
        load_config("demo", [override])


def test_keys_of_phases_that_changed_nothing_are_left_out() -> None:
    vanilla = "attention.variant=vanilla"
    neutral = PHASES.format("heads: 1.0, roles: both, orthonormal: false")
    plain = load_config("demo", [vanilla, PHASES.format("train: null")])
    assert load_config("demo", [vanilla, neutral]).values == plain.values
    said = removed_sentence("attention.phases", [{"at": 0.5, "freeze": "1", "heads": 1.0}])
    assert said is None


@pytest.mark.parametrize("key", REMOVED_KEYS)
def test_a_value_that_changed_nothing_is_left_out(key: str) -> None:
    for value in REMOVED_KEYS[key].neutral:
        text = "null" if value is None else str(value).lower()
        assert load_config("demo", [f"{key}={text}"]).values == load_config("demo").values
