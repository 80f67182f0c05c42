"""HParams: every run writes the same columns of the same type, lists and mappings as text."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_patches.recipe.variants import VARIANTS
from pretrain.config.load import load_config
from pretrain.runs import tags
from pretrain.runs.directory import RunDirectory, newest_checkpoint_bytes
from pretrain.telemetry.hparams import FIRST, hparams, in_front, results
from tests.fabricated_runs import write_run
from tests.pretrain.telemetry.records import make_record, open_telemetry, read_scalars


def test_columns_and_their_types_are_the_same_in_every_run() -> None:
    """TensorBoard takes them from any run, and filters no numbers where another run has text."""
    seen = {}
    # `pretrained` needs a file.
    for variant in [name for name in VARIANTS if VARIANTS[name].init != "pretrained"]:
        overrides = [f"attention.variant={variant}", "model.head_dim=16"]
        values = hparams(load_config("demo", overrides).values)
        seen[variant] = {key: isinstance(value, str) for key, value in values.items()}
        assert values["attention.variant"] == variant and values["model.head_dim"] == 16
        assert values["optimizer.betas"] == "0.9, 0.98"
        assert values["optimizer.learning_rate_factors"] == "none"
    assert len({tuple(columns.items()) for columns in seen.values()}) == 1
    spelled_out = ["attention.variant=orthogonal", "attention.shared=true"]
    shown = hparams(load_config("demo", spelled_out).values)["attention.variant"]
    assert shown == "orthogonal_shared"
    for cap in ("null", "30"):
        capped = hparams(load_config("demo", [f"model.logit_softcap={cap}"]).values)
        assert isinstance(capped["model.logit_softcap"], str)
    by_tokens = hparams(
        load_config("demo", ["schedule.steps=null", "schedule.tokens=1000000"]).values
    )
    assert (by_tokens["schedule.steps"], by_tokens["schedule.tokens"]) == ("none", "1000000")
    assert {key: isinstance(value, str) for key, value in by_tokens.items()} == next(
        iter(seen.values())
    )
    assert {"attention.variant", "optimizer.learning_rate"} == {*FIRST} & {*by_tokens}


def test_results_are_those_of_the_whole_run_and_not_of_its_last_step(tmp_path: Path) -> None:
    """The first tenth is start-up, and the last step of this run is twice as fast as the others."""
    speeds = [10.0] * 10 + [1000.0] * 89 + [2000.0]
    run = RunDirectory(
        write_run(tmp_path, "run", "vanilla", columns={tags.TOKENS_PER_SECOND.tag: speeds})
    )
    values = results(run)
    assert values["summary/median_tokens_per_second"] == 1000
    assert values["summary/median_step_seconds"] == 2
    assert values["summary/optimizer_state_MiB"] == 1_313_024 * 12 / 2**20
    assert values["summary/gradients_MiB"] == 4 * 1_313_024 * 4 / 2**20
    assert values["summary/peak_host_MiB"] == 500_000_000 / 2**20
    assert values["summary/checkpoint_MiB"] == newest_checkpoint_bytes(run.path) / 2**20
    assert (
        values["summary/trainable_parameters"] == 1_313_024
        and values["summary/frozen_parameters"] == 0
    )
    shown = [
        "perplexity/valid",
        *(f"summary/{name}" for name in ("median_tokens_per_second", "gradients_MiB")),
    ]
    assert list(values)[:3] == shown  # TensorBoard shows five columns before any is chosen
    loss = values[tags.VALIDATION_LOSS.tag]
    assert values["summary/bits_per_byte"] == pytest.approx(loss * 8000 / 31_000 / 0.6931472)
    front = in_front(values)
    assert {*front} < {*FIRST} and list(FIRST) == sorted(FIRST)  # the order of TensorBoard
    assert front["result.tokens_per_second"] == 1000
    assert front["result.memory_MiB"] == round(1_313_024 * 28 / 2**20, 2)
    assert in_front({"perplexity/valid": 3.0}) == {"result.perplexity": 3.0}
    assert "summary/peak_device_MiB" not in values and values[tags.LOSS.tag] == 4


def test_tensorboard_has_a_scalar_for_every_result(tmp_path: Path) -> None:
    telemetry = open_telemetry(tmp_path)
    telemetry.log(make_record(1, validated=True))
    telemetry.close({"perplexity/valid": 13.0, "summary/median_step_seconds": 0.5})
    scalars = read_scalars(tmp_path)
    assert scalars["summary/median_step_seconds"] == [(1, 0.5)]
    assert len(scalars["perplexity/valid"]) == 1  # logged with its step already
