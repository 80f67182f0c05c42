"""Parts of the model as data: their tensors, and their names in other libraries.

This needs no torch.
A part is declared once, by a class with its tensors (name, shape, cut, start, weight decay) and
its names in transformers' classes. Everything else loops over the declarations: initial values and
marks, parameter groups, counts, `plan`, the audit, the blocks of a checkpoint, comparability, the
profile, export and import.
`block` has the norms, MLPs, embeddings and projections, `tensors` the queries, keys and values, and
`adapters` what corrects these.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

FP32 = 4
"""Bytes of a number in fp32."""

Kind = Literal["ordinary", "norm", "frozen", "kept", "adapter", "penalised", "scores"]
"""Weights of the ordinary model; its norms; a frozen bank; rows of queries and keys that have been
trained and are frozen now; adapters; W_QKV under the orthogonality penalty; score matrices of a
synthesizer, trained or frozen.
"""

Start = Literal[
    "normal",
    "embedding",
    "residual",
    "fan_in",
    "zeros",
    "ones",
    "current",
    "half_previous",
    "bank",
    "right_factor",
    "left_factor",
    "own",
]
"""Initial values.

`embedding`: N(0, init_std²); `normal`: the same, or N(0, 1/columns) where the model starts by
fan-in; `residual`: N(0, init_std² / (2 · layers)) for what is added to the residual stream, or
zeros where the model starts by fan-in; `fan_in`: N(0, 1/columns); `zeros`, `ones`. Of taps,
`current` passes every channel on, and `half_previous` gives the channels of odd numbers the token
before. `bank`: the rows of queries and keys are the bank's, which pass through fp32, and all others
`normal`; `right_factor`, `left_factor`: a factor of these rows. `own`: the module fills its weight
itself.
"""

Partial = Literal["sequence", "heads"]
"""Extent of a rank's gradient of a replicated tensor: under sequence parallelism the rank's slice
of the sequence, or the rank's heads.
"""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model and names of its parts: beside the policy, all that its tensors depend on.

    Attributes:
        num_layers: transformer layers.
        hidden_size: width of the residual stream.
        num_attention_heads: query heads of a layer.
        num_query_groups: key and value heads of a layer.
        head_dim: width of a head.
        ffn_hidden_size: inner width of the MLP.
        vocab_size: rows of the embedding.
        sequence_length: tokens of a sample.
        learned_positions: positions are a trained table; else they rotate queries and keys.
        tied_embeddings: the output layer has the weight of the embedding.
        norm: name in NORMS.
        mlp: name in MLPS.
        qk_norm: queries and keys are normalised, see `tensors.QueryKeyNorm`.
    """

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
    norm: str = "layernorm"
    mlp: str = "gelu"
    qk_norm: bool = False

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
        name: name of the parameter or buffer in the live model.
        shape: shape of the whole tensor.
        kind: see Kind.
        cut: the dimension that tensor parallelism cuts; None: every rank has the whole tensor.
        parts: (name of a weight, how much of it) along the dimension that is cut, the first without
            a cut. A rank has its share of every part, one behind the other. A weight's name is that
            of its random stream, and of its values in files of initial weights and in exports.
        groups: for each key head whether the tensor has rows of it, or of its query heads: ranks
            may have unequal shares. None: every rank has an equal share.
        phase: the training phase from which the tensor trains; None: a buffer.
        until: the training phase from which it is frozen as it is then; None: never.
        decay: weight decay applies if the tensor is a matrix.
        multiplied: every token is multiplied by the tensor; else looked up, added or mixed.
        start: initial values, see Start.
        repeats: how often the sequence of parts is repeated along the cut, a piece of each at a
            time, as in megatron-core's W_QKV, [q … q k v] for each key head. Then a rank's share is
            contiguous. None: each part is in one piece.
        partial: see Partial; None: every rank has the whole gradient.
        head_rows: rows of a head, in the parts of queries and keys; None: there are no heads, or
            their rows are factors.
        layer: number of the layer, from 0; None: outside of the layers.
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
    start: Start = "normal"
    repeats: int | None = None
    partial: Partial | None = None
    head_rows: int | None = None
    layer: int | None = None
    until: int | None = None

    @property
    def trains(self) -> bool:
        """Return True for a parameter, False for a buffer."""
        return self.phase is not None

    @property
    def decays(self) -> bool:
        """Return whether weight decay applies: of what may decay, to matrices alone."""
        return self.decay and len(self.shape) > 1

    @property
    def stored(self) -> bool:
        """Return whether a checkpoint holds the values, because no seed can regenerate them."""
        return self.trains or self.kind == "kept"

    @property
    def span(self) -> tuple[int, int]:
        """Return the phases from which and until which a parameter trains; until 0: to the end.

        An optimizer group has parameters of one span, so that it comes and goes as a whole.
        """
        return self.phase or 0, self.until or 0

    @property
    def elements(self) -> int:
        """Return the elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def multiplications(self) -> int:
        """Return the multiply-adds per token with the whole tensor in a forward pass."""
        return self.elements if self.multiplied else 0

    def share(self, length: int, rank: int, size: int) -> int:
        """Return a tensor-parallel rank's share of a length along the cut dimension.

        Args:
            length: size along the cut dimension, over all ranks.
        """
        if self.cut is None:
            return length
        if self.groups is None:
            return length // size
        return length * len(groups_of_rank(self.groups, rank, size)) // sum(self.groups)

    def rows(self, length: int, rank: int, size: int) -> Sequence[int]:
        """Return the rows of a part that a rank has, by their numbers in the weight's stream.

        Args:
            length: rows of the part, over all ranks.

        Returns:
            The numbers in order; all of them where columns are cut, or nothing is. Rows of heads
            that the tensor lacks have numbers too, so that a head's rows do not depend on the
            others.
        """
        if self.cut != 0:
            return range(length)
        if self.groups is None:
            rows_per_rank = length // size
            return range(rank * rows_per_rank, (rank + 1) * rows_per_rank)
        # Rows are numbered over all heads, also over those that the tensor lacks.
        rows = length // sum(self.groups)
        rank_groups = groups_of_rank(self.groups, rank, size)
        return [group * rows + row for group in rank_groups for row in range(rows)]

    def rank_shape(self, rank: int, size: int) -> tuple[int, ...]:
        """Return the shape of the share of tensor-parallel `rank` of `size`."""
        if self.cut is None:
            return self.shape
        length = self.share(self.shape[self.cut], rank, size)
        return (*self.shape[: self.cut], length, *self.shape[self.cut + 1 :])

    def rank_elements(self, rank: int, size: int) -> int:
        """Return the elements in the share of tensor-parallel `rank` of `size`."""
        return math.prod(self.rank_shape(rank, size))


def groups_of_rank(groups: Sequence[bool], rank: int, size: int) -> list[int]:
    """Return the numbers of the key heads of a tensor-parallel rank that a tensor has rows of.

    Args:
        groups: for each key head of all ranks whether the tensor has rows of it.
    """
    count = len(groups) // size
    return [group for group in range(rank * count, (rank + 1) * count) if groups[group]]


class Place(NamedTuple):
    """Where a part is in the model.

    Attributes:
        module: name of its module in the live model.
        stream: beginning of the names of its weights' random streams.
        layer: number of the layer, from 0; None: outside of the layers.
    """

    module: str
    stream: str
    layer: int | None = None


class Part(ABC):
    """A part of the model as data.

    Attributes:
        name: name in the configuration.
        kernels: regular expression that the names of the part's kernels match; empty: it has
            none.
    """

    name: ClassVar[str]
    kernels: ClassVar[str] = ""

    @abstractmethod
    def tensors(self, at: Place, shape: ModelShape) -> Iterator[Tensor]:
        """Yield the parameters and buffers of the part at a place."""
