"""Settings that are gone: one sentence each, and nothing where the value changed nothing."""

import pytest

from pretrain.config.load import load_config
from pretrain.config.removed import REMOVED_KEYS
from pretrain.errors import UserError


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


@pytest.mark.parametrize("key", REMOVED_KEYS)
def test_a_value_that_changed_nothing_is_left_out(key: str) -> None:
    for value in REMOVED_KEYS[key].neutral:
        text = "null" if value is None else str(value).lower()
        assert load_config("demo", [f"{key}={text}"]).values == load_config("demo").values
