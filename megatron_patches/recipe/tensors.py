"""The inventory: every parameter and buffer of a model, for sizes, a policy and a training phase. No torch.

Parameter counts, memory, times, shape checks and the blocks of a checkpoint are sums and loops over these
tensors. A test compares them with the parameters and buffers of live engines.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from megatron_patches.bank.factors import block_sizes
from megatron_patches.recipe.adapters import AdapterSizes
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
        multiplied: every token is multiplied by the tensor; else looked up, added or mixed.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    cut: int | None
    parts: tuple[tuple[str, int], ...]
    groups: tuple[bool, ...] | None = None
    phase: int | None = 0
    decay: bool = True
    multiplied: bool = True

    @property
    def trains(self) -> bool:
        """Return True for a parameter, False for a buffer."""
        return self.phase is not None

    @property
    def elements(self) -> int:
        """Return the elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def multiplications(self) -> int:
        """Return the multiply-adds a token with the whole tensor in a forward pass."""
        return self.elements if self.multiplied else 0

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
    """Return every tensor of the model, in the order of its layers, in a phase of the unfreezing.

    MethodError: the policy names layers or heads that this shape lacks, or is impossible at its sizes.
    """
    return tuple(_tensors(shape, policy, phase))


def is_patched(policy: QKPolicy, frozen_groups: tuple[int, ...]) -> bool:
    """Return True if a layer has W_V apart from W_Q and W_K; else megatron-core's fused W_QKV.

    A layer that becomes trainable later keeps the class of its attention, and so the names of its weights.
    """
    if policy.synthesizer:
        return False
    other_rows = policy.shared or policy.trains_factors or not policy.has_rows
    adapted = policy.trainable and bool(policy.adapters)
    return bool(frozen_groups or policy.unfreeze or other_rows or adapted)


def adapter_sizes(shape: ModelShape, policy: QKPolicy) -> AdapterSizes:
    """Return the sizes that the weights of adapters depend on."""
    return policy.adapter_sizes(shape.hidden_size, shape.head_dim)


def _tensors(shape: ModelShape, policy: QKPolicy, phase: int) -> Iterator[Tensor]:
    d, ffn, vocabulary = (
        shape.hidden_size,
        shape.ffn_hidden_size,
        (shape.vocab_size, shape.hidden_size),
    )
    tied, positions = shape.tied_embeddings, (shape.sequence_length, d)
    yield _matrix("embedding.word_embeddings.weight", "embedding.word", vocabulary, multiplied=tied)
    if shape.learned_positions:
        name = "embedding.position_embeddings.weight"
        yield _matrix(name, "embedding.position", positions, cut=None, multiplied=False)
    frozen = policy.frozen_groups(shape.num_layers, shape.num_query_groups, phase)
    for layer, groups in enumerate(frozen):
        name, stream = f"decoder.layers.{layer}", f"layer.{layer}"
        projection = f"{name}.self_attention.linear_proj.weight"
        yield from _norm(f"{name}.input_layernorm", f"{stream}.norm1", d)
        yield _matrix(projection, f"{stream}.attention.proj", (d, shape.query_size), cut=1)
        yield from _attention(shape, policy, layer, groups)
        yield from _norm(f"{name}.pre_mlp_layernorm", f"{stream}.norm2", d)
        yield _matrix(f"{name}.mlp.linear_fc1.weight", f"{stream}.mlp.fc1", (ffn, d))
        yield _matrix(f"{name}.mlp.linear_fc2.weight", f"{stream}.mlp.fc2", (d, ffn), cut=1)
    yield from _norm("decoder.final_layernorm", "norm", d)
    if not tied:
        yield _matrix("output_layer.weight", "output", vocabulary)


def _matrix(
    name: str, stream: str, shape: tuple[int, int], cut: int | None = 0, multiplied: bool = True
) -> Tensor:
    """Return an ordinary matrix, cut into equal shares or whole on every rank."""
    return Tensor(name, shape, "ordinary", cut, ((stream, shape[cut or 0]),), multiplied=multiplied)


def _norm(name: str, stream: str, hidden_size: int) -> Iterator[Tensor]:
    for part in ("weight", "bias"):
        parts = ((f"{stream}.{part}", hidden_size),)
        yield Tensor(
            f"{name}.{part}", (hidden_size,), "norm", None, parts, decay=False, multiplied=False
        )


def _attention(
    shape: ModelShape, policy: QKPolicy, layer: int, frozen_groups: tuple[int, ...]
) -> Iterator[Tensor]:
    """Yield W_Q, W_K and W_V of a layer, or what stands in the place of W_Q and W_K."""
    name, stream = f"decoder.layers.{layer}.self_attention", f"layer.{layer}.attention"
    value = (shape.key_size, shape.hidden_size)
    if policy.synthesizer:
        yield _matrix(f"{name}.linear_v.weight", f"{stream}.value", value)
        yield from _scores(shape, policy, f"{name}.core_attention", stream)
    elif is_patched(policy, frozen_groups):
        yield _matrix(f"{name}.linear_qkv.value_weight", f"{stream}.value", value)
        yield from _query_key(shape, policy, layer, frozen_groups)
    else:
        rows = {"query": shape.query_size, "key": shape.key_size, "value": shape.key_size}
        kind: Kind = "penalised" if policy.penalty else "ordinary"
        parts = tuple((f"{stream}.{part}", count) for part, count in rows.items())
        yield Tensor(
            f"{name}.linear_qkv.weight", (sum(rows.values()), shape.hidden_size), kind, 0, parts
        )


def _scores(shape: ModelShape, policy: QKPolicy, name: str, stream: str) -> Iterator[Tensor]:
    """Yield the score matrices of a synthesizer's layer."""
    heads, length, phase = (
        shape.num_attention_heads,
        shape.sequence_length,
        0 if policy.trainable else None,
    )
    recipe = score_recipe(policy, seed=0, num_attention_heads=heads, sequence_length=length)
    assert recipe is not None
    for matrix, columns in recipe.matrices.items():
        whole, parts = (heads * length, columns), ((f"{stream}.{matrix}", heads * length),)
        yield Tensor(
            f"{name}.{matrix}",
            whole,
            "scores",
            0,
            parts,
            None,
            phase,
            policy.trainable,
            multiplied=False,
        )


def _query_key(
    shape: ModelShape, policy: QKPolicy, layer: int, frozen_groups: tuple[int, ...]
) -> Iterator[Tensor]:
    """Yield W_Q and W_K beside W_V: rows of heads that train, frozen rows or their factors, adapters."""
    name, stream = f"decoder.layers.{layer}.self_attention.linear_qkv", f"layer.{layer}.attention"
    d, head_dim = shape.hidden_size, shape.head_dim
    every, chosen = range(shape.num_query_groups), set(frozen_groups)
    frozen = tuple(group in chosen for group in every)
    heads = {"query": shape.queries_per_group, "key": 0 if policy.shared else 1}
    a, b = block_sizes(d, head_dim) if policy.structured else (1, d)

    def parts_of(groups: Mapping[str, int], rows: int) -> tuple[tuple[str, int], ...]:
        """Queries, then keys, of these numbers of groups: `rows` for each head."""
        counts = {role: groups[role] * heads[role] * rows for role in heads}
        return tuple((f"{stream}.{role}", count) for role, count in counts.items() if count)

    held = {role: sum(frozen) if role in policy.frozen_row_roles else 0 for role in heads}
    left = {role: len(every) - held[role] if policy.has_rows else 0 for role in heads}
    if parts := parts_of(left, head_dim):
        begins = phases_of_layers(policy.unfreeze, shape.num_layers)[layer] or 0
        groups = tuple(not one or policy.frozen_roles != "both" for one in frozen)
        if policy.trains_factors:
            parts = parts_of(left, head_dim // a)
            rows = sum(count for _, count in parts)
            yield Tensor(
                f"{name}.trained_right_query_key",
                (rows, a, b),
                "ordinary",
                0,
                parts,
                groups,
                begins,
            )
            yield Tensor(
                f"{name}.trained_left_query_key", (rows, a, a), "ordinary", 0, parts, groups, begins
            )
        else:
            whole = (sum(count for _, count in parts), d)
            yield Tensor(f"{name}.trained_query_key", whole, "ordinary", 0, parts, groups, begins)
    if parts := parts_of(held, head_dim // a):
        rows = sum(count for _, count in parts)
        stored = {"right": ((a, rows, b), 1), "left": ((rows, a, a), 0)}
        for what, (size, cut) in (
            stored.items() if policy.structured else [("weight", ((rows, d), 0))]
        ):
            yield Tensor(
                f"{name}.query_key_{what}", size, "frozen", cut, parts, frozen, None, False
            )
    adapted = policy.adapted_groups(frozen_groups, len(every))
    if adapted:
        yield from _adapters(
            shape, policy, name, stream, tuple(group in adapted for group in every)
        )


def _adapters(
    shape: ModelShape, policy: QKPolicy, name: str, stream: str, adapted: tuple[bool, ...]
) -> Iterator[Tensor]:
    """Yield the tensors of the adapters, for the groups of key heads that they correct."""
    groups = sum(adapted)
    heads = {"query": groups * shape.queries_per_group, "key": groups, "value": groups}
    for adapter in policy.corrections:
        for weight in adapter.weights(adapter_sizes(shape, policy)):
            if weight.role is None:
                own, rows, cut, owners = f"{name}.{weight.name}", weight.shape[0], None, None
                part = f"{stream}.{adapter.name}"
            else:
                own, rows = f"{name}.adapters.{weight.name}", heads[weight.role] * weight.shape[0]
                cut, owners, part = 0, adapted, f"{stream}.{weight.name}"
            whole, multiplied = (rows, *weight.shape[1:]), len(weight.shape) > 1
            yield Tensor(
                own, whole, "adapter", cut, ((part, rows),), owners, 0, weight.decay, multiplied
            )
