"""Configuring a synthesizer: what is derived, counted and refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_patches.errors import MethodError
from megatron_patches.recipe.counting import (
    count_parameters,
    executed_flops_per_token,
    forward_flops_per_token,
    model_flops_per_token,
)
from megatron_patches.recipe.recipes import ScoreRecipe, score_recipe
from pretrain.checkpoint.format import About
from pretrain.checkpoint.identity import accept_identity
from pretrain.config.load import load_config
from pretrain.config.show import summary_rows
from pretrain.errors import UserError
from tests.fabricated_checkpoints import about
from tests.pretrain.config.configurations import refusal, yaml_file

RANDOM, FACTORIZED = (
    "attention.variant=synthesizer_random",
    "attention.variant=synthesizer_factorized",
)


def test_defaults_and_what_is_written_down(tmp_path: Path) -> None:
    config = load_config("base", [FACTORIZED])
    attention = config.as_dict()["attention"]
    assert (attention["trainable"], attention["synthesizer_rank"]) == (True, 8)
    assert load_config("base", [RANDOM]).as_dict()["attention"]["synthesizer_rank"] is None
    assert load_config("base").as_dict()["attention"]["trainable"] is None
    frozen = load_config(
        "base", [FACTORIZED, "attention.trainable=false", "attention.synthesizer_rank=3"]
    )
    again = load_config(yaml_file(tmp_path, frozen.to_yaml()))
    assert again.policy == frozen.policy
    assert (again.policy.trainable, again.policy.score_rank) == (False, 3)


def test_scores_are_bound_to_the_sequence_length_and_the_bank_seed() -> None:
    config = load_config("base", [FACTORIZED, "attention.seed=5"])
    recipe = score_recipe(
        config.policy,
        seed=config.bank_seed,
        num_attention_heads=config.model.num_attention_heads,
        sequence_length=config.data.sequence_length,
    )
    assert recipe == ScoreRecipe(seed=5, num_attention_heads=12, sequence_length=512, rank=8)
    assert ScoreRecipe(**recipe.as_dict()) == recipe
    # The variance of a sum of 8 products.
    assert recipe.std**2 * recipe.std**2 * 8 == pytest.approx(1)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["attention.trainable=false"],
            "attention.trainable is for the score matrices of a synthesizer",
        ),
        (
            ["attention.variant=vanilla", "attention.synthesizer_rank=4"],
            "synthesizer_rank does not apply",
        ),
        (
            [RANDOM, "attention.synthesizer_rank=4"],
            "does not apply to variant 'synthesizer_random'",
        ),
        (
            [FACTORIZED, "attention.synthesizer_rank=513"],
            "synthesizer_rank=513 is not between 1 and",
        ),
        (
            [RANDOM, "attention.scope=head"],
            "attention.scope and attention.construction do not apply",
        ),
        ([RANDOM, "attention.gaussian_std=1.0"], "attention.gaussian_std"),
        (
            [RANDOM, "attention.trainable=false", "attention.adapters=[low_rank]"],
            "attention.adapters",
        ),
    ],
)
def test_refusals(overrides: list[str], words: str) -> None:
    assert words in refusal("base", *overrides)


@pytest.mark.parametrize("trainable", [True, False])
def test_parameters(trainable: bool) -> None:
    layers, d, heads, length, rank = 12, 768, 12, 512, 8
    without_query_key = 109_942_272 - layers * 2 * d * d
    for variant, scores in ((RANDOM, heads * length**2), (FACTORIZED, 2 * heads * length * rank)):
        config = load_config("base", [variant, f"attention.trainable={str(trainable).lower()}"])
        count = count_parameters(config.shape, config.policy)
        assert count.total == without_query_key + layers * scores
        assert count.frozen == (0 if trainable else layers * scores)
        shown = dict(summary_rows(config))
        assert shown["parameters, total"].startswith(f"{count.total:,} ")
        assert shown["parameters, trainable"].startswith(f"{count.trainable:,} ")


def test_flops_have_neither_projections_to_queries_and_keys_nor_their_products() -> None:
    layers, d, length = 12, 768, 512
    vanilla = load_config("base", ["attention.variant=vanilla"])
    forward = forward_flops_per_token(vanilla.shape, vanilla.policy)
    for variant in (RANDOM, FACTORIZED):
        learned = load_config("base", [variant])
        shape, attention = learned.shape, learned.policy
        gone = layers * (2 * 2 * d * d + 2 * 0.5 * length * d)
        assert forward - forward_flops_per_token(shape, attention) == gone
        model = model_flops_per_token(shape, attention)
        assert model == 3 * (forward - gone)
        assert executed_flops_per_token(shape, attention) == model
        frozen = load_config("base", [variant, "attention.trainable=false"]).policy
        assert model - executed_flops_per_token(shape, frozen) == layers * 2 * 0.5 * length * d


@pytest.mark.parametrize("rank", [0, 17])
def test_an_impossible_rank_is_named(rank: int) -> None:
    with pytest.raises(MethodError, match=f"rank={rank}"):
        ScoreRecipe(seed=0, num_attention_heads=2, sequence_length=16, rank=rank)


def test_a_resume_at_another_length_is_refused_even_where_other_data_is_allowed() -> None:
    def identity(length: int) -> About:
        recipe = ScoreRecipe(seed=0, num_attention_heads=2, sequence_length=length).as_dict()
        keys = {"data.sequence_length": length, "model.position_embedding": "rope"}
        return about(keys=keys, frozen_bank={"recipe": recipe, "sha256": {}})

    with pytest.raises(UserError, match="sequence_length=16 but this run has 32"):
        accept_identity("step_1", identity(16), vars(identity(32)), allow_data_change=True)
