"""Effective Query/Key matrices and attention distributions of each head, on one process.

Both are measured on the live model instead of read from its parameters, so they hold for every
variant and adapter: W_Q is the layer's response to the unit vectors, and the attention distribution
is the output of the core attention with the unit vectors as values.

Version-sensitive: calls methods of megatron-core's attention modules one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.attention import SelfAttention

from megatron_patches.attention.projections import FrozenQueryKeySelfAttention
from megatron_patches.attention.scores import CausalDotProductAttention
from megatron_patches.engine.documents import Documents


@dataclass(frozen=True)
class HeadWeights:
    """Effective projections of one layer, float64 on the CPU, before any rotary embedding.

    Attributes:
        query: `[num_attention_heads, head_dim, hidden_size]`.
        key: `[num_query_groups, head_dim, hidden_size]`.
    """

    query: torch.Tensor
    key: torch.Tensor


def has_queries_and_keys(attention: torch.nn.Module) -> bool:
    """Return whether scores come from queries and keys; those of a synthesizer do not."""
    return hasattr(attention, "get_query_key_value_tensors")


def head_weights(attention: SelfAttention) -> HeadWeights | None:
    """Return the matrices W with q = W x + b and k = W x + b, head by head.

    Args:
        attention: a layer's attention module.

    Returns:
        The matrices; None where there are none, because scores are not made from queries and keys
        (a synthesizer) or these are not linear in a token's x (a norm of q and k, convolved keys).
    """
    if not has_queries_and_keys(attention):
        return None
    weight = next(attention.parameters())
    unit = torch.eye(attention.config.hidden_size, dtype=weight.dtype, device=weight.device)
    # The sum of the unit vectors with random signs: a linear layer maps it to the same sum of their
    # images.
    signs = torch.randint(0, 2, (1, len(unit)), generator=torch.Generator().manual_seed(0)) * 2 - 1
    origin = torch.zeros_like(unit[:1])  # its image is the bias
    probes = torch.cat([origin, unit, signs.to(unit)])[:, None]  # [hidden + 2, batch 1, hidden]
    if isinstance(attention, FrozenQueryKeySelfAttention):
        attention.linear_qkv.look_back_within(None)  # not within the documents of an earlier text
    with torch.no_grad():
        query, key = attention.get_query_key_value_tensors(probes)[:2]
    mapped = (part[:, 0].double().cpu() for part in (query, key))  # [hidden + 2, heads, head_dim]
    images = [part[1:] - part[0] for part in mapped]
    if not all(_is_linear(part, signs[0].double()) for part in images):
        return None
    return HeadWeights(*(part[:-1].permute(1, 2, 0).contiguous() for part in images))


def _is_linear(images: torch.Tensor, signs: torch.Tensor) -> bool:
    """Return whether the last image is the signed sum of the others, up to rounding."""
    mixture = torch.einsum("nhd,n->hd", images[:-1], signs)
    return bool((mixture - images[-1]).norm() <= 0.1 * images[:-1].norm())


Observe = Callable[[int, torch.Tensor, torch.Tensor | None], None]
"""(layer from 0, probabilities, scores before the softmax).

Both are `[batch, heads, query, key]`, float32.
The probability of a key that a query must not see is 0. Scores are None for a synthesizer, which
has no queries and keys.
"""


@contextmanager
def attention_observed(model: GPTModel, observe: Observe) -> Iterator[None]:
    """Pass each layer's distributions and scores to `observe` in every forward pass inside.

    The core attention runs once more on the same queries and keys with the unit vectors as values:
    row t of its output is then the distribution of query t. The forward pass itself does not
    change.

    Args:
        model: megatron-core's model with layers of this package.
        observe: called once for each layer and forward pass.
    """
    handles = []
    for layer in model.decoder.layers:
        core = layer.self_attention.core_attention
        hook = _hook(layer.layer_number - 1, observe)
        handles.append(core.register_forward_pre_hook(hook, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hook(layer: int, observe: Observe) -> Callable[..., None]:
    def hook(core: torch.nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        # Core attentions differ in their arguments (a synthesizer's has no query and key); all have
        # a value.
        arguments = signature(core.forward).bind(*inputs, **keywords).arguments
        length, batch, groups, _ = arguments["value"].shape
        unit = torch.eye(length, device=arguments["value"].device)[:, None, None]
        arguments["value"] = unit.expand(-1, batch, groups, -1)
        if isinstance(arguments["attention_mask"], Documents):
            arguments["attention_mask"] = arguments["attention_mask"].mask()
        # Scores are observed in fp32, whatever the type in which the layer computes.
        for name in {"query", "key"} & arguments.keys():
            arguments[name] = arguments[name].float()
        context = core.forward(**arguments)  # not core(...), which would come here again
        observe(
            layer, context.unflatten(-1, (-1, length)).permute(1, 2, 0, 3), _scores(core, arguments)
        )

    return hook


def _scores(core: torch.nn.Module, arguments: Mapping[str, Any]) -> torch.Tensor | None:
    if not isinstance(core, CausalDotProductAttention):
        return None
    query, key = core.rotated(arguments["query"], arguments["key"])
    key = key.repeat_interleave(query.size(2) // key.size(2), dim=2)
    return torch.einsum("qbhd,kbhd->bhqk", query, key) * core.scale
