"""A cache of keys alone: the logits of the whole cache, in half of its bytes; refused where it cannot."""

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is of the extra export")

from transformers import DynamicCache, Starcoder2Config, Starcoder2ForCausalLM

from pretrain.errors import UserError
from pretrain.export.half_cache import cache_bytes, halve_cache

PROMPT, MORE = 9, (1, 1, 3, 1)


def model_of(rotation: bool = True, key_heads: int = 4) -> Any:
    torch.manual_seed(0)
    config = Starcoder2Config(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=key_heads,
        use_bias=False,
        sliding_window=None,
    )
    model = Starcoder2ForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.q_proj.weight, std=0.3)
            torch.nn.init.normal_(layer.self_attn.v_proj.weight, std=0.3)
            if rotation:
                torch.nn.init.orthogonal_(layer.self_attn.k_proj.weight)
    return model


def decoded(model: Any, texts: torch.Tensor) -> tuple[torch.Tensor, DynamicCache]:
    """Return the logits of a prompt and of what follows, in passes of one and of several tokens."""
    cache, logits, done = DynamicCache(config=model.config), [], 0
    with torch.inference_mode():
        for tokens in (PROMPT, *MORE):
            logits.append(
                model(texts[:, done : done + tokens], past_key_values=cache, use_cache=True).logits
            )
            done += tokens
    return torch.cat(logits, 1), cache


def test_logits_are_those_of_the_whole_cache_in_half_of_its_bytes() -> None:
    model = model_of()
    texts = torch.randint(
        0, 97, (2, PROMPT + sum(MORE)), generator=torch.Generator().manual_seed(1)
    )
    with torch.inference_mode():
        at_once = model(texts).logits
    whole, whole_cache = decoded(model, texts)
    halve_cache(model)
    half, half_cache = decoded(model, texts)
    assert at_once.std() > 0.05
    torch.testing.assert_close(half, at_once, rtol=0, atol=1e-5)
    torch.testing.assert_close(half, whole, rtol=0, atol=1e-5)
    assert cache_bytes(half_cache) * 2 == cache_bytes(whole_cache)


def test_generation_is_the_same() -> None:
    model, prompt = model_of(), torch.arange(5)[None]
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    whole = model.generate(prompt, **options)
    halve_cache(model)
    assert model.generate(prompt, **options).tolist() == whole.tolist()


@pytest.mark.parametrize("changes", [{"rotation": False}, {"key_heads": 2}])
def test_keys_that_do_not_determine_values_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"layer 0 is not a rotation.*monarch"):
        halve_cache(model_of(**changes))


def test_rows_rounded_to_bf16_are_refused() -> None:
    with pytest.raises(UserError, match="in fp32"):
        halve_cache(model_of().bfloat16())


def test_other_classes_are_refused() -> None:
    with pytest.raises(UserError, match="Linear has learned positions, or convolutions"):
        halve_cache(torch.nn.Linear(1, 1))
