"""A configuration on a number of ranks: what follows from both, and what is worked out once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pretrain.config.load import load_config
from pretrain.config.resolved import resolve
from pretrain.errors import UserError


def test_the_layout_and_the_settings_are_those_of_the_ranks(tmp_path: Path) -> None:
    mine = tmp_path / "mine.json"
    mine.write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    config = load_config("demo", [f"deepspeed.config={mine}", "data.micro_batch_size=2"])
    resolved = resolve(config, 8)
    assert resolved.config is config
    assert resolved.layout.as_dict() == {
        "world_size": 8,
        "tensor_model_parallel_size": 2,
        "data_parallel_size": 4,
        "sequence_parallel": False,
        "zero_stage": 2,
        "micro_batch_size": 2,
        "dtype": "fp32",
    }
    steps = config.data.global_batch_size // (2 * 4)
    assert resolved.deepspeed["gradient_accumulation_steps"] == steps
    assert resolved.file_digests["deepspeed.config"] is not None
    assert set(resolve(load_config("demo"), 2).file_digests.values()) == {None}


def test_what_follows_is_worked_out_once_and_a_copy_may_be_changed() -> None:
    config = load_config("demo", ["schedule.kind=wsd", "schedule.branch_from=runs/trunk"])
    assert config.policy is config.policy and config.shape is config.shape
    assert config.inventories[0] is config.inventories[0] and len(config.inventories) == 1
    assert config.run_directory.path == config.run_path
    assert config.trunk is not None and config.trunk.path == Path("runs/trunk")
    assert load_config("demo").trunk is None
    config.as_dict()["optimizer"]["betas"].append(0.5)
    assert config.values["optimizer"]["betas"] == [0.9, 0.98]


def test_what_scales_whole_weights_is_refused_where_ranks_lack_them() -> None:
    keys = ["optimizer.qk_clip=9", "attention.variant=vanilla"]
    assert resolve(load_config("demo", [*keys, "deepspeed.config=zero2"]), 2)
    config = load_config("demo", [*keys, "deepspeed.config=zero3"])
    with pytest.raises(UserError, match=f"{keys[0]} needs whole weights .* ZeRO stage 3"):
        resolve(config, 2)


@pytest.mark.parametrize(
    "keys",
    [
        ["attention.frozen_heads={0: 0.25}", "optimizer.learning_rate_factors={'*_taps': 3}"],
        [
            "attention.frozen_heads={0: 0.5}",
            "model.num_query_groups=2",
            "optimizer.learning_rate_factors={'*trained_query_key': 2}",
        ],
        [
            "attention.frozen_heads={0: 0.5}",
            "model.num_query_groups=2",
            "optimizer.weight_decay_factors={'*trained_query_key': 0}",
        ],
    ],
)
def test_a_factor_of_weights_that_a_rank_lacks_is_refused(keys: list[str]) -> None:
    """DeepSpeed's norms of parameter groups would wait for each other, or end in an IndexError."""
    adapters = "attention.adapters=[short_convolution]"
    heads = ["model.num_layers=1", adapters, "parallel.tensor_model_parallel_size=2"]
    assert resolve(load_config("demo", [*heads, *keys[:-1], "deepspeed.config=zero1"]), 2)
    alone = "parallel.tensor_model_parallel_size=1"
    assert resolve(load_config("demo", [*heads, *keys, alone, "deepspeed.config=zero1"]), 2)
    config = load_config("demo", [*heads, *keys, "deepspeed.config=zero1"])
    with pytest.raises(UserError, match="has a learning rate or weight decay of its own, and tens"):
        resolve(config, 2)


def test_muon_has_its_matrices_whole_under_the_stages_that_keep_them() -> None:
    keys = ["optimizer.kind=muon", "precision.dtype=bf16"]
    assert resolve(load_config("demo", keys[:1]), 2).layout.zero_stage == 0
    assert resolve(load_config("demo", keys), 2).layout.zero_stage == 1
    for stage in (2, 3):
        config = load_config("demo", [*keys, f"deepspeed.config=zero{stage}"])
        with pytest.raises(UserError, match=f"kind=muon .* ZeRO stage {stage} .* zero0 or zero1"):
            resolve(config, 2)
