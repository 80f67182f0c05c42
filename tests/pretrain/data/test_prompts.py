"""Prompts in ids: what the tokenizer makes of them, what is added to them, and what has no room."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_pipeline.tokenizer.tokenizer import open_tokenizer
from pretrain.config.load import load_config
from pretrain.data.open import check_inputs, read_blend
from pretrain.data.prompts import read_prompts
from pretrain.errors import UserError
from tests.tiny import tiny_overrides


def overrides(shards: Path, prompts: str, tokens: int = 8) -> list[str]:
    changes = {"telemetry__sample_prompts": prompts, "telemetry__sample_tokens": tokens}
    return tiny_overrides(shards, shards.parent, "prompts", **changes)


def test_ids_are_those_of_the_shards_tokenizer_and_what_is_added_keeps_its_space(
    tiny_shards: Path,
) -> None:
    config = load_config("demo", overrides(tiny_shards, "[Return the, '  x']"))
    blend = read_blend(config.data)
    prompts = read_prompts(config.telemetry, config.data.sequence_length, blend)
    assert prompts is not None
    tokenizer = open_tokenizer(tiny_shards / "tokenizer.model")
    assert [list(ids) for ids in prompts.ids] == [
        tokenizer.encode([text])[0].tolist() for text in ("Return the", "  x")
    ]
    whole = tokenizer.encode(["Return the first of them"])[0].tolist()
    assert prompts.added(0, whole[len(prompts.ids[0]) :]) == " first of them"
    without = load_config("demo", overrides(tiny_shards, "[]")).telemetry
    assert read_prompts(without, config.data.sequence_length, blend) is None


def test_prompts_without_room_are_refused(tiny_shards: Path) -> None:
    """The longest that fits is taken, one token more is not."""
    tokenizer = open_tokenizer(tiny_shards / "tokenizer.model")
    text = "The list of all the names in this module and in those that it needs to run"
    length = len(tokenizer.encode([text])[0])
    assert 8 < length < 32
    check_inputs(load_config("demo", overrides(tiny_shards, f"[{text}]", 32 - length)), 1)
    with pytest.raises(UserError) as raised:
        check_inputs(load_config("demo", overrides(tiny_shards, f"[The, {text}]", 33 - length)), 1)
    assert str(raised.value).startswith(
        f"telemetry.sample_prompts.1 has {length} tokens, which with "
        f"telemetry.sample_tokens={33 - length} is"
    )
    assert "data.sequence_length=32" in str(raised.value)
