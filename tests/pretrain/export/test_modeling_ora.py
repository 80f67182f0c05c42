"""Corrections of an export's own classes: formulas, decoding with a cache, padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_patches.attention.convolution import convolve

pytest.importorskip("transformers")
from transformers import DynamicCache

from pretrain.export.modeling_ora import (
    Convolution,
    OraLearnedConfig,
    OraLearnedForCausalLM,
    OraLlamaConfig,
    OraLlamaForCausalLM,
    OraRotaryConfig,
    OraRotaryForCausalLM,
)
from tests.tiny_exports import LEARNED, LENGTH, ROTARY

TAPS = 4
CORRECTIONS = {
    "query": {"bias": 1},
    "key": {"bias": 1, "taps": TAPS},
    "value": {"taps": TAPS},
}
COMMON = {
    "vocab_size": 64,
    "layer_types": ["full_attention", "hybrid"],
    "number_of_conv_states": 2,
    "corrections": [{"query": {"bias": 1}, "key": {}, "value": {}}, CORRECTIONS],
    "bos_token_id": 2,
    "eos_token_id": None,
    "pad_token_id": None,
}
GPT2 = {**LEARNED, "n_positions": LENGTH}
GREEDY: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}


MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "rotary": (
        OraRotaryForCausalLM,
        OraRotaryConfig,
        {**ROTARY, "num_key_value_heads": 2, "use_bias": False},
    ),
    "learned": (OraLearnedForCausalLM, OraLearnedConfig, GPT2),
    "llama": (
        OraLlamaForCausalLM,
        OraLlamaConfig,
        {**ROTARY, "num_key_value_heads": 2, "parts": {"mlp": "relu2", "qk_norm": True}},
    ),
    "learned, other parts": (
        OraLearnedForCausalLM,
        OraLearnedConfig,
        {**GPT2, "parts": {"norm": "rmsnorm", "mlp": "swiglu", "logit_softcap": 5.0}},
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(1)
    model_class, config, settings = MODELS[request.param]
    language_model = model_class(config(**settings, **COMMON))
    for weight in language_model.parameters():
        if weight.requires_grad:
            torch.nn.init.normal_(weight, std=0.3)
    return language_model.eval()


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("steps", [[1] * 12, [2, 1, 9], [7, 5]])
@torch.no_grad()
def test_reading_in_parts_gives_the_logits_of_the_whole(
    model: Any, ids: torch.Tensor, steps: list[int]
) -> None:
    whole = model(ids, use_cache=False).logits
    parts = []
    cache = None
    for part in ids.split(steps, dim=1):
        read = model(part, past_key_values=cache, use_cache=True)
        parts, cache = [*parts, read.logits], read.past_key_values
    assert float((torch.cat(parts, 1) - whole).abs().max()) < 1e-5 * float(whole.abs().max())
    assert [state.size(-1) for state in cache.layers[1].conv_states.values()] == [TAPS - 1] * 2


BEAMS, SAMPLED = {"num_beams": 6, "num_return_sequences": 6}, {"do_sample": True}


@pytest.mark.parametrize(
    ("options", "others"),
    [
        ({}, {}),
        (BEAMS, BEAMS),
        (SAMPLED, SAMPLED),
        ({"prompt_lookup_num_tokens": 2}, {}),
        ({"cache_implementation": "static"}, {}),
    ],
)
def test_generating_with_the_cache_gives_the_same_text(
    model: Any, ids: torch.Tensor, options: dict[str, Any], others: dict[str, Any]
) -> None:
    torch.manual_seed(3)
    generated = model.generate(ids[:1, :5], **{**GREEDY, **options})
    torch.manual_seed(3)
    assert torch.equal(
        generated, model.generate(ids[:1, :5], use_cache=False, **{**GREEDY, **others})
    )


@torch.no_grad()
def test_padding_on_the_left_and_texts_before_are_not_looked_at(
    model: Any, ids: torch.Tensor
) -> None:
    padded = ids.clone()
    mask = torch.ones_like(ids)
    padded[0, :7] = mask[0, :7] = 0
    alone = ids[:1, 7:]
    expected = model(alone).logits
    logits = model(padded, attention_mask=mask).logits[:1, 7:]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    generated = model.generate(padded, attention_mask=mask, **GREEDY)
    assert torch.equal(
        generated[:1, 7:], model.generate(alone, attention_mask=mask[:1, 7:], **GREEDY)
    )
    positions = torch.cat((torch.arange(7), torch.arange(5)))[None]  # two texts, one by one
    both = model(ids[:1], position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(both[:, 7:], expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_model_that_transformers_saves_again_stays_the_same(
    model: Any, ids: torch.Tensor, tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_a_cache_without_a_place_for_convolutions_is_refused(model: Any, ids: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"DynamicCache\(config=model.config\) has"):
        model(ids, past_key_values=DynamicCache())


def test_the_convolution_is_that_of_the_training() -> None:
    convolution = Convolution(8, TAPS)
    inputs = torch.randn(9, 2, 2, 4)
    torch.nn.init.normal_(convolution.taps)
    convolution.positions = torch.arange(9)[None]
    outputs = convolution(inputs.transpose(0, 1).flatten(2))
    expected = convolve(inputs, convolution.taps.detach())
    torch.testing.assert_close(outputs, expected.transpose(0, 1).flatten(2))
