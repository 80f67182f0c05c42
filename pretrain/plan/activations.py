"""Activations that autograd keeps between forward and backward on one rank, tensor by tensor.

Each entry is a storage that a saved-tensor hook sees once; weights are not among them. A test holds
the sum to what hooks measure on the CPU. On CUDA two things differ: attention with dropout stays in
a fused kernel, which keeps no probabilities, and a dropout mask is a byte an element.

Queries, keys and values are followed from the projection through the adapters, which declare what
they keep (`megatron_patches.recipe.adapters`), to the kernel.
"""

from __future__ import annotations

from collections import Counter

from megatron_patches.recipe.adapters import HeadTrace
from megatron_patches.recipe.block import MLPS, NORMS, Projection
from megatron_patches.recipe.parts import Storage, Trace
from megatron_patches.recipe.tensors import QueryKeyNorm, adapter_sizes
from pretrain.plan.workload import FP32, LayerHeads, Workload

INT64 = 8


def activation_bytes(work: Workload, rank: int) -> int:
    """Return the bytes kept by embedding, layers and last norm of a rank; no logits.

    Args:
        work: of the rank.
        rank: of tensor parallelism.
    """
    alike: Counter[LayerHeads | None] = Counter(
        work.layer_heads(rank) or [None] * work.shape.num_layers
    )
    return sum(_around_the_layers(work).values()) + sum(
        count * sum(_layer(work, heads).values()) for heads, count in alike.items()
    )


def recomputed_bytes(work: Workload, rank: int) -> int:
    """Return the bytes that backward makes again of one layer, of the layer where that is most.

    Args:
        work: of the rank.
        rank: of tensor parallelism.
    """
    layers = work.layer_heads(rank)
    recompute = work.performance.recompute
    if recompute == "none":
        return 0
    if recompute == "query_key":
        return max((_remade_queries_and_keys(work, heads) for heads in layers), default=0)
    mlp = sum(_mlp(work).values()) if recompute == "full" else 0
    return mlp + max(sum(_attention(work, heads).values()) for heads in layers or (None,))


def _around_the_layers(work: Workload) -> dict[str, int]:
    """Return {storage: bytes} of embedding and last norm."""
    trace = _trace(work, "last hidden states")
    NORMS[work.shape.norm].keep(trace, work.shape)
    trace.save(trace.hidden)  # the input of the output layer
    return trace.saved | {
        "token and position ids": (work.tokens + work.shape.sequence_length) * INT64,
        "embedding's dropout mask": _residual_mask(work),
    }


def _layer(work: Workload, heads: LayerHeads | None) -> dict[str, int]:
    """Return {storage: bytes} of one layer until its backward pass.

    Of a part that is recomputed only the input is kept (`performance.recompute`).
    """
    if work.performance.recompute == "full":
        return _input(work)
    if work.performance.recompute == "attention":
        return _input(work) | _mlp(work)
    return _attention(work, heads) | _mlp(work)


def _attention(work: Workload, heads: LayerHeads | None) -> dict[str, int]:
    trace = _trace(work, "residual stream before the attention")
    NORMS[work.shape.norm].keep(trace, work.shape)
    trace.save(trace.hidden)  # the input of the products with W_Q, W_K and W_V
    Projection(work.policy.freezes_output).keep(trace, work.shape)
    trace.save(Storage("dropout mask behind the attention", _residual_mask(work)))
    return trace.saved | (_synthesized(work) if heads is None else _query_key_value(work, heads))


def _mlp(work: Workload) -> dict[str, int]:
    trace = _trace(work, "residual stream before the MLP")
    NORMS[work.shape.norm].keep(trace, work.shape)
    MLPS[work.shape.mlp].keep(trace, work.shape)
    trace.save(Storage("dropout mask behind the MLP", _residual_mask(work)))
    return trace.saved


def inside_mlp(work: Workload) -> int:
    """Return the bytes that an MLP keeps beside its input."""
    trace = _trace(work, "input")
    MLPS[work.shape.mlp].keep(trace, work.shape)
    return sum(trace.saved.values()) - trace.saved.get("input", 0)


def _trace(work: Workload, name: str) -> Trace:
    """Return a trace of hidden states that begins at the residual stream."""
    return Trace(
        tokens=work.tokens,
        element=work.layout.element,
        between=work.between,
        statistic=FP32 if work.on_cuda else work.layout.element,
        size=work.layout.tensor_parallel_size,
        hidden=Storage(name, work.between * work.shape.hidden_size * work.layout.element),
    )


def _input(work: Workload) -> dict[str, int]:
    """Return what is kept of a part that is recomputed."""
    trace = _trace(work, "input of what is recomputed")
    trace.save(trace.hidden)
    return trace.saved


def _residual_mask(work: Workload) -> int:
    return work.between * work.shape.hidden_size * work.mask if work.dropout else 0


def _head(work: Workload) -> int:
    """Return the bytes of one head's queries, keys or values over a micro batch."""
    return work.tokens * work.shape.head_dim * work.layout.element


def _query_key_value(work: Workload, heads: LayerHeads) -> dict[str, int]:
    """Return {storage: bytes} between the attention's norm and its output."""
    head = _head(work)
    groups = heads.adapted
    every = (Storage("queries", work.heads * head), Storage("keys", work.groups * head))
    query, key, value = _projected(work, heads)
    trace = HeadTrace(
        **vars(_trace(work, "input of the attention")),
        queries=groups * work.shape.queries_per_group * head,
        keys=groups * head,
        query=query,
        key=key,
        value=value,
    )
    if heads.mixed and groups == work.groups:  # put together in the heads' order: copies
        trace.query, trace.key = every
    for adapter in work.policy.corrections if groups else ():
        adapter.keep(trace, adapter_sizes(work.shape, work.policy))
    if heads.mixed and groups < work.groups:
        trace.query, trace.key = every
    if not heads.patched and work.heads != work.groups:  # queries of a group are no regular view
        trace.query = every[0]
    if work.shape.qk_norm:
        QueryKeyNorm().keep(trace, work.shape)
    if not work.shape.learned_positions:
        trace.query = Storage("rotated queries", work.heads * head)
        trace.key = Storage("rotated keys", work.groups * head)
    _attend(work, trace, trace.value, bool(_remade_queries_and_keys(work, heads)))
    if work.policy.penalty:
        rows = (work.heads + work.groups) * work.shape.head_dim
        trace.save(Storage("deviation from orthonormal rows", rows * work.shape.head_dim * FP32))
    return trace.saved


def _projected(work: Workload, heads: LayerHeads) -> tuple[Storage, Storage, Storage]:
    """Return where queries, keys and values are once the products of a layer's input are made."""
    head = _head(work)
    if not heads.patched:
        fused = Storage("queries, keys, values", (work.heads + 2 * work.groups) * head)
        return fused, fused, fused
    frozen = Storage("products with frozen rows", heads.frozen * head)
    trained = Storage("products with trained rows", heads.trained * head)
    value = Storage("values", work.groups * head)
    if heads.frozen and heads.trained and not heads.mixed:  # a role each
        if work.policy.frozen_roles == "query":
            return frozen, trained, value
        return trained, frozen, value
    either = frozen if heads.frozen else trained
    return either, either, value


def _remade_queries_and_keys(work: Workload, heads: LayerHeads) -> int:
    """Return the bytes of a layer's queries and keys that are made again in backward."""
    kernel_keeps_them = work.on_cuda or not work.dropout
    only_frozen = heads.frozen > 0 and not heads.trained
    alone = work.performance.recompute == "query_key" and not work.masked
    if not (alone and only_frozen and kernel_keeps_them):
        return 0
    return (work.heads + work.groups) * _head(work)


def _attend(work: Workload, trace: HeadTrace, values: Storage, remade: bool) -> None:
    """Save what the kernel keeps beside its output."""
    every = work.heads * _head(work)
    square = work.batch * work.shape.sequence_length**2
    if work.masked:
        trace.save(Storage("mask", square * work.layout.element))
        if work.heads != work.groups:
            trace.key = Storage("repeated keys", every)
            values = Storage("repeated values", every)
    if work.on_cuda or not work.dropout:
        trace.save(values)
        if not remade:
            trace.save(trace.query, trace.key)
        trace.save(Storage("log-sum-exp", work.tokens * work.heads * FP32))
        return
    # The CPU has no fused kernel with dropout: the probabilities before and after it, its mask, and
    # scaled copies of the operands, all in fp32.
    in_fp32 = every * FP32 // work.layout.element
    trace.save(Storage("scaled queries and keys in fp32", 2 * in_fp32))
    trace.save(values if work.layout.element == FP32 else Storage("values in fp32", in_fp32))
    trace.save(Storage("probabilities", 3 * work.heads * square * FP32))


def _synthesized(work: Workload) -> dict[str, int]:
    """Return {storage: bytes} of attention whose probabilities belong to the heads.

    They are the same for every sample, unless a mask or dropout makes them differ.
    """
    policy, element, length = work.policy, work.layout.element, work.shape.sequence_length
    square = work.heads * length**2
    scores = square * (work.batch if work.masked else 1)
    applied = square * (work.batch if work.masked or work.dropout else 1)
    # In fp32 without dropout what softmax gives is what is applied.
    shared = policy.trainable and element == FP32 and not work.dropout
    kept = {"probabilities, as applied": 0 if shared else applied * element}
    if not policy.trainable:
        return kept
    kept["probabilities in fp32"] = scores * FP32
    kept["mask of what may be seen"] = length**2 * (work.batch if work.masked else 1)
    kept["values"] = work.groups * _head(work)
    kept["dropout mask of the probabilities"] = applied * work.mask if work.dropout else 0
    if policy.score_rank is not None and element < FP32:
        kept["factors in fp32"] = 2 * work.heads * length * policy.score_rank * FP32
    return kept
