"""Declarations of the adapters: small trainable corrections of frozen queries and keys. Pure Python.

An adapter is declared here by a class with its weights and its costs, and computed by the function of the
same name in `megatron_patches.attention.adapters`. Parameter counts, memory, time, sharding, weight decay and
checkpoints follow from the declaration.

The sources: LoRA (Hu et al., 2021) for low_rank; query-key normalisation (Henry et al., 2020) for qk_norm.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from megatron_patches.bank.orthonormal import Role

FP32 = 4


@dataclass(frozen=True)
class AdapterSizes:
    """Sizes that the weights of adapters depend on; `rank` is attention.low_rank."""

    hidden_size: int
    head_dim: int
    rank: int


@dataclass(frozen=True)
class AdapterWeight:
    """A trainable tensor of an adapter in one layer.

    Attributes:
        name: of the live parameter.
        role: the role whose frozen heads have a part of the tensor each, sharded with the heads. None: the
            tensor is multiplied by the layer's input, shared by the heads and whole on every rank. An adapter
            has at most one such tensor, drawn from the random stream of the adapter's name.
        shape: of one head's part, rows first; of the whole tensor without a role.
        start: the values that training starts from. `normal` has variance 1 / hidden_size.
    """

    name: str
    role: Role | None
    shape: tuple[int, ...]
    start: Literal["zeros", "ones", "identity", "normal"]

    @property
    def decay(self) -> bool:
        """Return True if weight decay applies: to matrices, unless they start as the identity."""
        return len(self.shape) > 1 and self.start != "identity"


@dataclass(frozen=True)
class Storage:
    """Memory behind one or several tensors, in bytes."""

    name: str
    size: int


@dataclass
class Trace:
    """Queries and keys of a rank's layer on their way to the scores, and what autograd has saved of them.

    Autograd keeps a storage as soon as one operation saves a view of it. So each step either saves what it
    reads or leaves it, and writes a new storage.

    Attributes:
        tokens: of a micro batch.
        element: bytes of the compute type.
        frozen_queries, frozen_keys: bytes of the queries and keys of the frozen heads.
        query, key: where they are now.
        saved: {name of a storage: bytes}.
    """

    tokens: int
    element: int
    frozen_queries: int
    frozen_keys: int
    query: Storage
    key: Storage
    saved: dict[str, int] = field(default_factory=dict)

    def save(self, *storages: Storage) -> None:
        """Keep storages for the backward pass."""
        self.saved |= {storage.name: storage.size for storage in storages}


class Adapter(ABC):
    """An adapter as data.

    Attributes:
        name: in `attention.adapters`.
        passes: reads and writes of all queries and keys, an element each, in a forward and backward pass.
        linear: corrected queries and keys are linear in the layer's input, so export can fold the adapter
            into frozen rows. One that is not linear is refused by export: no class of transformers has it.
    """

    name: ClassVar[str]
    passes: ClassVar[int]
    linear: ClassVar[bool] = True

    @abstractmethod
    def weights(self, sizes: AdapterSizes) -> tuple[AdapterWeight, ...]:
        """Return the adapter's tensors of one layer."""

    @abstractmethod
    def keep(self, trace: Trace, sizes: AdapterSizes) -> None:
        """Follow queries and keys through the adapter: save what its backward pass needs."""


class LogitScale(Adapter):
    """q_h ← s_h q_h."""

    name = "logit_scale"
    passes = 4

    def weights(self, sizes: AdapterSizes) -> tuple[AdapterWeight, ...]:
        """Return s_h of every query head."""
        return (AdapterWeight("logit_scale", "query", (1,), "ones"),)

    def keep(self, trace: Trace, sizes: AdapterSizes) -> None:
        """Save the queries as they come."""
        trace.save(trace.query)
        trace.query = Storage("scaled queries", trace.frozen_queries)


class QueryKeyNorm(Adapter):
    """q_h ← g_qh ∘ q_h / rms(q_h), k alike, computed in fp32; g starts at 1."""

    name = "qk_norm"
    passes = 24
    linear = False

    def weights(self, sizes: AdapterSizes) -> tuple[AdapterWeight, ...]:
        """Return the gains of query heads and of key heads."""
        gain = (sizes.head_dim,)
        return (
            AdapterWeight("query_gain", "query", gain, "ones"),
            AdapterWeight("key_gain", "key", gain, "ones"),
        )

    def keep(self, trace: Trace, sizes: AdapterSizes) -> None:
        """Save queries and keys in fp32, and normalised."""
        both = trace.frozen_queries + trace.frozen_keys
        if trace.element == FP32:
            trace.save(trace.query, trace.key)
        else:
            trace.save(Storage("queries and keys in fp32", both * FP32 // trace.element))
        trace.save(Storage("normalised queries and keys", both))
        trace.query = Storage("queries after the norm", trace.frozen_queries)
        trace.key = Storage("keys after it", trace.frozen_keys)


class Core(Adapter):
    """q_h ← C_h q_h, C_h `[head_dim, head_dim]`; queries only."""

    name = "core"
    passes = 5

    def weights(self, sizes: AdapterSizes) -> tuple[AdapterWeight, ...]:
        """Return C_h of every query head."""
        return (AdapterWeight("core", "query", (1, sizes.head_dim, sizes.head_dim), "identity"),)

    def keep(self, trace: Trace, sizes: AdapterSizes) -> None:
        """Save the queries, sorted by head for the batched product."""
        trace.save(Storage("queries by head, before the core", trace.frozen_queries))
        trace.query = Storage("queries after the core", trace.frozen_queries)


class LowRank(Adapter):
    """q_h += B_qh A_q x, k_h += B_kh A_k x; A `[rank, hidden]` is shared by the heads, B starts at 0."""

    name = "low_rank"
    passes = 5

    def weights(self, sizes: AdapterSizes) -> tuple[AdapterWeight, ...]:
        """Return A_q above A_k, and B of query heads and of key heads."""
        up = (sizes.head_dim, sizes.rank)
        return (
            AdapterWeight("low_rank_down", None, (2 * sizes.rank, sizes.hidden_size), "normal"),
            AdapterWeight("up_query", "query", up, "zeros"),
            AdapterWeight("up_key", "key", up, "zeros"),
        )

    def keep(self, trace: Trace, sizes: AdapterSizes) -> None:
        """Save A x; the sums are new storages."""
        trace.save(Storage("low-rank products", trace.tokens * 2 * sizes.rank * trace.element))
        trace.query = Storage("queries + low rank", trace.frozen_queries)
        trace.key = Storage("keys + low rank", trace.frozen_keys)


ADAPTERS: dict[str, Adapter] = {
    adapter.name: adapter for adapter in (LogitScale(), QueryKeyNorm(), Core(), LowRank())
}
"""Every adapter by name, the last to be applied first: logit_scale(qk_norm(core(low_rank(q))))."""


def in_order(names: Iterable[str]) -> tuple[Adapter, ...]:
    """Return the adapters of these names in the order in which they are applied."""
    chosen = set(names)
    return tuple(adapter for name, adapter in reversed(ADAPTERS.items()) if name in chosen)
