"""What the learned score matrices of a Synthesizer are: sizes, scale, seed. Pure Python.

    random      S_h ∈ R^{T × T}                       entries N(0, 1)
    factorized  S_h = A_h B_hᵀ,  A_h, B_h ∈ R^{T × k}   entries N(0, 1/√k): then S_h's have variance 1

T is the length the model is trained at. Standard deviation 1 is the scale that scores of orthonormal W_Q, W_K
have at the start: comparing the two compares how scores are made, not how sharp they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from megatron_patches.errors import MethodError


@dataclass(frozen=True)
class ScoreRecipe:
    """Everything the initial score matrices depend on, apart from (layer, head).

    Attributes:
        seed: not negative.
        num_attention_heads: heads of a layer, each with its own scores.
        sequence_length: T, the longest input.
        rank: k of factorized scores; None: full matrices.

    Raises:
        MethodError: a size that cannot be; the message says which.
    """

    seed: int
    num_attention_heads: int
    sequence_length: int
    rank: int | None = None

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise MethodError(f"seed={self.seed} is negative; the score matrices need a seed of 0 or more")
        for name in ("num_attention_heads", "sequence_length"):
            if getattr(self, name) < 1:
                raise MethodError(f"{name}={getattr(self, name)} must be at least 1")
        if self.rank is not None and not 1 <= self.rank <= self.sequence_length:
            raise MethodError(
                f"attention.synthesizer_rank={self.rank} is not between 1 and the sequence length "
                f"{self.sequence_length}, above which factors only cost more than the whole matrix"
            )

    @property
    def matrices(self) -> Mapping[str, int]:
        """Name and columns of each trained matrix; a head owns `sequence_length` rows of each."""
        if self.rank is None:
            return {"scores": self.sequence_length}
        return {"query_factor": self.rank, "key_factor": self.rank}

    @property
    def std(self) -> float:
        """Standard deviation of the initial entries of every matrix."""
        return 1.0 if self.rank is None else self.rank**-0.25

    @property
    def elements_per_layer(self) -> int:
        """Entries of all matrices of a layer: H T² or 2 H T k."""
        return self.num_attention_heads * self.sequence_length * sum(self.matrices.values())

    def as_dict(self) -> dict[str, int | None]:
        """The fields as plain values; `ScoreRecipe(**that)` is equal to this recipe."""
        return asdict(self)
