"""What a policy draws at the sizes of a model: the recipe of its Query/Key bank, or of its score matrices."""

from __future__ import annotations

from megatron_patches.bank.initial_weights_file import GivenWeights
from megatron_patches.bank.orthonormal import BankRecipe
from megatron_patches.errors import MethodError
from megatron_patches.recipe.policy import QKPolicy
from megatron_patches.recipe.score_recipe import ScoreRecipe


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
    """How the policy's Q and K rows are drawn, or None where they start like every other weight.

    Args:
        given: the file of a `pretrained` bank.

    Raises:
        MethodError: `pretrained` without a file or with one that cannot be read; the policy is impossible at
            these sizes.
    """
    if policy.init == "default":
        return None
    from_file = policy.init == "pretrained"
    if from_file and given is None:
        raise MethodError("it freezes Q and K as they were trained; set model.initial_weights to their file")
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
    """What the policy's score matrices are, or None where scores are made of queries and keys.

    Raises:
        MethodError: the policy is impossible at these sizes.
    """
    if not policy.synthesizer:
        return None
    return ScoreRecipe(
        seed=seed,
        num_attention_heads=num_attention_heads,
        sequence_length=sequence_length,
        rank=policy.score_rank,
    )
