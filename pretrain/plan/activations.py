"""What autograd keeps between forward and backward on one rank, tensor by tensor.

Each entry is a storage that a saved-tensor hook sees once; weights are not among them. A test holds the sum
to what hooks measure on the CPU. On CUDA two things differ: attention with dropout stays in a fused kernel,
which keeps no probabilities, and a dropout mask is a byte an element.

Symbols as in `config.counting`; T = batch × sequence_length tokens of a micro batch, of which a rank keeps
T / tensor-parallel size between its products under sequence parallelism.
"""

from __future__ import annotations

from collections import Counter

from pretrain.config.tree import Config
from pretrain.plan.queries import attention_activations, queries_and_keys
from pretrain.plan.sizes import Sizes
from pretrain.plan.states import FP32
from pretrain.plan.tensors import LayerHeads

INT64 = 8


def logits_kept(config: Config, sizes: Sizes) -> int:
    """Bytes that cross entropy keeps: what logits have become, with the labels it looked up."""
    element = {"megatron": FP32, "in_place": sizes.element, "chunked": 0}[config.performance.cross_entropy]
    return sizes.tokens * (sizes.vocabulary * element + INT64 + 1)


def activation_bytes(config: Config, sizes: Sizes, layers: tuple[LayerHeads, ...]) -> int:
    """Bytes kept by embedding, layers and last norm; without the logits."""
    alike: Counter[LayerHeads | None] = Counter(layers or [None] * config.model.num_layers)
    return sum(around_the_layers(config, sizes).values()) + sum(
        count * sum(layer_activations(config, sizes, heads).values()) for heads, count in alike.items()
    )


def around_the_layers(config: Config, sizes: Sizes) -> dict[str, int]:
    """{what: bytes} of embedding and last norm."""
    residual = sizes.between * sizes.hidden
    return {
        "token and position ids": (sizes.tokens + sizes.length) * INT64,
        "embedding's dropout mask": residual * sizes.mask if config.model.dropout else 0,
        "last norm": 2 * residual * sizes.element + _norm_statistics(sizes),
    }


def layer_activations(config: Config, sizes: Sizes, heads: LayerHeads | None) -> dict[str, int]:
    """{what: bytes} of one layer until its backward pass; `heads` is None for a synthesizer.

    Of a part that is recomputed only the input is kept (`performance.recompute`).
    """
    recompute = config.performance.recompute
    if recompute == "full":
        return {"input of the layer": sizes.between * sizes.hidden * sizes.element}
    if recompute == "attention":
        attention = {"input of the attention": sizes.between * sizes.hidden * sizes.element}
    else:
        attention = _attention_part(config, sizes, heads)
    return attention | _mlp_part(config, sizes)


def recomputed_bytes(config: Config, sizes: Sizes, layers: tuple[LayerHeads, ...]) -> int:
    """What the backward pass of one layer makes again, of the layer where that is most."""
    if config.performance.recompute == "none":
        return 0
    if config.performance.recompute == "query_key":
        return max((queries_and_keys(config, sizes, heads) for heads in layers), default=0)
    mlp = sum(_mlp_part(config, sizes).values()) if config.performance.recompute == "full" else 0
    return mlp + max(sum(_attention_part(config, sizes, heads).values()) for heads in layers or (None,))


def _attention_part(config: Config, sizes: Sizes, heads: LayerHeads | None) -> dict[str, int]:
    residual = sizes.between * sizes.hidden
    kept = {
        "residual stream, before the attention's norm": residual * sizes.element,
        "normalised, before the attention": residual * sizes.element,
        "statistics of the attention's norm": _norm_statistics(sizes),
        "context": sizes.tokens * sizes.heads * sizes.head_dim * sizes.element,
        "dropout mask behind the attention": residual * sizes.mask if config.model.dropout else 0,
    }
    if heads is None:
        return kept | _synthesized(config, sizes)
    return kept | attention_activations(config, sizes, heads)


def _mlp_part(config: Config, sizes: Sizes) -> dict[str, int]:
    residual = sizes.between * sizes.hidden
    return {
        "residual stream, before the MLP's norm": residual * sizes.element,
        "normalised, before the MLP": residual * sizes.element,
        "statistics of the MLP's norm": _norm_statistics(sizes),
        "inner width of the MLP, before and after GELU": 2 * sizes.tokens * sizes.ffn * sizes.element,
        "dropout mask behind the MLP": residual * sizes.mask if config.model.dropout else 0,
    }


def _norm_statistics(sizes: Sizes) -> int:
    return 2 * sizes.between * (FP32 if sizes.on_cuda else sizes.element)


def _synthesized(config: Config, sizes: Sizes) -> dict[str, int]:
    """Of attention whose probabilities belong to the heads: the same for every sample, unless a mask or
    dropout makes them differ.
    """
    policy, masked, dropout = config.policy(), config.data.reset_at_document_end, config.model.dropout > 0
    square = sizes.heads * sizes.length**2
    scores = square * (sizes.batch if masked else 1)
    applied = square * (sizes.batch if masked or dropout else 1)
    # In fp32 without dropout what softmax gives is what is applied.
    shared = policy.trainable and sizes.element == FP32 and not dropout
    kept = {"probabilities, as applied": 0 if shared else applied * sizes.element}
    if not policy.trainable:
        return kept
    kept["probabilities in fp32"] = scores * FP32
    kept["mask of what may be seen"] = sizes.length**2 * (sizes.batch if masked else 1)
    kept["values"] = sizes.tokens * sizes.groups * sizes.head_dim * sizes.element
    kept["dropout mask of the probabilities"] = applied * sizes.mask if dropout else 0
    if policy.score_rank is not None and sizes.element < FP32:
        kept["factors in fp32"] = 2 * sizes.heads * sizes.length * policy.score_rank * FP32
    return kept
