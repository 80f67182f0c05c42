"""Declarations of the adapters: small trainable corrections of queries, keys and values.

This needs no torch.

An adapter is declared here by a class with its weights, and computed by the function of the same
name in `megatron_patches.attention.adapters`. Parameter counts, memory, time, sharding, weight
decay and checkpoints follow from the declaration.

The sources: LoRA (Hu et al., 2021) for low_rank; smeared keys (Olsson et al., 2022) and KV shifting
(arXiv:2411.19574) for short_convolution.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from megatron_patches.bank.orthonormal import Role
from megatron_patches.recipe.parts import ModelShape, Part, Place, Start, Tensor

Array: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class AdapterSizes:
    """Sizes that the weights of adapters depend on, and the choices that some of them have.

    Attributes:
        rank: attention.low_rank.
        alone: low_rank makes queries and keys by itself, without a W.
        taps, convolved: attention.taps, attention.convolved.
    """

    hidden_size: int
    head_dim: int
    rank: int
    alone: bool = False
    taps: int = 4
    convolved: str = "both"


HeadRole = Role | Literal["value"]
"""Role of the heads that have a part of a tensor each; values have the heads of keys."""


@dataclass(frozen=True)
class AdapterWeight:
    """A trainable tensor of an adapter in one layer.

    Attributes:
        name: name of the live parameter.
        role: the role whose frozen heads have a part of the tensor each, sharded with the heads.
            None: the tensor is multiplied by the layer's input, shared by the heads and whole on
            every rank. An adapter has at most one such tensor, drawn from the random stream of the
            adapter's name.
        shape: shape of one head's part, rows first; without a role, of the whole tensor.
        start: initial values, the same for every head unless they are drawn.
    """

    name: str
    role: HeadRole | None
    shape: tuple[int, ...]
    start: Start

    @property
    def decay(self) -> bool:
        """Return True if weight decay applies: to matrices that start at zero or by chance."""
        return len(self.shape) > 1 and self.start in ("zeros", "fan_in")


class Adapter(ABC):
    """An adapter as data.

    Attributes:
        name: name in `attention.adapters`.
        folded: export folds the adapter into the rows: it changes queries and keys only, and both
            stay linear in the layer's input. For any other an export has code (see
            `pretrain.export`).
    """

    name: ClassVar[str]
    folded: ClassVar[bool] = True

    @abstractmethod
    def weights(self, sizes: AdapterSizes) -> tuple[AdapterWeight, ...]:
        """Return the adapter's tensors of one layer."""


class LowRank(Adapter):
    """q_h += B_qh A_q x, k_h += B_kh A_k x, with A `[rank, hidden]` shared by the heads.

    B starts at 0. Without a W to add to, B starts normal: queries then have the scale of
    orthonormal rows.
    """

    name = "low_rank"

    @override
    def weights(self, sizes: AdapterSizes) -> tuple[AdapterWeight, ...]:
        up = (sizes.head_dim, sizes.rank)
        start: Start = "fan_in" if sizes.alone else "zeros"
        return (
            AdapterWeight("low_rank_down", None, (2 * sizes.rank, sizes.hidden_size), "fan_in"),
            AdapterWeight("up_query", "query", up, start),
            AdapterWeight("up_key", "key", up, start),
        )


class QueryKeyBias(Adapter):
    """q_h ← q_h + b_qh, k_h ← k_h + b_kh."""

    name = "query_key_bias"
    folded = False

    @override
    def weights(self, sizes: AdapterSizes) -> tuple[AdapterWeight, ...]:
        size = (sizes.head_dim,)
        return (
            AdapterWeight("query_bias", "query", size, "zeros"),
            AdapterWeight("key_bias", "key", size, "zeros"),
        )


class ShortConvolution(Adapter):
    """k_t ← Σ_j c_j ∘ k_(t−j), v alike: causal, per channel, within a document of a sample."""

    name = "short_convolution"
    folded = False

    @override
    def weights(self, sizes: AdapterSizes) -> tuple[AdapterWeight, ...]:
        taps = (sizes.head_dim, sizes.taps)
        tap_weights = (
            AdapterWeight("key_taps", "key", taps, "half_previous"),
            AdapterWeight("value_taps", "value", taps, "current"),
        )
        return tuple(weight for weight in tap_weights if sizes.convolved in ("both", weight.role))


class ChannelScale(Adapter):
    """q_h ← exp(s_h) ∘ q_h: a positive scale of each channel."""

    name = "channel_scale"

    @override
    def weights(self, sizes: AdapterSizes) -> tuple[AdapterWeight, ...]:
        return (AdapterWeight("log_scale", "query", (sizes.head_dim,), "zeros"),)


# The reverse order of application, in which the table reads as nested calls.
_LAST_TO_FIRST = (
    ChannelScale(),
    ShortConvolution(),
    QueryKeyBias(),
    LowRank(),
)
ADAPTERS: dict[str, Adapter] = {adapter.name: adapter for adapter in _LAST_TO_FIRST}
"""Every adapter by name, the last to be applied first: channel_scale(…(low_rank(q)))."""


def in_order(names: Iterable[str]) -> tuple[Adapter, ...]:
    """Return the adapters with these names in the order of their application."""
    chosen = set(names)
    return tuple(adapter for name, adapter in reversed(ADAPTERS.items()) if name in chosen)


def even_values(shape: Sequence[int], start: Start, head_dim: int) -> Array:
    """Return initial values that are the same for every head, and not drawn.

    Args:
        head_dim: rows of taps that a head has.

    Returns:
        Values of that shape, or the number that all of them are.
    """
    if start not in ("current", "half_previous"):
        return np.array({"zeros": 0.0, "ones": 1.0}[start])
    # Tap 0 is that of the current token, tap 1 that of the token before it.
    taps = np.zeros(shape)
    taps[:, 0] = 1.0
    if start == "half_previous":
        taps[np.arange(len(taps)) % head_dim % 2 == 1, :2] = (0.0, 1.0)
    return taps


@dataclass(frozen=True)
class Corrections(Part):
    """The adapters of a layer, as a part of the model.

    Args:
        adapters: adapters in the order in which they are applied.
        groups: for each key head whether it is corrected, with its query heads.
    """

    adapters: tuple[Adapter, ...]
    sizes: AdapterSizes
    groups: tuple[bool, ...]

    @override
    def tensors(self, at: Place, shape: ModelShape) -> Iterator[Tensor]:
        """Yield the tensors of all adapters: of all heads together, or shared by the heads."""
        keys = sum(self.groups)
        heads = {"query": keys * shape.queries_per_group, "key": keys, "value": keys}
        for adapter in self.adapters:
            for weight in adapter.weights(self.sizes):
                # Without a role every rank holds the whole tensor, and sees its own heads only.
                shared = weight.role is None
                rows = weight.shape[0] * (1 if weight.role is None else heads[weight.role])
                yield Tensor(
                    f"{at.module}.{weight.name}"
                    if shared
                    else f"{at.module}.adapters.{weight.name}",
                    (rows, *weight.shape[1:]),
                    "adapter",
                    cut=None if shared else 0,
                    parts=((f"{at.stream}.{adapter.name if shared else weight.name}", rows),),
                    groups=None if shared else self.groups,
                    decay=weight.decay,
                    multiplied=len(weight.shape) > 1,
                    start=weight.start,
                    partial="heads" if shared else None,
                    layer=at.layer,
                )
