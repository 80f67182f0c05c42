"""What attention keeps of queries, keys and values: followed from the projection to the kernel.

Autograd keeps a storage as soon as one operation saves a view of it. So each step below either saves what it
reads or leaves it, and writes something new.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_patches.recipe.policy import QKPolicy
from pretrain.config.tree import Config
from pretrain.plan.sizes import Sizes
from pretrain.plan.states import FP32
from pretrain.plan.tensors import LayerHeads


@dataclass(frozen=True)
class Storage:
    """Memory behind one or several tensors."""

    name: str
    size: int


@dataclass
class _Trace:
    """Queries, keys and values on their way, and what has been saved so far.

    Attributes:
        head: bytes of one head over a micro batch.
    """

    head: int
    query: Storage
    key: Storage
    value: Storage
    saved: dict[str, int] = field(default_factory=dict)

    def save(self, *storages: Storage) -> None:
        self.saved |= {storage.name: storage.size for storage in storages}


def attention_activations(config: Config, sizes: Sizes, heads: LayerHeads) -> dict[str, int]:
    """{what: bytes} that a layer with queries and keys keeps, its output aside."""
    policy, head = config.policy(), sizes.tokens * sizes.head_dim * sizes.element
    if heads.patched:
        trace = _frozen_projection(policy, sizes, heads, head)
    else:
        fused = Storage("queries, keys, values", (sizes.heads + 2 * sizes.groups) * head)
        trace = _Trace(head, fused, fused, fused)
        if sizes.heads != sizes.groups:  # the queries of a group are no regular view
            trace.query = Storage("queries", sizes.heads * head)
    if config.model.position_embedding == "rope":
        trace.query = Storage("rotated queries", sizes.heads * head)
        trace.key = Storage("rotated keys", sizes.groups * head)
    _attend(config, sizes, trace, bool(queries_and_keys(config, sizes, heads)))
    if policy.penalty:
        rows = (sizes.heads + sizes.groups) * sizes.head_dim
        trace.save(Storage("deviation from orthonormal rows", rows * sizes.head_dim * FP32))
    return trace.saved


def queries_and_keys(config: Config, sizes: Sizes, heads: LayerHeads) -> int:
    """Bytes of the queries and keys of a layer that are made again in backward, and only they."""
    kernel_keeps_them = sizes.on_cuda or not config.model.dropout
    only_frozen = heads.frozen_queries > 0 and not heads.trained_queries
    alone = config.performance.recompute == "query_key" and not config.data.reset_at_document_end
    if not (alone and only_frozen and kernel_keeps_them):
        return 0
    return sizes.tokens * (sizes.heads + sizes.groups) * sizes.head_dim * sizes.element


def _frozen_projection(policy: QKPolicy, sizes: Sizes, heads: LayerHeads, head: int) -> _Trace:
    """The products with the frozen rows, corrected by the adapters, beside those that train."""
    product = Storage("products with frozen rows", (heads.frozen_queries + heads.frozen_keys) * head)
    value = Storage("values", sizes.groups * head)
    trace = _Trace(head, product, product, value)
    _adapt(policy, sizes, heads, trace)
    if heads.trained_queries:  # put together in the heads' order: copies
        trace.query = Storage("queries", sizes.heads * head)
        trace.key = Storage("keys", sizes.groups * head)
    return trace


def _adapt(policy: QKPolicy, sizes: Sizes, heads: LayerHeads, trace: _Trace) -> None:
    """In the order of `megatron_patches.attention.adapters`."""
    queries, keys = heads.frozen_queries * trace.head, heads.frozen_keys * trace.head
    if "low_rank" in policy.adapters:
        trace.save(Storage("low-rank products", sizes.tokens * 2 * policy.low_rank * sizes.element))
        trace.query, trace.key = Storage("queries + low rank", queries), Storage("keys + low rank", keys)
    if "core" in policy.adapters:
        trace.save(Storage("queries by head, before the core", queries))
        trace.query = Storage("queries after the core", queries)
    if "qk_norm" in policy.adapters:
        if sizes.element == FP32:
            trace.save(trace.query, trace.key)
        else:
            trace.save(Storage("queries and keys in fp32", (queries + keys) * FP32 // sizes.element))
        trace.save(Storage("normalised queries and keys", queries + keys))
        trace.query, trace.key = Storage("queries after the norm", queries), Storage("keys after it", keys)
    if "logit_scale" in policy.adapters:
        trace.save(trace.query)
        trace.query = Storage("scaled queries", queries)


def _attend(config: Config, sizes: Sizes, trace: _Trace, remade: bool) -> None:
    """What the kernel keeps beside its output."""
    every = sizes.heads * trace.head
    if config.data.reset_at_document_end:
        trace.save(Storage("mask", sizes.batch * sizes.length**2 * sizes.element))
        if sizes.heads != sizes.groups:
            trace.key, trace.value = Storage("repeated keys", every), Storage("repeated values", every)
    if sizes.on_cuda or not config.model.dropout:
        trace.save(trace.value)
        if not remade:
            trace.save(trace.query, trace.key)
        trace.save(Storage("log-sum-exp", sizes.batch * sizes.heads * sizes.length * FP32))
        return
    # The CPU has no fused kernel with dropout: the probabilities before and after it, its mask, and scaled
    # copies of the operands, all in fp32.
    in_fp32 = every * FP32 // sizes.element
    trace.save(Storage("scaled queries and keys in fp32", 2 * in_fp32))
    trace.save(trace.value if sizes.element == FP32 else Storage("values in fp32", in_fp32))
    trace.save(Storage("probabilities", 3 * sizes.batch * sizes.heads * sizes.length**2 * FP32))
