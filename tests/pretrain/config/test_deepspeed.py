"""From our configuration to DeepSpeed's: what is filled in, what conflicts, what is refused."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from pretrain.config.deepspeed import PASSED_ON, REFUSED, ZERO_KEYS, check_sections
from pretrain.config.load import load_config
from pretrain.config.resolved import resolve
from pretrain.config.show import render_show
from pretrain.config.tree import Config
from pretrain.errors import UserError
from tests.ranks import ROOT

STAGES = ["zero1", "zero2", "zero3"]


def demo(*overrides: str) -> Config:
    return load_config("demo", ["data.micro_batch_size=2", "data.global_batch_size=16", *overrides])


def settings_of(config: Config, world_size: int) -> dict[str, Any]:
    """The settings that DeepSpeed is started with."""
    return dict(resolve(config, world_size).deepspeed)


def stage_of(config: Config, world_size: int) -> int:
    return resolve(config, world_size).layout.zero_stage


def json_file(directory: Path, content: Any) -> str:
    path = directory / "mine.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return f"deepspeed.config={path}"


@pytest.mark.parametrize("stage", STAGES)
def test_our_keys_are_filled_in(stage: str) -> None:
    config = demo(
        f"deepspeed.config={stage}", "precision.dtype=bf16", "optimizer.gradient_clip=0.5"
    )
    settings = settings_of(config, 4)
    assert settings["train_batch_size"] == 16
    assert settings["train_micro_batch_size_per_gpu"] == 2
    assert settings["gradient_accumulation_steps"] == 4  # 2 data-parallel ranks beside TP 2
    assert settings["gradient_clipping"] == 0.5
    assert settings["bf16"]["enabled"] is True
    assert settings["bf16"].get("immediate_grad_update", False) == (stage == "zero1")
    assert settings["data_types"] == {"grad_accum_dtype": "fp32"}
    assert settings["communication_data_type"] == "fp32"
    assert settings["zero_optimization"]["stage"] == stage_of(config, 4) == int(stage[-1])


def test_gradients_summed_in_bf16_are_reduced_in_bf16() -> None:
    config = demo("precision.dtype=bf16", "precision.grad_accum_dtype=bf16")
    assert settings_of(config, 4)["communication_data_type"] == "bf16"


def test_communication_data_type_is_the_users_to_change() -> None:
    config = demo("precision.dtype=bf16", "deepspeed.overrides.communication_data_type=bf16")
    assert settings_of(config, 4)["communication_data_type"] == "bf16"


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_deepspeed_accepts_the_result_without_complaint(stage: str, dtype: str) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    config = demo(
        "parallel.tensor_model_parallel_size=1",
        f"deepspeed.config={stage}",
        f"precision.dtype={dtype}",
    )
    settings = settings_of(config, 1)
    read = DeepSpeedConfig(settings)
    assert read.zero_optimization_stage == int(stage[-1])
    assert read.gradient_accumulation_steps == 8
    assert read.gradient_clipping == 1.0
    assert read.bfloat16_config.enabled is (dtype == "bf16")
    assert read.grad_accum_dtype == "fp32"
    assert str(read.communication_data_type) == "torch.float32"
    assert read.steps_per_print is None


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("zero_optimization.round_robin_gradients=true", "need DeepSpeed's own order of the"),
        ("bf16.bf16_optimizer_states=true", "the optimizer keeps fp32 weights and states"),
        ("bf16.bf16_master_weights_and_grads=true", "the optimizer keeps fp32 weights and states"),
        ("zero_optimization.reduce_bucket_size=auto", "is 'auto'; it must be a number"),
        ("zero_optimization.stage3_max_live_parameters=.inf", "is inf; it must be a number, at le"),
        ("zero_optimization={stage: 2, 1: 5}", "'zero_optimization.1' is not one that DeepSpeed"),
        ("zero_optimization.reduce_scatter=x", "DeepSpeedZeroConfig: 'reduce_scatter' is 'x': in"),
        ("data_types.foo=fp32", "'data_types.foo' is not one that DeepSpeed knows; it knows grad"),
        ("bf16.immediate_grad_updat=true", "BF16Config: 'immediate_grad_updat' is True: extra"),
        ("tensorboard.enabld=true", "'tensorboard.enabld' is True: extra inputs"),
        ("comms_logger=1", "deepspeed settings: "),
        ("flops_profiler.enabled=x", "DeepSpeed cannot read them (unsupported operand"),
        (
            "checkpoint.tag_validation=nope",
            "cannot read them (Checkpoint config contains invalid",
        ),
    ],
)
def test_a_key_or_value_of_any_section_is_refused_in_a_sentence(override: str, said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        alone = demo("parallel.tensor_model_parallel_size=1", f"deepspeed.overrides.{override}")
        check_sections(resolve(alone, 1).deepspeed, None)


def test_every_shipped_key_is_explained() -> None:
    readme = files("ds_configs").joinpath("README.md").read_text(encoding="utf-8")
    for stage in STAGES:
        settings = json.loads(
            files("ds_configs").joinpath(f"{stage}.json").read_text(encoding="utf-8")
        )
        for key in [*settings, *settings["zero_optimization"], *settings.get("bf16", {})]:
            is_section = key in ("zero_optimization", "bf16")
            assert is_section or re.search(rf"`((zero_optimization|bf16)\.)?{key}`", readme), key


def test_the_known_keys_are_deepspeeds() -> None:
    import deepspeed

    runtime = Path(deepspeed.__file__).parent
    source = "".join(path.read_text(encoding="utf-8") for path in runtime.rglob("*.py"))
    for key in [*PASSED_ON, *REFUSED]:
        assert f'"{key}"' in source or f"'{key}'" in source, key


def test_the_known_keys_of_zero_are_deepspeeds() -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    fields = DeepSpeedZeroConfig.model_fields
    assert {*fields, *(field.alias for field in fields.values() if field.alias)} == ZERO_KEYS


def test_overrides_are_merged_key_by_key_and_leave_the_rest() -> None:
    settings = settings_of(demo("deepspeed.overrides.zero_optimization.reduce_bucket_size=1000"), 4)
    assert settings["zero_optimization"]["reduce_bucket_size"] == 1000
    assert settings["zero_optimization"]["stage"] == 1


@pytest.mark.parametrize(
    ("overrides", "world_size", "stage"),
    [
        ([], 2, 0),  # TP 2, so one data-parallel rank
        ([], 4, 0),  # two of them, of a model that is small
        (["parallel.tensor_model_parallel_size=1"], 1, 0),
        (["parallel.tensor_model_parallel_size=1"], 2, 0),
        (["precision.dtype=bf16"], 2, 1),
        (["attention.variant=unfreeze"], 2, 1),
        (["deepspeed.overrides.zero_optimization.overlap_comm=true"], 2, 0),
        (["deepspeed.overrides.zero_optimization.overlap_comm=true"], 4, 1),
        (["deepspeed.overrides.zero_optimization.stage=1"], 2, 1),
        (["deepspeed.overrides.zero_optimization.stage=0"], 4, 0),
        (["deepspeed.overrides.zero_optimization.stage=3"], 4, 3),
    ],
)
def test_auto_splits_where_there_is_something_to_split(
    overrides: list[str], world_size: int, stage: int
) -> None:
    config = demo(*overrides)
    assert config.deepspeed.config == "auto"
    assert stage_of(config, world_size) == stage
    shipped = json.loads((ROOT / f"ds_configs/zero{stage}.json").read_text())
    assert (
        settings_of(config, world_size)["zero_optimization"].keys()
        >= shipped["zero_optimization"].keys()
    )


def test_show_says_what_auto_stands_for() -> None:
    """Of 151 M parameters splitting saves a rank 2, 6.5 and 7.8 bytes each over 2, 8 and 64."""

    def shown(*overrides: str) -> list[str]:
        lines = render_show("demo", list(overrides)).splitlines()
        return [
            line.split("  ")[-1].strip() for line in lines if line.startswith("DeepSpeed settings")
        ]

    assert shown() == ["zero0"]
    assert shown("precision.dtype=bf16") == ["zero1"]
    wide = ["attention.variant=vanilla", "model.hidden_size=1024", "model.num_layers=24"]
    assert shown(*wide) == ["zero0; zero1 where it saves a rank over 1 GiB"]
    large = demo(*wide, "data.global_batch_size=128")
    tensor_parallel = large.parallel.tensor_model_parallel_size
    by_ranks = [stage_of(large, tensor_parallel * ranks) for ranks in (1, 2, 8, 64)]
    assert by_ranks == [0, 0, 0, 1]


def test_nothing_is_shared_between_calls() -> None:
    config = demo("deepspeed.overrides.zero_optimization.sub_group_size=5")
    settings_of(config, 4)["zero_optimization"]["stage"] = 3
    assert settings_of(config, 4)["zero_optimization"]["stage"] == 1
    assert config.deepspeed.overrides == {"zero_optimization": {"sub_group_size": 5}}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"train_batch_size": 64}, ["'train_batch_size' is 64", "data.global_batch_size gives 16"]),
        (
            {"train_micro_batch_size_per_gpu": 1},
            ["'train_micro_batch_size_per_gpu' is 1", "data.micro_batch_size gives 2"],
        ),
        ({"gradient_accumulation_steps": 1}, ["'gradient_accumulation_steps' is 1", "gives 4"]),
        (
            {"gradient_clipping": 0.3},
            ["'gradient_clipping' is 0.3", "optimizer.gradient_clip gives 1.0"],
        ),
        (
            {"bf16": {"enabled": True}},
            ["'bf16.enabled' is True", "precision.dtype=fp32 gives False"],
        ),
        (
            {"data_types": {"grad_accum_dtype": "bf16"}},
            ["'data_types.grad_accum_dtype' is 'bf16'", "precision.grad_accum_dtype gives 'fp32'"],
        ),
        ({"zero_optimization": {"stge": 1}}, ["'zero_optimization.stge'", "did you mean 'stage'"]),
        (
            {"zero_optimization": {"reduce_bucket_size": "big"}},
            ["'zero_optimization.reduce_bucket_size'", "number"],
        ),
        ({"optimizer": {"type": "Adam"}}, ["'optimizer'", "section 'optimizer'"]),
        ({"scheduler": {"type": "WarmupLR"}}, ["'scheduler'", "section 'schedule'"]),
        ({"fp16": {"enabled": True}}, ["'fp16'", "precision.dtype"]),
        ({"gradient_allreduce_op": "sum"}, ["'gradient_allreduce_op'", "averaged"]),
        ({"gradient_cliping": 1.0}, ["'gradient_cliping'", "did you mean 'gradient_clipping'"]),
        ({"zero_optimisation": {}}, ["'zero_optimisation'", "did you mean 'zero_optimization'"]),
        ({"zero_optimization": True}, ["'zero_optimization' is True"]),
        ({"zero_optimization": {"stage": 4}}, ["stage is 4"]),
        ({"zero_optimization": {"stage": True}}, ["stage is True"]),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
            ["offload_optimizer", "AdamW"],
        ),
        (
            {"zero_optimization": {"stage": 1, "compute_grad_norm": False}},
            ["compute_grad_norm", "gradient norm"],
        ),
        ({"checkpoint": {"load_universal": True}}, ["'checkpoint.load_universal'", "layout"]),
        ("{", ["not readable JSON"]),
        ({"zero_optimization": {"stage": 1.0}}, ["stage is 1.0"]),
        ('{"bf16": {}, "bf16": {}}', ["not readable JSON", "the key 'bf16' twice"]),
        ('{"gradient_clipping": Infinity}', ["not readable JSON", "it has Infinity"]),
        ("[" * 100_000, ["not readable JSON", "nests too deeply"]),
        ("[1]", ["must be a JSON object"]),
    ],
)
def test_settings_that_are_refused_or_conflict_are_named(
    tmp_path: Path, settings: Any, words: list[str]
) -> None:
    config = demo(json_file(tmp_path, settings))
    with pytest.raises(UserError) as raised:
        settings_of(config, 4)
    for word in words:
        assert word in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(
        UserError, match="'zero9' is neither a file nor one of: auto, zero0, zero1, zero2, zero3"
    ):
        resolve(demo("deepspeed.config=zero9"), 4)


def test_bf16_without_zero_is_refused_under_tensor_parallelism() -> None:
    stage0 = ["precision.dtype=bf16", "deepspeed.overrides.zero_optimization.stage=0"]
    with pytest.raises(
        UserError,
        match=r"ZeRO stage 0 .*wrong gradient norm at parallel.tensor_model_parallel_size=2",
    ):
        resolve(demo(*stage0), 4)
    with pytest.raises(
        UserError, match=r"grad_accum_dtype=fp32 with precision.dtype=bf16.*stage 0"
    ):
        resolve(demo(*stage0, "parallel.tensor_model_parallel_size=1"), 4)
    resolve(
        demo(*stage0, "parallel.tensor_model_parallel_size=1", "precision.grad_accum_dtype=bf16"), 4
    )
    resolve(demo("deepspeed.overrides.zero_optimization.stage=0"), 4)  # fp32 is right without ZeRO


@pytest.mark.parametrize(
    ("adapters", "refusal"),
    [
        # DeepSpeed gathers no parameter of no elements, and then misses it.
        ("[low_rank]", "layer 0 has some on 2 of 4 ranks; choose ZeRO-2"),
        # It asks for the same list of parameters on every rank, else it ends at the first step.
        ("null", "has no trained head and another has: layer 0 has some on 2 of 4 ra"),
    ],
)
def test_parameters_on_some_ranks_only_are_refused_at_zero3(adapters: str, refusal: str) -> None:
    hybrid = [
        "attention.variant=hybrid",
        "attention.frozen_heads={0-1: 0.5}",
        f"attention.adapters={adapters}",
    ]

    def at(size: int, stage: int) -> Config:
        layout = [f"parallel.tensor_model_parallel_size={size}", f"deepspeed.config=zero{stage}"]
        return demo(*hybrid, *layout)

    resolve(at(2, 3), 4)
    resolve(at(4, 2), 4)
    with pytest.raises(UserError, match=refusal):
        resolve(at(4, 3), 4)
