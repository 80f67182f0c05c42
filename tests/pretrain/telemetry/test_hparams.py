"""HParams: every run writes the same columns of the same type, lists and mappings as text."""

from __future__ import annotations

import pytest

from megatron_patches.recipe.policy import VARIANTS
from pretrain.config.load import load_config
from pretrain.telemetry.hparams import FIRST, _text, hparams


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "none"),
        ([], "none"),
        ({}, "none"),
        (["core", "low_rank"], "core+low_rank"),
        ([0.9, 0.98], "0.9, 0.98"),
        ({"0-3": 1.0, "4-7": 0.5}, "{0-3: 1.0, 4-7: 0.5}"),
        (
            [{"at": 0.3, "layers": "50%-100%", "learning_rate_factor": 0.5}],
            "[{at: 0.3, layers: 50%-100%, learning_rate_factor: 0.5}]",
        ),
        (0.0884, "0.0884"),
        (True, "True"),
    ],
)
def test_text(value: object, text: str) -> None:
    assert _text(value) == text


def test_columns_and_their_types_are_the_same_in_every_run() -> None:
    """TensorBoard takes them from any one run, and refuses to filter numbers where another run has text."""
    seen = {}
    for variant in [name for name in VARIANTS if VARIANTS[name].init != "pretrained"]:  # that needs a file
        overrides = [f"attention.variant={variant}", "model.head_dim=16"]
        values = hparams(load_config("demo", overrides))
        seen[variant] = {key: isinstance(value, str) for key, value in values.items()}
        assert values["attention.variant"] == variant and values["model.head_dim"] == 16
        assert values["optimizer.betas"] == "0.9, 0.98"
    assert len({tuple(columns.items()) for columns in seen.values()}) == 1
    by_tokens = hparams(load_config("demo", ["schedule.steps=null", "schedule.tokens=1000000"]))
    assert (by_tokens["schedule.steps"], by_tokens["schedule.tokens"]) == ("none", "1000000")
    assert {key: isinstance(value, str) for key, value in by_tokens.items()} == next(iter(seen.values()))
    assert {"attention.variant", "run.seed"} <= {*FIRST} & {*by_tokens}
