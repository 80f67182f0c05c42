"""The inventory: every parameter and buffer of a model, for sizes, a policy and a training phase. No torch.

Parameter counts, memory, times, shape checks and the blocks of a checkpoint are sums and loops over these
tensors. A test compares them with the parameters and buffers of live engines.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from megatron_patches.bank.factors import block_sizes
from megatron_patches.recipe.adapters import AdapterSizes, in_order
from megatron_patches.recipe.phases import phases_of_layers
from megatron_patches.recipe.policy import QKPolicy
from megatron_patches.recipe.recipes import score_recipe

LOGITS_AT_A_TIME = 2**23
"""Logits that are in fp32 at a time: 32 MiB, which stay in the second-level cache of an A100 or an H100."""

Kind = Literal["ordinary", "norm", "frozen", "adapter", "penalised", "scores"]
"""Weights of the ordinary model; its LayerNorms; a frozen bank; adapters of frozen heads; W_QKV under the
orthogonality penalty; score matrices of a synthesizer, trained or frozen.
"""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model: all that its tensors depend on beside the policy."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    sequence_length: int
    learned_positions: bool
    tied_embeddings: bool

    @property
    def query_size(self) -> int:
        """Return H h: rows of W_Q, and the width that the attention output projection reads."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_size(self) -> int:
        """Return G h: rows of W_K, and of W_V."""
        return self.num_query_groups * self.head_dim

    @property
    def queries_per_group(self) -> int:
        """Return H / G: query heads that share a key head."""
        return self.num_attention_heads // self.num_query_groups


@dataclass(frozen=True)
class Tensor:
    """A parameter or buffer, all tensor-parallel ranks together.

    Attributes:
        name: of the parameter or buffer in the live model.
        shape: of the whole tensor.
        kind: see Kind.
        cut: the dimension that tensor parallelism cuts; None: every rank has the whole tensor.
        parts: (name of a weight, how much of it) along the dimension that is cut, the first without a cut. A
            rank has its share of every part, one behind the other. A weight's name is that of its random
            stream, and of its values in files of initial weights.
        groups: for each key head whether the tensor has rows of it, or of its query heads: ranks may have
            unequal shares. None: every rank has an equal share.
        phase: the training phase from which the tensor trains; None: a buffer.
        decay: weight decay applies.
        multiplications: multiply-adds a token with the whole tensor in a forward pass.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    cut: int | None
    parts: tuple[tuple[str, int], ...]
    groups: tuple[bool, ...] | None = None
    phase: int | None = 0
    decay: bool = True
    multiplications: int = 0

    @property
    def trains(self) -> bool:
        """Return True for a parameter, False for a buffer."""
        return self.phase is not None

    @property
    def elements(self) -> int:
        """Return the elements of the whole tensor."""
        return math.prod(self.shape)

    def share(self, length: int, rank: int, size: int) -> int:
        """Return the share that tensor-parallel `rank` of `size` has in a length along the cut dimension."""
        if self.cut is None:
            return length
        if self.groups is None:
            return length // size
        own = len(self.groups) // size
        return length * sum(self.groups[rank * own : (rank + 1) * own]) // sum(self.groups)

    def rank_shape(self, rank: int, size: int) -> tuple[int, ...]:
        """Return the shape of what tensor-parallel `rank` of `size` has."""
        if self.cut is None:
            return self.shape
        length = self.share(self.shape[self.cut], rank, size)
        return (*self.shape[: self.cut], length, *self.shape[self.cut + 1 :])

    def rank_elements(self, rank: int, size: int) -> int:
        """Return the elements of what tensor-parallel `rank` of `size` has."""
        return math.prod(self.rank_shape(rank, size))


def tensors(shape: ModelShape, policy: QKPolicy, phase: int = 0) -> tuple[Tensor, ...]:
    """Return every tensor of the model, in the order of its layers.

    Args:
        phase: of a run in which layers become trainable on the way (see `phases`).

    Raises:
        MethodError: the policy names layers or heads that this shape does not have, or is impossible at its
            sizes.
    """
    return tuple(_tensors(shape, policy, phase))


def weight_shapes(inventory: Iterable[Tensor]) -> dict[str, tuple[int, ...]]:
    """Return {name of a weight's random stream: its shape}, the parts of fused tensors apart."""
    shapes = {}
    for tensor in inventory:
        dim = tensor.cut or 0
        for weight, length in tensor.parts:
            shapes[weight] = (*tensor.shape[:dim], length, *tensor.shape[dim + 1 :])
    return shapes


def _tensors(shape: ModelShape, policy: QKPolicy, phase: int) -> Iterator[Tensor]:
    d, vocabulary = shape.hidden_size, (shape.vocab_size, shape.hidden_size)
    product = math.prod(vocabulary)
    embedding = product if shape.tied_embeddings else 0
    yield _cut("embedding.word_embeddings.weight", vocabulary, "embedding.word", multiplications=embedding)
    if shape.learned_positions:
        positions = (shape.sequence_length, d)
        parts = (("embedding.position", shape.sequence_length),)
        yield Tensor("embedding.position_embeddings.weight", positions, "ordinary", None, parts)
    frozen = policy.frozen_groups(shape.num_layers, shape.num_query_groups, phase)
    for layer, groups in enumerate(frozen):
        name, stream = f"decoder.layers.{layer}", f"layer.{layer}"
        yield from _norm(f"{name}.input_layernorm", f"{stream}.norm1", d)
        yield _cut(
            f"{name}.self_attention.linear_proj.weight", (d, shape.query_size), f"{stream}.attention.proj", 1
        )
        yield from _attention(shape, policy, layer, groups)
        yield from _norm(f"{name}.pre_mlp_layernorm", f"{stream}.norm2", d)
        yield _cut(f"{name}.mlp.linear_fc1.weight", (shape.ffn_hidden_size, d), f"{stream}.mlp.fc1")
        yield _cut(f"{name}.mlp.linear_fc2.weight", (d, shape.ffn_hidden_size), f"{stream}.mlp.fc2", 1)
    yield from _norm("decoder.final_layernorm", "norm", d)
    if not shape.tied_embeddings:
        yield _cut("output_layer.weight", vocabulary, "output")


def _attention(
    shape: ModelShape, policy: QKPolicy, layer: int, frozen_groups: tuple[int, ...]
) -> Iterator[Tensor]:
    """Yield W_Q, W_K and W_V of a layer, or what stands in the place of W_Q and W_K."""
    name, stream = f"decoder.layers.{layer}.self_attention", f"layer.{layer}.attention"
    value = (shape.key_size, shape.hidden_size)
    if policy.synthesizer:
        yield _cut(f"{name}.linear_v.weight", value, f"{stream}.value")
        yield from _scores(shape, policy, f"{name}.core_attention", stream)
    elif is_patched(policy, frozen_groups):
        yield _cut(f"{name}.linear_qkv.value_weight", value, f"{stream}.value")
        yield from _query_key(shape, policy, layer, frozen_groups)
    else:
        rows = (("query", shape.query_size), ("key", shape.key_size), ("value", shape.key_size))
        whole = (sum(count for _, count in rows), shape.hidden_size)
        yield Tensor(
            f"{name}.linear_qkv.weight",
            whole,
            "penalised" if policy.penalty else "ordinary",
            0,
            tuple((f"{stream}.{part}", count) for part, count in rows),
            multiplications=math.prod(whole),
        )


def is_patched(policy: QKPolicy, frozen_groups: tuple[int, ...]) -> bool:
    """Return True if a layer has W_V apart from W_Q and W_K; else megatron-core's fused W_QKV.

    A layer that becomes trainable later keeps the class of its attention, and so the names of its weights.
    """
    return bool(frozen_groups or policy.unfreeze)


def _query_key(
    shape: ModelShape, policy: QKPolicy, layer: int, frozen_groups: tuple[int, ...]
) -> Iterator[Tensor]:
    """Yield W_Q and W_K beside W_V: frozen rows or their factors, rows of heads that train, adapters."""
    name, stream = f"decoder.layers.{layer}.self_attention.linear_qkv", f"layer.{layer}.attention"
    d = shape.hidden_size
    frozen = tuple(group in frozen_groups for group in range(shape.num_query_groups))
    trained = tuple(not one for one in frozen)
    if any(trained):
        parts = _head_rows(shape, stream, trained, shape.head_dim)
        rows = sum(count for _, count in parts)
        begins = phases_of_layers(policy.unfreeze, shape.num_layers)[layer] or 0 if policy.unfreeze else 0
        yield Tensor(
            f"{name}.trained_query_key", (rows, d), "ordinary", 0, parts, trained, begins, True, rows * d
        )
    if not any(frozen):
        return
    parts = _head_rows(shape, stream, frozen, shape.head_dim)
    rows = sum(count for _, count in parts)
    if not policy.structured:
        yield Tensor(f"{name}.query_key_weight", (rows, d), "frozen", 0, parts, frozen, None, False, rows * d)
    else:
        a, b = block_sizes(d, shape.head_dim)
        blocks = _head_rows(shape, stream, frozen, shape.head_dim // a)
        for factor, whole, cut in (("right", (a, rows // a, b), 1), ("left", (rows // a, a, a), 0)):
            yield Tensor(
                f"{name}.query_key_{factor}",
                whole,
                "frozen",
                cut,
                blocks,
                frozen,
                None,
                False,
                math.prod(whole),
            )
    yield from _adapters(shape, policy, name, stream, frozen)


def _head_rows(
    shape: ModelShape, stream: str, groups: tuple[bool, ...], rows: int
) -> tuple[tuple[str, int], ...]:
    """Return the rows of the queries, then of the keys, of these groups: `rows` for each head."""
    keys = sum(groups) * rows
    return ((f"{stream}.query", keys * shape.queries_per_group), (f"{stream}.key", keys))


def _adapters(
    shape: ModelShape, policy: QKPolicy, name: str, stream: str, frozen: tuple[bool, ...]
) -> Iterator[Tensor]:
    keys = sum(frozen)
    heads = {"query": keys * shape.queries_per_group, "key": keys}
    for adapter in in_order(policy.adapters):
        for weight in adapter.weights(adapter_sizes(shape, policy)):
            count = 1 if weight.role is None else heads[weight.role]
            rows = count * weight.shape[0]
            yield Tensor(
                f"{name}.{weight.name}" if weight.role is None else f"{name}.adapters.{weight.name}",
                (rows, *weight.shape[1:]),
                "adapter",
                None if weight.role is None else 0,
                ((f"{stream}.{adapter.name if weight.role is None else weight.name}", rows),),
                None if weight.role is None else frozen,
                0,
                weight.decay,
                count * weight.multiplications,
            )


def adapter_sizes(shape: ModelShape, policy: QKPolicy) -> AdapterSizes:
    """Return the sizes that the weights of adapters depend on."""
    return AdapterSizes(shape.hidden_size, shape.head_dim, policy.low_rank)


def _scores(shape: ModelShape, policy: QKPolicy, name: str, stream: str) -> Iterator[Tensor]:
    """Yield the score matrices of a synthesizer's layer. They are not products with the tokens."""
    recipe = score_recipe(
        policy, seed=0, num_attention_heads=shape.num_attention_heads, sequence_length=shape.sequence_length
    )
    assert recipe is not None
    rows = shape.num_attention_heads * shape.sequence_length
    for matrix, columns in recipe.matrices.items():
        phase = 0 if policy.trainable else None
        parts = ((f"{stream}.{matrix}", rows),)
        yield Tensor(
            f"{name}.{matrix}", (rows, columns), "scores", 0, parts, phase=phase, decay=policy.trainable
        )


def _cut(
    name: str, shape: tuple[int, int], stream: str, cut: int = 0, multiplications: int | None = None
) -> Tensor:
    """Return an ordinary matrix, cut into equal shares."""
    count = math.prod(shape) if multiplications is None else multiplications
    return Tensor(name, shape, "ordinary", cut, ((stream, shape[cut]),), multiplications=count)


def _norm(name: str, stream: str, hidden_size: int) -> Iterator[Tensor]:
    for part in ("weight", "bias"):
        parts = ((f"{stream}.{part}", hidden_size),)
        yield Tensor(f"{name}.{part}", (hidden_size,), "norm", None, parts, decay=False)
