"""Every way in which a configuration is refused.

A sentence with the key, its place and the remedy.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pretrain.config.load import load_config, parse_config
from pretrain.errors import UserError
from tests.pretrain.config.configurations import refusal, yaml_file

# Malformed overrides


@pytest.mark.parametrize("item", ["run.seed", "seed=3", "=3", "run.=3", ".seed=3", "run..seed=3"])
def test_malformed_overrides(item: str) -> None:
    assert f"override '{item}' is not of the form section.key=value" in refusal("demo", item)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("run.name=a\nb: c", "override 'run.name=a\\nb: c': the value is not valid YAML"),
        ("optimizer.betas=[1, ", "override 'optimizer.betas=[1, ': the value is not valid YAML"),
        ("run.name=\udcff", "the value is not valid YAML"),
        ("attention.frozen_heads={'" + "9" * 900 + "': 1}", "names no layers"),
        ("deepspeed.config=none.json", "is neither a file nor one of"),
        ("telemetry.profile={at: 1, at: 2}", "line 1: key 'at' is given twice; remove one"),
        ("telemetry.profile={at:1}", "line 1: 'at:1' is a key without a value; write a space"),
        ("telemetry.profile={[at]}", "line 1: found unhashable key"),
        ("model.dropout=!!timestamp x", "what is written after !!timestamp is not a date"),
        ('run.name="\\UFFFFFFFF"', "the value is not valid YAML: "),
        ('run.name="\\U00110000"', "the value is not valid YAML: "),
        ("run.name=my run", "'run.name' is 'my run': it should be one word without /"),
        ("attention.adapters=low_rank", "it should be a list, such as [a, b]"),
        ("attention.frozen_heads=0.5", "it should be a mapping, such as {key: value}"),
    ],
)
def test_overrides_that_are_no_value(override: str, problem: str) -> None:
    assert problem in refusal("demo", override, ranks=2)


def test_numbers_too_large_for_a_float() -> None:
    values = load_config("demo").as_dict()
    values["attention"]["frozen_heads"] = {"0": 10**400}
    with pytest.raises(UserError, match=r"attention\.frozen_heads"):
        parse_config(values)


@pytest.mark.parametrize("name", ["a" * 400, "a/b\udcff", "."])
def test_names_that_are_no_file(name: str) -> None:
    assert "is neither a file nor one of the shipped configs" in refusal(name)


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "\ufeff" + load_config("demo").to_yaml())
    assert load_config(path).to_yaml() == load_config("demo").to_yaml()


# Names and places of mistakes


def test_unknown_names_of_configurations() -> None:
    assert (
        refusal("smal")
        == "config 'smal' is neither a file nor one of the shipped configs: base, base_modern, "
        "demo, demo_modern, large, large_modern, small, small_modern"
    )


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("model.hiden_size=1", "unknown key 'model.hiden_size'; did you mean 'model.hidden_size'?"),
        (
            "optimizer.lr=1",
            "unknown key 'optimizer.lr'; known keys of optimizer: kind, learning_rate",
        ),
        (
            "optimizer.warmup_steps=1",
            "unknown key 'optimizer.warmup_steps'; did you mean 'schedule.warmup_steps'?",
        ),
        ("optimiser.eps=1", "unknown section 'optimiser'; did you mean 'optimizer'?"),
        ("zzz.eps=1", "unknown section 'zzz'; known: run, model"),
    ],
)
def test_unknown_keys_name_the_nearest(override: str, hint: str) -> None:
    assert refusal("demo", override).startswith(f"override: {hint}")


def test_unknown_keys_in_a_file_name_its_line(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "run:\n  name: x\nmodel:\n  num_layer: 2\n")
    assert (
        refusal(path)
        == f"config {path} line 4: unknown key 'model.num_layer'; did you mean 'model.num_layers'?"
    )
    path = yaml_file(tmp_path, "run:\n  name: x\nmodels:\n  num_layers: 2\n")
    assert refusal(path) == f"config {path} line 3: unknown section 'models'; did you mean 'model'?"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("run:\n  name: x\n  name: y\n", "line 3: key 'run.name' is given twice"),
        ("a:\n  - {b: 1}\n  - {b: 1,\n     b: 2}\n", "line 4: key 'b' is given twice; remove one"),
        ("run:\n  name: [\n", "is not valid YAML: line"),
        ("- 1\n", "must be a mapping"),
        ("", "must be a mapping"),
        ("run: 3\n", "line 1: section 'run' must hold keys, but is 3"),
        ("run:\n", "line 1: section 'run' must hold keys, but is nothing"),
        ("run:\n  name: x\n", "section 'model' is missing and has no default"),
        ("? [a]\n: 1\n", "keys must be plain words"),
        ("1: 2\n", "line 1: the key '1' is not text"),
        ("true: {a: 1}\n", "line 1: the key 'true' is not text"),
        ("null: 2\n", "line 1: the key 'null' is not text"),
        ("run:\n  name: x\n  7: 2\n", "line 3: the key '7' is not text"),
        ("run:\n  5e-4: 2\n", "line 2: the key '5e-4' is not text"),
        ("run:\n  seed: !!int ''\n", "is not valid YAML"),
        ("run:\n  name: !!bool x\n", "is not valid YAML"),
        ("run:\n  name: !mine x\n", "is not valid YAML: line 2"),
        ("[" * 2000, "is not valid YAML"),
        ("#" * 300_000, "is longer than 262,144 bytes"),
    ],
)
def test_broken_files(tmp_path: Path, text: str, words: str) -> None:
    path = yaml_file(tmp_path, text)
    sentence = refusal(path)
    assert words in sentence
    assert sentence.startswith(f"config {path}")


def test_a_file_with_two_keys_that_exclude_each_other(tmp_path: Path) -> None:
    text = load_config("demo").to_yaml().replace("  tokens: null\n", "  tokens: 1000\n")
    path = yaml_file(tmp_path, text)
    assert "steps (240) and tokens (1000) are set; give exactly one" in refusal(path)
    assert "steps (240) and tokens (1000) are set" in refusal(path, "run.seed=3")


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    text = load_config("demo").to_yaml().replace("  num_layers: 4\n", "")
    assert "'model.num_layers' is missing and has no default" in refusal(yaml_file(tmp_path, text))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.num_layers=two", "'model.num_layers' is 'two': it should be a valid integer"),
        ("model.num_layers=2.5", "'model.num_layers' is 2.5: it should be a valid integer"),
        ("model.num_layers=true", "'model.num_layers' is True: it should be a valid integer"),
        ("model.num_layers=null", "'model.num_layers' is None: it should be a valid integer"),
        ("model.num_layers.x=2", "'model.num_layers' is {'x': 2}: it should be a valid integer"),
        ("model.num_layers=0", "'model.num_layers' is 0: it should be greater than or equal to 1"),
        ("model.tied_embeddings=1", "'model.tied_embeddings' is 1: it should be a valid boolean"),
        (
            "optimizer.learning_rate=fast",
            "'optimizer.learning_rate' is 'fast': it should be a valid number",
        ),
        ("optimizer.learning_rate=.nan", "'optimizer.learning_rate' is nan"),
        ("optimizer.learning_rate=0", "it should be greater than 0"),
        ("optimizer.betas=[0.9, 1.0]", "'optimizer.betas' is 1.0: it should be less than 1"),
        ("optimizer.betas=[0.9]", "optimizer.betas is [0.9]: it should be two numbers"),
        ("model.dropout=1.0", "'model.dropout' is 1.0: it should be less than 1"),
        ("model.dropout=-0.1", "it should be greater than or equal to 0"),
        (
            "schedule.min_ratio=1.5",
            "'schedule.min_ratio' is 1.5: it should be less than or equal to 1",
        ),
        (
            "schedule.kind=linear",
            "'schedule.kind' is 'linear': it should be 'cosine', 'cosine_restarts'",
        ),
        ("model.position_embedding=alibi", "it should be 'learned' or 'rope'"),
        ("precision.dtype=fp16", "it should be 'fp32' or 'bf16'"),
        ("run.name=a/b", "'run.name' is 'a/b'"),
        ('run.name="a\\e[2J"', r"'run.name' is 'a\x1b[2J': it should be one word without"),
        ('run.name="a\\0"', r"'run.name' is 'a\x00'"),
        ("run.name=a\u202eb", r"'run.name' is 'a\u202eb'"),
        ('run.directory="a\\0b"', "it holds NUL, which no path can"),
        ("run.name=..", "'run.name' is '..'"),
        ("run.name=2024", "'run.name' is 2024: it should be text; put what looks like a number in"),
        ("telemetry.profile=foo", "'telemetry.profile' is 'foo': it should be a mapping"),
        ("data.blend=[{directory: a, weigt: 1}]", "'data.blend.0.weigt' is 1: there is no such"),
        ("data.blend=[]", "'data.blend' is []"),
        ("data.blend=[{directory: a}]", "'data.blend.0.weight' is missing"),
        ("data.blend=[{directory: a, weight: 0}]", "'data.blend.0.weight' is 0: it should be gre"),
        (
            "data.blend=[{directory: a, weight: 1, sources: {x: -1}}]",
            "'data.blend.0.sources.x' is -1: it should be greater than 0",
        ),
        ("data.blend=[{directory: a, weight: 1, sources: {}}]", "'data.blend.0.sources' is {}"),
        (f"schedule.steps={10**30}", f"'schedule.steps' is {10**30}: it should be less than 2^53"),
        ("data.sequence_length=1e30", "it should be less than 2^53"),
        ("data.directory=3", "'data.directory' is 3"),
        ("attention.seed=-1", "it should be greater than or equal to 0"),
        ("deepspeed.overrides=3", "'deepspeed.overrides' is 3"),
    ],
)
def test_wrong_types_and_ranges(override: str, words: str) -> None:
    sentence = refusal("demo", override)
    assert words in sentence
    assert sentence.startswith("override: ")


def test_a_wrong_type_in_a_file_names_its_line(tmp_path: Path) -> None:
    text = load_config("demo").to_yaml().replace("num_layers: 4", "num_layers: four")
    line = text[: text.index("num_layers")].count("\n") + 1
    path = yaml_file(tmp_path, text)
    assert refusal(path).startswith(f"config {path} line {line}: 'model.num_layers' is 'four': ")


# Combinations that cannot be


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["optimizer.learning_rate_factors={'*_taps': 3}"],
            ["optimizer.learning_rate_factors: '*_taps' matches no trained weight"],
        ),
        (
            ["optimizer.weight_decay_factors={'*layernorm*': 0}"],
            ["optimizer.weight_decay_factors: '*layernorm*' matches no decayed weight"],
        ),
        (
            [
                "attention.adapters=[low_rank]",
                "optimizer.learning_rate_factors={'*.up_*': 3, '*.up_key': 2}",
            ],
            ["'*.up_key' matches no trained weight beyond those of the patterns before it"],
        ),
        (
            ["optimizer.muon.nesterov=false"],
            ["optimizer.muon.nesterov=False", "no effect", "optimizer.kind=adamw"],
        ),
        (
            ["optimizer.kind=muon", "optimizer.muon.output_learning_rate=0.001"],
            ["optimizer.muon.output_learning_rate=0.001", "model.tied_embeddings=false"],
        ),
        (
            ["optimizer.kind=muon", "attention.variant=orthogonal_penalty"],
            ["attention.variant=orthogonal_penalty with optimizer.kind=muon", "kind adamw"],
        ),
        (
            ["model.hidden_size=130"],
            ["model.hidden_size=130", "model.num_attention_heads=4", "model.head_dim"],
        ),
        (["model.num_query_groups=3"], ["model.num_attention_heads=4", "model.num_query_groups=3"]),
        (
            ["model.num_query_groups=1"],
            ["model.num_query_groups=1", "tensor_model_parallel_size=2", "key/value head"],
        ),
        (
            ["parallel.tensor_model_parallel_size=8"],
            ["num_query_groups=4", "tensor_model_parallel_size=8"],
        ),
        (
            ["parallel.tensor_model_parallel_size=3"],
            ["num_attention_heads=4", "tensor_model_parallel_size=3"],
        ),
        (
            ["model.num_attention_heads=12", "model.num_query_groups=3", "model.head_dim=16"],
            ["model.num_query_groups=3", "tensor_model_parallel_size=2"],
        ),
        (["model.vocab_size=4097"], ["model.vocab_size=4097", "tensor_model_parallel_size=2"]),
        (["model.vocab_multiple=4097"], ["model.vocab_multiple", "tensor_model_parallel_size=2"]),
        (
            ["model.vocab_multiple=8192"],
            ["model.vocab_multiple=8192", "without any of the 4096 tokens"],
        ),
        (
            ["model.ffn_hidden_size=511"],
            ["model.ffn_hidden_size=511", "tensor_model_parallel_size=2"],
        ),
        (
            ["parallel.sequence_parallel=true", "data.sequence_length=127"],
            ["data.sequence_length=127", "tensor_model_parallel_size", "=2"],
        ),
        (
            ["parallel.sequence_parallel=true", "parallel.tensor_model_parallel_size=1"],
            ["sequence_parallel=true", "tensor_model_parallel_size=1"],
        ),
        (["model.position_embedding=rope", "model.head_dim=31"], ["position_embedding=rope", "31"]),
        (
            ["schedule.tokens=1000", "schedule.flops=1e12"],
            ["tokens (1000) and flops (1000000000000) are"],
        ),
        (["schedule.steps=null"], ["schedule.steps, schedule.tokens, schedule.flops: none is set"]),
        (
            ["schedule.steps=null", f"schedule.flops={10**40}"],
            ["schedule.flops=1000", "more than 2^53, and no run has that many"],
        ),
        (
            ["schedule.flops=1e9", "schedule.warmup_steps=9"],
            ["schedule.flops=1000000000", "the 1 steps"],
        ),
        (
            ["schedule.kind=wsd", "schedule.decay=0.9"],
            [
                "schedule.warmup_steps=30",
                "the 216 steps of schedule.decay=0.9",
                "more than the 240 steps",
            ],
        ),
        (["schedule.decay=0.1"], ["schedule.decay=0.1", "schedule.kind=cosine", "use kind wsd"]),
        (["schedule.branch_from=runs/x"], ["schedule.branch_from=runs/x", "schedule.kind=cosine"]),
        (
            ["schedule.steps=20", "schedule.warmup_steps=21"],
            ["schedule.warmup_steps=21", "the 20 steps"],
        ),
        (["schedule.cycles=2"], ["schedule.cycles=2", "schedule.kind=cosine"]),
        (["schedule.power=2"], ["schedule.power=2.0", "schedule.kind=cosine"]),
        (
            [
                "schedule.kind=cosine_restarts",
                "schedule.steps=20",
                "schedule.warmup_steps=15",
                "schedule.cycles=6",
            ],
            ["schedule.cycles=6", "5 steps after warmup"],
        ),
        (
            ["data.micro_batch_size=5", "data.global_batch_size=12"],
            ["data.global_batch_size=12", "data.micro_batch_size=5"],
        ),
        (["telemetry.profile={at: 240, steps: 2}"], ["telemetry.profile", "240 steps of the run"]),
        (
            ["telemetry.spectral_norms=['*']"],
            ["telemetry.spectral_norms", "telemetry.weights_every"],
        ),
        (
            ["telemetry.spectral_norms=['*layernorm*']", "telemetry.weights_every=5"],
            ["telemetry.spectral_norms: '*layernorm*' matches no trained matrix"],
        ),
        (["telemetry.sample_prompts=[The, '']"], ["telemetry.sample_prompts.1 is empty"]),
        (
            ["telemetry.sample_prompts=[The]", "telemetry.sample_tokens=128"],
            ["telemetry.sample_tokens=128", "data.sequence_length=128"],
        ),
        (
            ["telemetry.sample_prompts=[The]", "telemetry.tensorboard=false"],
            ["telemetry.sample_prompts", "telemetry.tensorboard=false"],
        ),
        (
            [f"telemetry.sample_prompts={['a'] * 9}"],
            ["telemetry.sample_prompts", "at most 8 items"],
        ),
        (
            ["precision.grad_accum_dtype=bf16"],
            ["precision.grad_accum_dtype=bf16", "precision.dtype=fp32"],
        ),
        (
            ["model.z_loss=1e-4", "performance.cross_entropy=megatron"],
            ["model.z_loss=0.0001", "performance.cross_entropy=in_place"],
        ),
        (
            ["model.qk_norm=true", "attention.variant=synthesizer_random"],
            ["model.qk_norm=true", "synthesizer_random does not have"],
        ),
        (
            ["model.qk_norm=true", "performance.recompute=query_key"],
            ["saves no memory with model.qk_norm"],
        ),
        (
            ["data.reset_at_document_end=true", "performance.recompute=query_key"],
            ["saves no memory with data.reset_at_document_end"],
        ),
        (
            ["optimizer.qk_clip=100", "attention.variant=vanilla", "model.qk_norm=true"],
            ["optimizer.qk_clip=100", "the norm of queries and keys undoes"],
        ),
        (
            ["optimizer.qk_clip=100", "attention.frozen_roles=key"],
            ["optimizer.qk_clip=100", "train as whole matrices"],
        ),
        (
            ["optimizer.qk_clip=100", "attention.variant=synthesizer_random"],
            ["optimizer.qk_clip=100", "train as whole matrices"],
        ),
        (["attention.variant=orthognal"], ["'orthognal'", "vanilla, orthogonal", "gaussian"]),
        (
            ["attention.construction=lu"],
            ["attention.construction", "'lu'", "qr, svd, householder, cayley"],
        ),
        (["attention.variant=vanilla", "attention.scope=head"], ["attention.scope", "'vanilla'"]),
        (["attention.gaussian_std=0.1"], ["attention.gaussian_std"]),
        (
            ["attention.variant=orthogonal", "performance.recompute=query_key"],
            ["attention.variant=orthogonal does not have"],
        ),
        (
            [
                "attention.variant=monarch",
                "attention.adapters=[channel_scale]",
                "performance.recompute=query_key",
            ],
            ["attention.variant=monarch with adapters does not have"],
        ),
        (
            [
                "attention.variant=monarch",
                "performance.compile=layers",
                "performance.recompute=query_key",
            ],
            ["set performance.compile=none"],
        ),
        (["model.head_dim=256"], ["head_dim=256", "hidden_size=128"]),
        (
            ["model.head_dim=64", "attention.scope=layer"],
            ["256", "hidden_size=128", "scope 'layer'"],
        ),
        (["data.directory=null"], ["data.directory and data.blend: neither is set; give exactly"]),
        (
            ["data.directory=b", "data.blend=[{directory: a, weight: 1}]"],
            ["data.directory and data.blend: both are set"],
        ),
    ],
)
def test_impossible_combinations(overrides: list[str], words: list[str]) -> None:
    sentence = refusal("demo", *overrides)
    for word in words:
        assert word in sentence


def test_what_only_a_frozen_bank_cannot_do_is_allowed_without_one() -> None:
    assert load_config("demo", ["attention.variant=vanilla", "model.head_dim=256"]).head_dim == 256
    assert load_config("demo", ["attention.variant=gaussian", "model.head_dim=256"]).head_dim == 256
    assert (
        load_config("demo", ["model.position_embedding=learned", "model.head_dim=31"]).head_dim
        == 31
    )


@pytest.mark.parametrize(
    ("world_size", "overrides", "words"),
    [
        (1, [], ["too few ranks", "tensor_model_parallel_size=2", "there is 1"]),
        (2, ["parallel.tensor_model_parallel_size=4"], ["too few ranks", "=4", "there are 2"]),
        (5, [], ["5 processes", "tensor_model_parallel_size=2"]),
        (
            12,
            ["data.micro_batch_size=4", "data.global_batch_size=16"],
            ["data.global_batch_size=16", "data.micro_batch_size=4", "6 data-parallel ranks"],
        ),
    ],
)
def test_impossible_layouts(world_size: int, overrides: list[str], words: list[str]) -> None:
    sentence = refusal("demo", *overrides, ranks=world_size)
    for word in words:
        assert word in sentence
