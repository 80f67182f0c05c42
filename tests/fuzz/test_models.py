"""Foreign models and files of initial weights, after damage."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_patches.bank.initial_weights_file import GivenWeights
from pretrain.config.load import load_config
from pretrain.export.source_model import import_model, open_source
from tests.fuzz.damage import REFUSED, damaged, damaged_json, holding, odd_json, right_or_refused
from tests.pretrain.export.test_source_model import CONFIG, OVERRIDES, model
from tests.tiny_exports import tiny_language_model

pytestmark = pytest.mark.distributed  # seconds, for models that are opened again and again


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("foreign") / "model"
    model(directory)
    return directory


def all_weights(directory: Path) -> dict[str, torch.Tensor]:
    """Everything that an import reads."""
    opened = open_source(directory)
    assert all(torch.isfinite(weight).all() for weight in opened.weights.values())
    assert opened.section["num_layers"] >= 1 and opened.dtype in (torch.float32, torch.bfloat16)
    return opened.weights


@pytest.fixture(scope="module")
def json_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A Starcoder2's settings, the index of its files, and a GPT-2's settings."""
    root = tmp_path_factory.mktemp("json")
    for name in ("starcoder2", "in-files"):
        tensors = model(root / name)
    index = root / "in-files/model.safetensors.index.json"
    files = dict.fromkeys(tensors, "model.safetensors")
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    gpt2 = tiny_language_model(rotary=False)
    gpt2.config.activation_function = "gelu"  # the one that the program has
    gpt2.save_pretrained(root / "gpt2")
    return {
        "starcoder2": root / "starcoder2/config.json",
        "index": index,
        "gpt2": root / "gpt2/config.json",
    }


@given(st.data())
@pytest.mark.parametrize("name", ["starcoder2", "index", "gpt2"])
def test_json_files(json_files: dict[str, Path], name: str, data: st.DataObject) -> None:
    path = json_files[name]
    assert all_weights(path.parent)
    with holding(path, data.draw(damaged_json(path.read_bytes()))):
        right_or_refused(lambda: all_weights(path.parent))


def with_header(content: bytes, header: Any) -> bytes:
    """A safetensors file with another header before the same tensors."""
    length = int.from_bytes(content[:8], "little")
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


def damaged_safetensors(content: bytes) -> st.SearchStrategy[bytes]:
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    odd = odd_json(header).map(lambda value: with_header(content, value))
    return st.one_of(
        damaged(content), damaged(content[:600]).map(lambda head: head + content[600:]), odd, odd
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 2**63},
        {"hidden_size": 10**30},
        {"vocab_size": 10**9},
        {"intermediate_size": 10**7},
        {"rope_theta": 10**400},
        {"norm_epsilon": 10**400},
        {"num_attention_heads": 3},
        {"vocab_size": True},
        {"rope_parameters": {"rope_type": []}},
        {"head_dim": [1]},
    ],
)
def test_settings_that_are_refused(source: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    with holding(source / "config.json", json.dumps(CONFIG | changes).encode()):
        refused = right_or_refused(
            lambda: import_model(source, tmp_path / "out", "demo", OVERRIDES)
        )
        assert refused == REFUSED
        assert not (tmp_path / "out").exists()


@given(st.data())
def test_safetensors(source: Path, data: st.DataObject) -> None:
    path = source / "model.safetensors"
    with holding(path, data.draw(damaged_safetensors(path.read_bytes()))):
        right_or_refused(lambda: all_weights(source))


@pytest.fixture(scope="module")
def imported(source: Path) -> Path:
    out = source.with_name("imported")
    shutil.rmtree(out, ignore_errors=True)
    import_model(source, out, "demo", OVERRIDES)
    return out


@given(st.data())
def test_initial_weights(imported: Path, data: st.DataObject) -> None:
    path = imported / "weights.safetensors"
    content = path.read_bytes()
    expected = {role: GivenWeights(path).head(0, role, 1, 4) for role in ("query", "key")}
    with holding(path, data.draw(damaged_safetensors(content))):
        config = right_or_refused(lambda: load_config(str(imported / "config.yaml")))
        given_weights = GivenWeights(path)
        right_or_refused(lambda: given_weights.has("norm.weight"))
        right_or_refused(lambda: given_weights.sha256)
        for role, rows in expected.items():
            head = right_or_refused(lambda role=role: given_weights.head(0, role, 1, 4))
            assert (
                isinstance(head, str)
                or torch.equal(head, rows)
                or changed_digest(given_weights, content)
            )
        assert config is not None


@pytest.mark.parametrize(
    "before_after", [(b"num_layers", b"oum_layers"), (b'"heads"', b'"heat"\x85'), (b"{", b"[")]
)
def test_a_header_of_initial_weights(imported: Path, before_after: tuple[bytes, bytes]) -> None:
    path = imported / "weights.safetensors"
    with holding(path, path.read_bytes().replace(*before_after, 1)):
        assert right_or_refused(lambda: load_config(str(imported / "config.yaml"))) == REFUSED
        assert right_or_refused(lambda: GivenWeights(path).has("norm.weight")) in (REFUSED, True)


def changed_digest(given_weights: GivenWeights, content: bytes) -> bool:
    """Whether the header, and so the file's identity, is another: then the bank is another bank."""
    length = int.from_bytes(content[:8], "little")
    return given_weights._header != content[8 : 8 + length]
