"""The configuration tree: reading, overriding, resolving and showing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_patches.recipe.counting import executed_flops_per_token
from pretrain.config.load import load_config, load_config_with_origins
from pretrain.config.refusals import names_for_factors
from pretrain.config.resolved import resolve
from pretrain.config.show import render_show, render_tensors, summary_rows, value_rows
from tests.pretrain.config.configurations import yaml_file
from tests.ranks import ROOT

NAMES = ["demo", "small", "base", "large"]
NAMES += [f"{name}_modern" for name in NAMES]
ATTENTION = "decoder.layers.L.self_attention"


# Shipped configurations


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("variant", ["vanilla", "orthogonal", "orthogonal_trainable", "gaussian"])
def test_shipped_configurations_load_and_can_be_laid_out(name: str, variant: str) -> None:
    config = load_config(name, [f"attention.variant={variant}"])
    resolve(config, 4 if name.startswith("demo") else 8)
    assert (not config.policy.trainable) is (variant in ("orthogonal", "gaussian"))


@pytest.mark.parametrize(
    ("name", "shape", "schedule", "steps"),
    [
        ("small", (6, 512, 8, 64, 2048), (5e-4, 4000, "cosine", 0.1, 2_000_000_000), 100_000),
        (
            "base",
            (12, 768, 12, 64, 3072),
            (3e-4, 8000, "cosine_restarts", 0.1, 25_000_000_000),
            300_000,
        ),
        (
            "large",
            (24, 1024, 16, 64, 4096),
            (2e-4, 12000, "polynomial", 0.05, 100_000_000_000),
            500_000,
        ),
    ],
)
def test_the_configurations_of_the_method(
    name: str, shape: tuple[int, ...], schedule: tuple[Any, ...], steps: int
) -> None:
    config = load_config(name)
    model, plan = config.model, config.schedule
    sizes = (
        model.num_layers,
        model.hidden_size,
        model.num_attention_heads,
        config.head_dim,
        config.ffn_hidden_size,
    )
    assert sizes == shape
    peak = config.optimizer.learning_rate
    assert (peak, plan.warmup_steps, plan.kind, plan.min_ratio, plan.tokens) == schedule
    assert (model.dropout, config.data.sequence_length, model.vocab_size) == (0.1, 512, 32000)
    assert (config.optimizer.betas, config.optimizer.eps) == ((0.9, 0.98), 1e-8)
    assert (config.optimizer.weight_decay, config.optimizer.gradient_clip) == (0.01, 1.0)
    assert (model.position_embedding, model.tied_embeddings) == ("learned", True)
    assert config.total_steps == pytest.approx(steps, rel=0.03)
    last_step = config.total_steps * config.tokens_per_step
    tokens = plan.tokens or 0
    assert last_step - config.tokens_per_step < tokens <= last_step


# Derived values


def test_unset_values_follow_from_others() -> None:
    config = load_config("demo", ["run.seed=7", "run.directory=elsewhere", "run.name=x"])
    assert (config.num_query_groups, config.head_dim, config.ffn_hidden_size) == (4, 32, 512)
    assert (config.bank_seed, config.data_seed) == (7, 7)
    assert config.run_path == Path("elsewhere/x")
    assert config.tokens_per_step == config.data.global_batch_size * 128


def test_given_values_win() -> None:
    sizes = ["model.num_query_groups=2", "model.head_dim=16", "model.ffn_hidden_size=100"]
    config = load_config("demo", [*sizes, "attention.seed=0", "data.seed=2"])
    assert (config.num_query_groups, config.head_dim, config.ffn_hidden_size) == (2, 16, 100)
    assert (config.bank_seed, config.data_seed) == (0, 2)


@pytest.mark.parametrize(("tokens", "steps"), [(4096, 2), (4097, 3), (1, 1)])
def test_tokens_are_rounded_up_to_steps(tokens: int, steps: int) -> None:
    batch = ["data.micro_batch_size=4", "data.global_batch_size=16", "schedule.warmup_steps=0"]
    config = load_config("demo", [*batch, "schedule.steps=null", f"schedule.tokens={tokens}"])
    assert config.total_steps == steps


def test_policy_overrides_reach_the_policy() -> None:
    config = load_config("demo", ["attention.construction=svd", "attention.scope=layer"])
    assert (config.policy.construction, config.policy.scope) == ("svd", "layer")
    gaussian = load_config("demo", ["attention.variant=gaussian", "attention.gaussian_std=0.05"])
    assert gaussian.policy.gaussian_std == 0.05


# Overrides and YAML scalars


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5e-4", 5e-4),
        ("1E-3", 1e-3),
        ("0.01", 0.01),
        (".5", 0.5),
        ("1.", 1.0),
        ("+2e-2", 0.02),
        ("1", 1.0),
    ],
)
def test_floats_without_a_dot_are_floats(tmp_path: Path, text: str, value: float) -> None:
    assert load_config("demo", [f"optimizer.learning_rate={text}"]).optimizer.learning_rate == value
    lines = load_config("demo").to_yaml().replace("learning_rate: 0.003", f"learning_rate: {text}")
    assert load_config(yaml_file(tmp_path, lines)).optimizer.learning_rate == value


@pytest.mark.parametrize("text", ["200000", "200_000", "2e5", "2.0e+5"])
def test_whole_numbers_may_be_written_as_floats(text: str) -> None:
    assert (
        load_config("demo", ["schedule.steps=null", f"schedule.tokens={text}"]).schedule.tokens
        == 200_000
    )


def test_words_that_yaml_1_1_takes_for_something_else_are_words() -> None:
    for name in ("on", "no", "12:30"):
        assert load_config("demo", [f"run.name={name}"]).run.name == name


def test_the_last_override_wins_and_lists_parse() -> None:
    config = load_config("demo", ["run.seed=1", "run.seed=2", "optimizer.betas=[0.8, 0.9]"])
    assert config.run.seed == 2
    assert config.optimizer.betas == (0.8, 0.9)


def test_an_override_unsets_the_key_of_the_file_that_it_excludes() -> None:
    loaded = load_config_with_origins("large", ["schedule.steps=20000"])
    assert (loaded.config.schedule.steps, loaded.config.schedule.tokens) == (20000, None)
    rows = {key: (value, origin) for key, value, origin, _ in value_rows(loaded)}
    assert rows["schedule.tokens"] == ("null", "override")
    demo = load_config("demo", ["schedule.tokens=2e5"])
    assert (demo.schedule.steps, demo.schedule.tokens) == (None, 200_000)
    blend = load_config("demo", [f"data.blend={BLEND}"])
    assert blend.data.directory is None
    assert load_config("demo", ["schedule.tokens=null"]).schedule.steps == 240


FREEZES = "vanilla; attention.phases=[{at: 0.2, freeze: 0-1}, {at: 0.7, freeze: all}]"


@pytest.mark.parametrize(
    "variant", ["vanilla", "orthogonal", "monarch", "synthesizer_random", "unfreeze", FREEZES]
)
@pytest.mark.parametrize("steps", [12, 37, 240, 241])
def test_flops_are_rounded_up_to_the_fewest_whole_steps(variant: str, steps: int) -> None:
    common = [*f"attention.variant={variant}".split("; "), "schedule.warmup_steps=2"]

    def steps_of(flops: int) -> int:
        return load_config("demo", [*common, f"schedule.flops={flops}"]).total_steps

    fixed = load_config("demo", [*common, f"schedule.steps={steps}"])
    by_hand = sum(
        executed_flops_per_token(fixed.shape, fixed.policy, fixed.phase_at(step).number)
        for step in range(1, steps + 1)
    )
    assert fixed.total_flops == by_hand * fixed.tokens_per_step
    assert steps_of(fixed.total_flops) == steps
    assert steps_of(fixed.total_flops - 1) == steps
    assert steps_of(fixed.total_flops + 1) == steps + 1


def test_flops_unset_the_length_of_the_file_and_show_has_them() -> None:
    loaded = load_config_with_origins("large", ["schedule.flops=1e19"])
    assert (loaded.config.schedule.steps, loaded.config.schedule.tokens) == (None, None)
    assert dict(summary_rows(loaded.config))["total FLOPs, executed"] == "1e+19"


# Round trip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("variant", ["vanilla", "orthogonal", "gaussian"])
def test_the_yaml_of_a_configuration_is_the_same_run(
    tmp_path: Path, name: str, variant: str
) -> None:
    config = load_config(
        name,
        [f"attention.variant={variant}", "deepspeed.overrides.dump_state=true", "run.name=5e-4x"],
    )
    again = load_config(yaml_file(tmp_path, config.to_yaml()))
    assert again.to_yaml() == config.to_yaml()
    assert again.policy == config.policy
    assert again.shape == config.shape
    for field in (
        "bank_seed",
        "data_seed",
        "total_steps",
        "tokens_per_step",
        "run_path",
        "optimizer",
        "deepspeed",
    ):
        assert getattr(again, field) == getattr(config, field), field


@pytest.mark.parametrize("name", ["5e-4", "on", "1234", "null", "true", "1_0"])
def test_names_that_look_like_something_else_survive(tmp_path: Path, name: str) -> None:
    config = load_config("demo", [f"run.name='{name}'"])
    assert config.run.name == name
    assert load_config(yaml_file(tmp_path, config.to_yaml())).run.name == name
    assert yaml.safe_load(config.to_yaml())["run"]["name"] == name  # and other readers agree


def test_the_yaml_does_not_depend_on_defaults_of_other_values(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, load_config("demo").to_yaml())
    later = load_config(path, ["run.seed=99", "attention.variant=orthogonal_trainable"])
    assert (later.bank_seed, later.data_seed) == (1234, 1234)
    assert later.policy.trainable


# show


def test_origins_say_where_each_value_came_from(tmp_path: Path) -> None:
    text = "\n" + load_config("demo").to_yaml()
    path = yaml_file(tmp_path, text)
    loaded = load_config_with_origins(path, ["run.seed=5", "deepspeed.overrides.dump_state=true"])
    rows = {key: (value, origin) for key, value, origin, _ in value_rows(loaded)}
    assert rows["run.seed"] == ("5", "override")
    assert rows["run.name"] == ("demo", f"{path}:3")
    assert rows["deepspeed.overrides"] == ('{"dump_state": true}', "override")
    shipped = load_config_with_origins("demo")
    rows = {key: (value, origin) for key, value, origin, _ in value_rows(shipped)}
    assert rows["optimizer.betas"] == ("[0.9, 0.98]", "default")
    assert rows["model.head_dim"] == ("32", "derived")
    assert rows["attention.scope"] == ("head", "derived")
    assert rows["model.num_layers"][1].startswith("demo.yaml:")


def test_show_prints_values_origins_and_the_summary() -> None:
    text = render_show("small", ["run.seed=5"])
    assert re.search(r"^model.hidden_size +512 +small.yaml:\d+$", text, re.MULTILINE)
    assert re.search(r"^run.seed +5 +override$", text, re.MULTILINE)
    assert re.search(r"^model.rotary_base +10000 +default$", text, re.MULTILINE)
    for words in ("35.5 M", "3.15 M", "97,657", "parallel.tensor_model_parallel_size"):
        assert words in text
    assert "Width of the residual stream." not in text
    assert "Width of the residual" in render_show("small", meanings=True)


@pytest.mark.parametrize(
    ("variant", "name", "held"),
    [
        ("monarch", "frozen Query/Key factors", "for each of both"),
        ("monarch_trainable", "trained Query/Key factors", "for each of both"),
        ("monarch_shared_conv", "frozen Query/Key factors", "once for both"),
    ],
)
def test_the_summary_says_how_factors_are_held(variant: str, name: str, held: str) -> None:
    rows = dict(summary_rows(load_config("large", [f"attention.variant={variant}"])))
    assert rows[name] == f"32 blocks of 32 x 32, then 32 of 32 x 32, {held}"


def test_the_summary_counts() -> None:
    rows = dict(summary_rows(load_config("large")))
    assert rows["parameters, total"].endswith("(335.4 M)")
    assert rows["parameters, frozen"].endswith("(50.33 M, 15.0%)")
    assert rows["tokens per step"] == "204,800"
    assert rows["total steps"] == "488,282"
    vanilla = dict(summary_rows(load_config("large", ["attention.variant=vanilla"])))
    assert vanilla["parameters, frozen"].startswith("0 ")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["attention.variant=vanilla"], "executed: 0.0% fewer"),
        (["attention.variant=unfreeze"], "executed: 1.4% fewer"),
        (
            ["attention.variant=vanilla", "attention.phases=[{at: 0.25, freeze: all}]"],
            "executed: 2.4% fewer",
        ),
        (["attention.variant=low_rank"], "executed: 8.3% fewer"),
        (["attention.variant=vanilla", "attention.adapters=[low_rank]"], "executed: 1.2% more"),
    ],
)
def test_the_summary_counts_the_flops_of_the_whole_run(changes: list[str], said: str) -> None:
    rows = dict(summary_rows(load_config("demo", changes)))
    assert rows["training FLOPs per token"].endswith(f"; {said}")


# Blends


BLEND = "[{directory: a, weight: 0.7, sources: {Book: 2, Wiki: 1}}, {directory: b, weight: 3}]"


def test_a_blend_is_read_and_written_back(tmp_path: Path) -> None:
    config = load_config("demo", ["data.directory=null", f"data.blend={BLEND}"])
    assert config.data.blend is not None
    first, second = config.data.blend
    assert (first.directory, first.weight, first.sources) == (
        Path("a"),
        0.7,
        {"Book": 2.0, "Wiki": 1.0},
    )
    assert (second.directory, second.weight, second.sources) == (Path("b"), 3.0, None)
    assert (
        load_config(yaml_file(tmp_path, config.to_yaml())).data
        == load_config(
            "demo", ["data.directory=null", f"data.blend={BLEND}", f"data.seed={config.data_seed}"]
        ).data
    )


def test_sample_orders_are_kept_beside_the_runs() -> None:
    assert load_config("demo", ["run.directory=x"]).sample_cache == Path("x/sample_order")
    assert load_config("demo", ["data.cache_directory=/fast"]).sample_cache == Path("/fast")


def test_every_path_may_begin_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}}')
    (tmp_path / "own.yaml").write_text(
        load_config("demo").to_yaml().replace("directory: demo/runs", "directory: ~/runs")
    )
    overrides = ["data.directory=~/shards", "data.cache_directory=~/cache"]
    config = load_config("~/own.yaml", [*overrides, "deepspeed.config=~/ds.json"])
    places = (config.run.directory, config.data.directory, config.data.cache_directory)
    assert places == (tmp_path / "runs", tmp_path / "shards", tmp_path / "cache")
    assert resolve(config, 4).layout.zero_stage == 1
    assert str(tmp_path / "runs") in config.to_yaml() and "~" not in config.to_yaml()
    blend = load_config("demo", ["data.directory=null", "data.blend=[{directory: ~/a, weight: 1}]"])
    assert blend.data.blend is not None and blend.data.blend[0].directory == tmp_path / "a"


def test_show_prints_the_names_that_patterns_match() -> None:
    """With the rate and the decay that each then has; rows that never train are not there."""
    settings = [
        "attention.adapters=[short_convolution, channel_scale]",
        "optimizer.learning_rate=0.02",
        "optimizer.learning_rate_factors={'*_taps': 3, 'decoder.layers.1.*': 0.5}",
        "optimizer.weight_decay=0.1",
        "optimizer.weight_decay_factors={'*.linear_fc1.weight': 0.5}",
    ]
    header, *lines = render_tensors("demo_modern", settings).splitlines()
    assert header.split() == ["name", "shape", "rule", "peak", "rate", "weight", "decay"]
    rows = {name: cells for name, *cells in map(str.split, lines)}
    layer = "decoder.layers.{}.self_attention.linear_qkv.{}"
    assert rows[layer.format(1, "adapters.key_taps")] == ["128x4", "adamw", "0.06", "0"]
    assert rows[layer.format(1, "adapters.log_scale")] == ["128", "adamw", "0.01", "0"]
    assert rows[layer.format(1, "value_weight")] == ["128x128", "muon", "0.01", "0.1"]
    assert rows["decoder.layers.0.mlp.linear_fc1.weight"] == ["704x128", "muon", "0.02", "0.05"]
    assert rows["decoder.final_layernorm.weight"][2:] == ["0.02", "0"]
    assert layer.format(0, "query_key_weight") not in rows
    for key, names in names_for_factors(load_config("demo_modern", settings)).items():
        assert set(names) <= rows.keys(), key
    later = ["attention.variant=unfreeze"]  # its rows train from a later phase on
    assert any("query_key" in line for line in render_tensors("demo", later).splitlines())


def test_the_page_has_every_name_that_patterns_match() -> None:
    adapters = "attention.adapters=[low_rank, query_key_bias, short_convolution, channel_scale]"
    runs = (
        ("demo_modern", [adapters, "attention.variant=orthogonal"]),
        ("demo", ["attention.variant=vanilla", "model.position_embedding=learned"]),
        ("demo", ["attention.variant=unfreeze"]),
        ("demo", ["attention.variant=low_rank"]),
        ("demo", ["attention.variant=monarch_trainable"]),
        ("demo", ["attention.variant=synthesizer_random"]),
        ("demo", ["attention.variant=synthesizer_factorized"]),
    )
    names = {
        re.sub(r"layers\.\d+", "layers.L", tensor.name).replace(f"{ATTENTION}.", "A.")
        for name, settings in runs
        for tensor in load_config(name, settings).ever_trained
        if not tensor.name.endswith("layernorm.bias")
    }
    page = (ROOT / "docs/optimizers.md").read_text()
    section = page.partition("## Names that patterns match")[2].partition("\n## ")[0]
    rows = [row.rpartition(" | ")[2] for row in section.splitlines() if row.startswith("| ")]
    stated = {name for row in rows for name in re.findall(r"`([^`]+\.[^`]+)`", row)}
    assert names - stated == {"A.linear_v.weight"}  # a Synthesizer's, in the first column
    assert stated <= names
