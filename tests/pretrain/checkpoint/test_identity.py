"""Changes that a resume accepts, and those that it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from pretrain.checkpoint.format import About
from pretrain.checkpoint.identity import DATA_KEYS, accept_identity
from pretrain.errors import UserError


@pytest.mark.parametrize("allowed", [False, True])
def test_another_tokenizer_is_refused_whatever_is_allowed(allowed: bool) -> None:
    """Under its ids the weights would be trained on other text."""
    data: dict[str, Any] = {"tokenizer": "a" * 64, "directories": [], "parts": []}
    keys = dict.fromkeys(DATA_KEYS, 1)
    saved = cast(About, SimpleNamespace(keys=keys, data=data, frozen_bank={}))
    live = {"keys": keys, "data": {**data, "tokenizer": "b" * 64}, "frozen_bank": {}}
    with pytest.raises(UserError, match="another tokenizer") as refused:
        accept_identity("step_00000002", saved, live, allowed)
    assert "allow_change" not in str(refused.value)
