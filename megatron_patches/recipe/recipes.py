"""Recipes of a policy at the sizes of a model: of its bank, or of a Synthesizer's scores.

A Synthesizer's head h has, with T the sequence length that the model is trained at, one of

    random      S_h ∈ R^{T × T}                         entries N(0, 1)
    factorized  S_h = A_h B_hᵀ,  A_h, B_h ∈ R^{T × k}   entries N(0, 1/√k): S_h then has variance 1

Standard deviation 1 is the scale that scores of orthonormal W_Q and W_K have at the start. A
comparison of the two thus compares how scores are made, not how sharp they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from megatron_patches.bank.initial_weights_file import GivenWeights
from megatron_patches.bank.orthonormal import BankRecipe
from megatron_patches.errors import MethodError
from megatron_patches.recipe.policy import QKPolicy


@dataclass(frozen=True)
class ScoreRecipe:
    """Seed and sizes of the initial score matrices: with (layer, head) they determine every entry.

    Attributes:
        num_attention_heads: heads of a layer, each with its own scores.
        sequence_length: T, the longest input.
        rank: k of factorized scores; None: full matrices.
    """

    seed: int
    num_attention_heads: int
    sequence_length: int
    rank: int | None = None

    def __post_init__(self) -> None:
        if self.rank is not None and not 1 <= self.rank <= self.sequence_length:
            raise MethodError(
                f"attention.synthesizer_rank={self.rank} is not between 1 and the sequence length "
                f"{self.sequence_length}, above which factors only cost more than the whole matrix"
            )

    @property
    def matrices(self) -> Mapping[str, int]:
        """Return {name: columns} of the matrices of a layer.

        A head owns `sequence_length` rows of each.
        """
        if self.rank is None:
            return {"scores": self.sequence_length}
        return {"query_factor": self.rank, "key_factor": self.rank}

    @property
    def std(self) -> float:
        """Return the standard deviation of the initial entries of every matrix."""
        # A sum of k products of entries of variance 1/√k has variance 1.
        return 1.0 if self.rank is None else self.rank**-0.25

    def as_dict(self) -> dict[str, int | None]:
        """Return the fields as plain values; `ScoreRecipe(**values)` makes an equal recipe."""
        return asdict(self)


def bank_recipe(
    policy: QKPolicy,
    *,
    seed: int,
    hidden_size: int,
    head_dim: int,
    num_attention_heads: int,
    num_query_groups: int,
    given: GivenWeights | None = None,
) -> BankRecipe | None:
    """Return the recipe of the policy's Q and K rows; None: they start like other weights.

    Args:
        given: file of the rows, for `pretrained`.

    Raises:
        MethodError: `pretrained` without its file `given` or with one that cannot be read; the
            policy is impossible at these sizes.
    """
    if policy.init in ("default", "low_rank"):
        return None
    # A file may also give other weights their start, which is no part of the bank's identity.
    from_file = policy.init == "pretrained"
    if from_file and given is None:
        raise MethodError(
            "it freezes Q and K as they were trained; set model.initial_weights to their file"
        )
    return BankRecipe(
        seed=seed,
        hidden_size=hidden_size,
        head_dim=head_dim,
        num_attention_heads=num_attention_heads,
        num_query_groups=num_query_groups,
        init=policy.init,
        scope=policy.scope,
        construction=policy.construction,
        gaussian_std=policy.gaussian_std,
        given_sha256=given.sha256 if given is not None and from_file else None,
        given_path=str(given.path) if given is not None and from_file else None,
    )


def score_recipe(
    policy: QKPolicy, *, seed: int, num_attention_heads: int, sequence_length: int
) -> ScoreRecipe | None:
    """Return the recipe of the policy's score matrices; None: it has queries and keys."""
    if not policy.synthesizer:
        return None
    return ScoreRecipe(
        seed=seed,
        num_attention_heads=num_attention_heads,
        sequence_length=sequence_length,
        rank=policy.score_rank,
    )
