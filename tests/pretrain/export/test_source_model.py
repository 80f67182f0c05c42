"""Import of foreign models, judged tensor by tensor; odd files are refused in one sentence."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pretrain.errors import UserError
from pretrain.export.source_model import SourceModel, _with_orthonormal_rows, import_model
from tests.command_line import assert_refused
from tests.ranks import warm_cli
from tests.tiny_exports import model_of

pytest.importorskip("transformers", reason="transformers is of the extra export")

LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
OVERRIDES = ["data.directory=shards", "run.name=x", "data.sequence_length=16"]
CONFIG: dict[str, Any] = {
    "model_type": "starcoder2",
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "hidden_act": "gelu",
    "rope_theta": 5000.0,
    "tie_word_embeddings": True,
    "use_bias": False,
    "initializer_range": 1.0,
}
QWEN3 = {"model_type": "qwen3", "hidden_act": "silu", "sliding_window": 16}


def model(directory: Path, **changes: Any) -> dict[str, torch.Tensor]:
    """Write a Starcoder2 of one layer; return its tensors."""
    torch.manual_seed(0)
    model_of(**CONFIG).save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(CONFIG | changes))
    return load_file(directory / "model.safetensors")


def write(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def refusal(directory: Path, out: Path) -> str:
    with pytest.raises(UserError) as refused:
        import_model(directory, out, "demo", OVERRIDES)
    assert not out.exists()
    return str(refused.value)


@pytest.mark.parametrize(
    ("of", "stored"),
    [("embed_tokens", torch.float32), ("q_proj", torch.float32), ("", torch.bfloat16)],
)
def test_no_tensor_is_rounded(tmp_path: Path, of: str, stored: torch.dtype) -> None:
    tensors = model(tmp_path / "in")
    mixed = {name: value.bfloat16() if of in name else value for name, value in tensors.items()}
    write(tmp_path / "in", mixed)
    config = import_model(tmp_path / "in", tmp_path / "out", "demo", OVERRIDES)
    weights = load_file(tmp_path / "out/weights.safetensors")
    assert {value.dtype for value in weights.values()} == {stored}
    for ours, theirs in (("embedding.word", "embed_tokens"), ("layer.0.attention.key", "k_proj")):
        (expected,) = [value for name, value in mixed.items() if theirs in name]
        assert torch.equal(weights[ours].float(), expected.float())
    assert config.given_weights is not None
    assert config.given_weights.head(0, "query", 0, 4).shape == (4, 8)


def test_rows_of_queries_and_keys_can_be_made_orthogonal(tmp_path: Path) -> None:
    tensors = model(tmp_path / "in")
    write(tmp_path / "in", {name: value.bfloat16() for name, value in tensors.items()})
    import_model(tmp_path / "in", tmp_path / "out", "demo", OVERRIDES, orthonormal=True)
    weights = load_file(tmp_path / "out/weights.safetensors")
    for role, theirs in {"query": "q_proj", "key": "k_proj", "value": "v_proj"}.items():
        original = tensors[f"model.layers.0.self_attn.{theirs}.weight"].bfloat16().float()
        rows = weights[f"layer.0.attention.{role}"]
        if role == "value":
            assert torch.equal(rows, original)
            continue
        for head, original_head in zip(rows.split(4), original.split(4), strict=True):
            gram = head @ head.t()
            length = float(gram.diagonal().mean())
            torch.testing.assert_close(gram, length * torch.eye(4), rtol=0, atol=1e-6 * length)
            # The nearest such rows: what is left over is orthogonal to them.
            assert float(((original_head - head) * head).sum()) == pytest.approx(
                0, abs=1e-5 * length
            )
            assert float((original_head - head).norm()) < float(original_head.norm())


def test_rows_of_heads_that_are_too_wide_cannot_be_orthogonal() -> None:
    sizes = {"head_dim": 16, "hidden_size": 8, "num_layers": 0}
    with pytest.raises(UserError, match="--orthonormal needs heads that are no wider than hidden"):
        _with_orthonormal_rows(SourceModel(sizes, {}, torch.float32))


def test_a_long_path_with_blanks(tmp_path: Path) -> None:
    model(tmp_path / "in")
    out = tmp_path / ("a directory of a long name: " + "with blanks " * 8) / "made here"
    config = import_model(tmp_path / "in", out, "demo", OVERRIDES)
    assert config.model.initial_weights == out / "weights.safetensors"
    with pytest.raises(UserError, match="exists already"):
        import_model(tmp_path / "in", out, "demo", OVERRIDES)


def _set(
    name: str, index: tuple[int, ...], value: float
) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name][index] = value

    return change


def _add(name: str, value: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.update({name: value})


LORA = "model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_set("model.norm.weight", (3,), float("nan")), "model.norm.weight holds NaN or infinity"),
        (_set("model.embed_tokens.weight", (3, 1), -float("inf")), "embed_tokens.weight holds NaN"),
        (_add(LORA, torch.ones(2, 8)), "q_proj.lora_A.weight has no place in the model here"),
        (
            _add("model.norm.weight", torch.ones(8).double()),
            "model.norm.weight is of type F64; only",
        ),
        (
            _add("model.norm.weight", torch.ones(8, dtype=torch.int32)),
            "model.norm.weight is of type I32; only",
        ),
        (
            _add("model.norm.weight", torch.ones(8).to(torch.float8_e4m3fn)),
            "model.norm.weight is of type F8_E4M3; only",
        ),
    ],
)
def test_values_and_tensors_that_cannot_be_imported(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], said: str
) -> None:
    tensors = model(tmp_path / "in")
    change(tensors)
    write(tmp_path / "in", tensors)
    assert said in refusal(tmp_path / "in", tmp_path / "out")


def test_a_tied_output_layer_and_buffers_may_be_there(tmp_path: Path) -> None:
    tensors = model(tmp_path / "in", use_bias=True)
    biases = {
        name.replace("weight", "bias"): torch.zeros(len(value))
        for name, value in tensors.items()
        if "proj" in name or "c_fc" in name
    }
    more = {
        "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
    }
    write(tmp_path / "in", tensors | more | biases)
    import_model(tmp_path / "in", tmp_path / "out", "demo", OVERRIDES)
    bias = "model.layers.0.self_attn.k_proj.bias"
    biases[bias][3] = 1e-3
    write(tmp_path / "in", tensors | more | biases)
    assert f"{bias} is not zero" in refusal(tmp_path / "in", tmp_path / "other")
    del biases[bias]  # as of a shard that was lost
    write(tmp_path / "in", tensors | more | biases)
    said = f"has no {bias}, which its config.json tells of"
    assert said in refusal(tmp_path / "in", tmp_path / "other")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope_theta": 10000.7}, "rope_theta is 10000.7, and model.rotary_base is a whole number"),
        ({"rope_parameters": [1]}, "transformers cannot load"),
        ({"num_attention_heads": 0}, "its num_attention_heads is 0, which no model has"),
        ({"num_hidden_layers": -1}, "its num_hidden_layers is -1, which no model has"),
        ({"hidden_act": "evil"}, "its hidden_act is 'evil' and here it is 'gelu'"),
        ({"rope_parameters": {"rope_type": "evil"}}, "its rope_type is 'evil', a scaled rotation"),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
            "its rope_type is 'linear', a scaled rotation",
        ),
        ({"sliding_window": 16}, "its sliding_window is 16"),
        (QWEN3 | {"use_sliding_window": True}, "its use_sliding_window is True and here it is Fal"),
        (QWEN3 | {"layer_types": ["sliding_attention"]}, "its layer_types has 'sliding_attention'"),
        ({"model_type": "mistral"}, "'mistral'; only starcoder2, gpt2, llama and qwen3 can be"),
        ({"num_hidden_layers": 2}, "has no weight model.layers.1.input_layernorm.weight"),
        ({"hidden_size": "8"}, "Field 'hidden_size' expected int, got str"),
        ({"num_hidden_layers": 1.5}, "Field 'num_hidden_layers' expected int, got float"),
        ({"norm_epsilon": "small"}, "Field 'norm_epsilon' expected float, got str"),
        ({"tie_word_embeddings": "yes"}, "Field 'tie_word_embeddings' expected bool, got str"),
        ({"model_type": ["starcoder2"]}, "transformers cannot load"),
        ({"auto_map": {"AutoConfig": "evil.Config"}}, "'evil.Config'}, code to run"),
    ],
)
def test_odd_configurations(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    model(tmp_path / "in", **changes)
    assert said in refusal(tmp_path / "in", tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.json", "[]", "transformers cannot load"),
        ("config.json", "{", "config.json cannot be read"),
        ("model.safetensors.index.json", '{"weight_map": {"a":', "transformers cannot load"),
        ("model.safetensors.index.json", '{"weight_map": 3}', "transformers cannot load"),
        (
            "model.safetensors.index.json",
            '{"metadata": {}, "weight_map": {"model.embed_tokens.weight": "gone"}}',
            "transformers cannot load",
        ),
        ("model.safetensors.index.json", '{"weight_map": {"a": "../a"}}', "names '../a', which is"),
        ("model.safetensors.index.json", '{"weight_map": {"a": "/a"}}', "names '/a', which is not"),
        ("config.json", '{"vocab_size": 3, "vocab_size": 32}', "has the key 'vocab_size' twice"),
        ("adapter_config.json", "{}", "merge it into that model first"),
        ("model.safetensors", "no weights at all", "Error while deserializing header"),
        ("model.safetensors", None, "no file named model.safetensors"),
        ("model.safetensors", LFS, "model.safetensors cannot be read: it is a pointer of Git LFS"),
        ("tokenizer.json", LFS, "fetch the file itself with `git lfs pull`"),
        ("config.json", LFS, "config.json cannot be read: it is a pointer of Git LFS"),
    ],
)
def test_odd_files(tmp_path: Path, name: str, content: str | None, said: str) -> None:
    model(tmp_path / "in")
    if name.endswith("index.json") or content is None:
        (tmp_path / "in/model.safetensors").unlink()
    if content is not None:
        (tmp_path / "in" / name).write_text(content)
    assert said in refusal(tmp_path / "in", tmp_path / "out")


def test_a_tensor_of_another_kind_of_shape(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "vocab_size": 32, "activation_function": "gelu"}
    config |= {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}
    (tmp_path / "in").mkdir()
    (tmp_path / "in/config.json").write_text(json.dumps(config))
    shapes = {"wte.weight": (32, 8), "wpe.weight": (16, 8), "h.0.attn.c_attn.weight": (8, 2, 2)}
    shapes |= {"h.0.ln_1.weight": (8,), "h.0.ln_1.bias": (8,)}
    write(tmp_path / "in", {name: torch.ones(shape) for name, shape in shapes.items()})
    said = refusal(tmp_path / "in", tmp_path / "out")
    assert "h.0.attn.c_attn.weight has the shape (8, 2, 2)" in said
    assert "its config.json makes it (8, 24)" in said


HALVES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def in_two_files(directory: Path, tensors: dict[str, torch.Tensor], **more: torch.Tensor) -> None:
    """Write the model with an index; what is `more` is in the second file too."""
    names = sorted(tensors)
    halves = {name: HALVES[position >= 5] for position, name in enumerate(names)}
    for half in HALVES:
        half_tensors = {name: tensors[name] for name in names if halves[name] == half}
        save_file(
            half_tensors | (more if half == HALVES[1] else {}), directory / half, {"format": "pt"}
        )
    (directory / "model.safetensors").unlink()
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": halves}))


def no_second_file(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    in_two_files(directory, tensors)
    (directory / HALVES[1]).unlink()


def in_both_files(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    name = sorted(tensors)[0]
    in_two_files(directory, tensors, **{name: tensors[name] + 1})


def a_key_twice(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    in_two_files(directory, tensors)
    index = directory / "model.safetensors.index.json"
    name = json.dumps({sorted(tensors)[0]: HALVES[1]})[1:-1]
    index.write_text(index.read_text().replace('"weight_map": {', f'"weight_map": {{{name}, '))


def another_head(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    write(directory, tensors | {"lm_head.weight": torch.ones(32, 8)})


def a_link(directory: Path, _: dict[str, torch.Tensor]) -> None:
    (directory / "model.safetensors").rename(directory.with_name("elsewhere"))
    (directory / "model.safetensors").symlink_to("../elsewhere")


def a_pipe(directory: Path, _: dict[str, torch.Tensor]) -> None:
    os.mkfifo(directory / "model-2.safetensors")


def cut_short(directory: Path, _: dict[str, torch.Tensor]) -> None:
    file = directory / "model.safetensors"
    os.truncate(file, file.stat().st_size - 100)


def a_billion_layers(directory: Path, _: dict[str, torch.Tensor]) -> None:
    (directory / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 10**9}))


def another_shape(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    write(directory, tensors | {"model.norm.weight": torch.ones(9)})


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (no_second_file, HALVES[1]),
        (in_both_files, f"is in {HALVES[0]} and in {HALVES[1]}"),
        (a_key_twice, "it has the key 'model.embed_tokens.weight' twice"),
        (another_head, "tie_word_embeddings is true, and lm_head.weight is not the embedding"),
        (a_link, "elsewhere, outside of the directory: put the file itself there"),
        (a_pipe, "model-2.safetensors cannot be read: it is not a regular file"),
        (cut_short, "in: model.safetensors: Error while deserializing"),
        (a_billion_layers, "config.json tells of 1000000000 layers, and the files have 13"),
        (another_shape, "model.norm.weight has the shape (9,), and its config.json makes it (8,)"),
    ],
)
def test_hostile_directories(
    tmp_path: Path, spoil: Callable[[Path, dict[str, torch.Tensor]], None], said: str
) -> None:
    spoil(tmp_path / "in", model(tmp_path / "in"))
    assert said in refusal(tmp_path / "in", tmp_path / "out")


@pytest.mark.distributed
def test_the_command_refuses_in_one_sentence(tmp_path: Path) -> None:
    directory, out = tmp_path / "in", tmp_path / "out"
    a_billion_layers(directory, model(directory))
    done = warm_cli(["import", str(directory), "--out", str(out), "--config", "demo", *OVERRIDES])
    assert_refused(done, "config.json tells of 1000000000 layers, and the files have 13 tensors")
    assert not out.exists()


def test_weights_in_two_files_and_of_the_hubs_cache(tmp_path: Path) -> None:
    cache = tmp_path / "models--a--b"
    directory = cache / "snapshots/0123"
    directory.parent.mkdir(parents=True)
    in_two_files(directory, model(directory))
    (cache / "blobs").mkdir()
    for number, name in enumerate(HALVES):
        (directory / name).rename(cache / f"blobs/{number}")
        (directory / name).symlink_to(f"../../blobs/{number}")
    import_model(directory, tmp_path / "out", "demo", OVERRIDES)
