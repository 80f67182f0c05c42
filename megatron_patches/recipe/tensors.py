"""The inventory: every parameter and buffer of a model for sizes, a policy and a phase.

This needs no torch.

The parts of the model (`parts`, `adapters`, and queries, keys and values here) declare it, in their
order. Initial values, parameter groups, counts, memory, times, shape checks and the blocks
of a checkpoint are sums and loops over it. A test compares it with the parameters and buffers of
live engines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from typing_extensions import override

from megatron_patches.bank.factors import block_sizes
from megatron_patches.recipe.adapters import Corrections
from megatron_patches.recipe.block import (
    MLPS,
    NORMS,
    Embeddings,
    Output,
    Projection,
    matrix,
    norm_vector,
)
from megatron_patches.recipe.parts import Kind, ModelShape, Part, Place, Start, Tensor
from megatron_patches.recipe.policy import QKPolicy
from megatron_patches.recipe.recipes import score_recipe

LOGITS_AT_A_TIME = 2**23
"""Logits that are in fp32 at a time: 32 MiB, which stay in the L2 cache of an A100 or H100."""


def tensors(shape: ModelShape, policy: QKPolicy, phase: int = 0) -> tuple[Tensor, ...]:
    """Return every tensor of the model, in the order of its layers, in a training phase.

    Args:
        phase: number of the phase in the policy's schedule, from 0.

    Returns:
        Parameters and buffers.

    Raises:
        MethodError: the policy names layers or heads that this shape lacks, or is impossible at its
            sizes.
    """
    return tuple(
        tensor
        for part, at in parts_of_model(shape, policy, phase)
        for tensor in part.tensors(at, shape)
    )


def parts_of_model(
    shape: ModelShape, policy: QKPolicy, phase: int = 0
) -> Iterator[tuple[Part, Place]]:
    """Yield every part of the model and its place, from the embeddings to the output layer.

    Args:
        phase: number of the phase in the policy's schedule, from 0.

    Yields:
        (part, its place). Raises MethodError as `tensors`.
    """
    norm, mlp = NORMS[shape.norm], MLPS[shape.mlp]
    yield Embeddings(), Place("embedding", "embedding")
    frozen = policy.frozen_groups(shape.num_layers, shape.num_query_groups, phase)
    kept_from = policy.kept_from(shape.num_layers, shape.num_query_groups)
    # This order is the live model's; checkpoints, exports and `plan` list tensors in it.
    for layer, groups in enumerate(frozen):
        rows = QueryKeyValue(policy, groups, kept_from=kept_from[layer], phase=phase)
        name = f"decoder.layers.{layer}"
        stream = f"layer.{layer}"
        attention = f"{name}.self_attention"
        yield norm, Place(f"{name}.input_layernorm", f"{stream}.norm1", layer)
        yield rows, Place(attention, f"{stream}.attention", layer)
        if shape.qk_norm:
            yield QueryKeyNorm(), Place(attention, f"{stream}.attention", layer)
        yield (
            Projection(),
            Place(f"{attention}.linear_proj", f"{stream}.attention.proj", layer),
        )
        yield norm, Place(f"{name}.pre_mlp_layernorm", f"{stream}.norm2", layer)
        yield mlp, Place(f"{name}.mlp", f"{stream}.mlp", layer)
    yield norm, Place("decoder.final_layernorm", "norm")
    if not shape.tied_embeddings:
        yield Output(), Place("output_layer", "output")


def is_patched(policy: QKPolicy, frozen_groups: tuple[int, ...]) -> bool:
    """Return True if a layer has W_V apart from W_Q and W_K; else megatron-core's fused W_QKV.

    A layer of a run with several phases keeps the class of its attention, and so the names of its
    weights.

    Args:
        frozen_groups: numbers of the key heads that are frozen, with their query heads.
    """
    if policy.synthesizer:
        return False
    other_rows = policy.shared or policy.trains_factors or not policy.has_rows
    adapted = policy.trainable and bool(policy.adapters)
    return bool(frozen_groups or policy.phases or other_rows or adapted)


@dataclass(frozen=True)
class QueryKeyValue(Part):
    """W_Q, W_K and W_V of a layer, or what stands in the place of W_Q and W_K, with adapters.

    Args:
        frozen_groups: key heads of the layer that are frozen, with their query heads.
        kept_from: the phase from which trained rows are frozen as they are; None: never.
        phase: number of the phase in the policy's schedule, from 0.
    """

    policy: QKPolicy
    frozen_groups: tuple[int, ...]
    kept_from: int | None = None
    phase: int = 0

    @override
    def tensors(self, at: Place, shape: ModelShape) -> Iterator[Tensor]:
        """Yield W_V, and W_Q and W_K or score matrices; MethodError as `tensors`."""
        value = (shape.key_size, shape.hidden_size)
        if self.policy.synthesizer:
            yield matrix(f"{at.module}.linear_v.weight", f"{at.stream}.value", value, at.layer)
            yield from self._scores(at, shape)
        elif is_patched(self.policy, self.frozen_groups):
            name = f"{at.module}.linear_qkv.value_weight"
            yield matrix(name, f"{at.stream}.value", value, at.layer)
            yield from self._query_key(at, shape)
        else:
            yield self._fused(at, shape)

    def _fused(self, at: Place, shape: ModelShape) -> Tensor:
        """Return megatron-core's weight of all three, [q … q k v] of each key head."""
        rows = {"query": shape.query_size, "key": shape.key_size, "value": shape.key_size}
        kind: Kind = "penalised" if self.policy.penalty else "ordinary"
        return Tensor(
            f"{at.module}.linear_qkv.weight",
            (sum(rows.values()), shape.hidden_size),
            kind,
            cut=0,
            parts=tuple((f"{at.stream}.{part}", count) for part, count in rows.items()),
            start="bank" if self._starts_from_bank else "normal",
            repeats=shape.num_query_groups,
            head_rows=shape.head_dim,
            layer=at.layer,
        )

    @property
    def _starts_from_bank(self) -> bool:
        """Return whether all rows train, and start from a bank."""
        return self.policy.trainable and self.policy.init not in ("default", "low_rank")

    def _scores(self, at: Place, shape: ModelShape) -> Iterator[Tensor]:
        """Yield the score matrices of a synthesizer's layer."""
        heads, length = shape.num_attention_heads, shape.sequence_length
        trainable = self.policy.trainable
        # Shapes do not depend on the seed.
        recipe = score_recipe(
            self.policy, seed=0, num_attention_heads=heads, sequence_length=length
        )
        assert recipe is not None
        for name, columns in recipe.matrices.items():
            yield Tensor(
                f"{at.module}.core_attention.{name}",
                (heads * length, columns),
                "scores",
                cut=0,
                parts=((f"{at.stream}.{name}", heads * length),),
                phase=0 if trainable else None,
                decay=trainable,
                multiplied=False,
                start="own",
                layer=at.layer,
            )

    def _query_key(self, at: Place, shape: ModelShape) -> Iterator[Tensor]:
        """Yield learned rows, then frozen rows, or the factors of both, then adapters."""
        policy = self.policy
        name = f"{at.module}.linear_qkv"
        all_groups = range(shape.num_query_groups)
        chosen = set(self.frozen_groups)
        frozen = tuple(group in chosen for group in all_groups)
        # Shared rows are stored once, under the query's name.
        roles = ("query",) if policy.shared else ("query", "key")
        frozen_counts = {
            role: sum(frozen) if role in policy.frozen_row_roles else 0 for role in roles
        }
        trained_counts = {
            role: len(all_groups) - frozen_counts[role] if policy.has_rows else 0 for role in roles
        }
        # Where one role is frozen the other role's rows train in every group.
        trained = tuple(not is_frozen or policy.freezes_one_role for is_frozen in frozen)
        yield from self._trained(at, shape, trained_counts, groups=trained)
        yield from self._frozen(at, shape, frozen_counts, frozen)
        adapted = policy.adapted_groups(self.frozen_groups, len(all_groups))
        if adapted:
            with_adapters = tuple(group in adapted for group in all_groups)
            sizes = policy.adapter_sizes(shape.hidden_size, shape.head_dim)
            corrections = Corrections(policy.corrections, sizes, with_adapters)
            yield from corrections.tensors(Place(name, at.stream, at.layer), shape)

    def _role_parts(
        self, at: Place, shape: ModelShape, groups: Mapping[str, int], rows: int
    ) -> tuple[tuple[str, int], ...]:
        """Return the parts of queries, then keys: `rows` for each head of so many groups."""
        heads = {"query": shape.queries_per_group, "key": 1}
        counts = {role: number * heads[role] * rows for role, number in groups.items()}
        return tuple((f"{at.stream}.{role}", count) for role, count in counts.items() if count)

    def _trained(
        self,
        at: Place,
        shape: ModelShape,
        counts: Mapping[str, int],
        *,
        groups: tuple[bool, ...],
    ) -> Iterator[Tensor]:
        """Yield rows that train or have been trained, or the factors in their place.

        Args:
            counts: {role: number of key heads with such rows}.
            groups: for each key head whether it has such rows, or its query heads.
        """
        head_dim = shape.head_dim
        begins = self.policy.trained_from(shape.num_layers, shape.num_query_groups)[at.layer or 0]
        until = self.kept_from
        # Kept rows are stored like trained ones, but get no gradient, state or decay.
        kept = until is not None and until <= self.phase
        factors = self.policy.trains_factors
        # Rows count as blocks of a = 1 row and b = hidden columns.
        a, b = block_sizes(shape.hidden_size, head_dim) if factors else (1, shape.hidden_size)
        parts = self._role_parts(at, shape, counts, head_dim // a)
        rows = sum(count for _, count in parts)
        from_bank = begins is not None or self._starts_from_bank
        weights: dict[str, tuple[tuple[int, ...], Start]] = {
            "trained_query_key": ((rows, b), "bank" if from_bank else "normal")
        }
        if factors:
            weights = {
                "trained_right_query_key": ((rows, a, b), "right_factor"),
                "trained_left_query_key": ((rows, a, a), "left_factor"),
            }
        for weight_name, (size, start) in weights.items() if rows else ():
            yield Tensor(
                f"{at.module}.linear_qkv.{weight_name}",
                size,
                "kept" if kept else "ordinary",
                cut=0,
                parts=parts,
                groups=groups,
                phase=None if kept else begins or 0,
                decay=not kept,
                start="own" if kept else start,
                head_rows=None if factors else head_dim,
                layer=at.layer,
                until=until,
            )

    def _frozen(
        self, at: Place, shape: ModelShape, counts: Mapping[str, int], groups: tuple[bool, ...]
    ) -> Iterator[Tensor]:
        """Yield frozen rows, or their factors."""
        structured, hidden = self.policy.structured, shape.hidden_size
        a, b = block_sizes(hidden, shape.head_dim) if structured else (1, hidden)
        parts = self._role_parts(at, shape, counts, shape.head_dim // a)
        rows = sum(count for _, count in parts)
        stored: dict[str, tuple[tuple[int, ...], int]] = {"weight": ((rows, b), 0)}
        if structured:
            stored = {"right": ((a, rows, b), 1), "left": ((rows, a, a), 0)}
        for suffix, (size, cut) in stored.items() if rows else ():
            yield Tensor(
                f"{at.module}.linear_qkv.query_key_{suffix}",
                size,
                "frozen",
                cut=cut,
                parts=parts,
                groups=groups,
                phase=None,
                decay=False,
                start="own",
                layer=at.layer,
            )


class QueryKeyNorm(Part):
    """q_h ← g_q ∘ q_h / rms(q_h), k alike, computed in fp32: gains that all heads of a layer share.

    Applied to queries and keys last, before positions rotate them.
    """

    name = "qk_norm"

    @override
    def tensors(self, at: Place, shape: ModelShape) -> Iterator[Tensor]:
        """Yield the gains of queries and of keys, whose gradients on a rank cover its heads."""
        for role, module in {"query": "q_layernorm", "key": "k_layernorm"}.items():
            norm_at = Place(f"{at.module}.{module}", f"{at.stream}.{role}_norm", at.layer)
            yield replace(norm_vector(norm_at, "weight", shape.head_dim, "ones"), partial="heads")
