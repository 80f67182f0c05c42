"""Identity of a model directory, and damaged files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pretrain.errors import UserError
from pretrain.export.models import (
    model_digest,
    read_language_model,
    read_tokenizer,
    require_transformers,
)


def test_a_models_code_has_room_where_the_home_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("HF_MODULES_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", "/proc/nohome")
    require_transformers("export")
    assert Path(os.environ["HF_MODULES_CACHE"]).is_dir()


def test_the_identity_is_of_everything_that_decides_the_outputs(tmp_path: Path) -> None:
    counted = ("model.safetensors", "config.json", "tokenizer.json", "vocab.txt")
    for name in (*counted, "README.md", "export.json"):
        (tmp_path / name).write_text(name)
    digests = [model_digest(tmp_path)]
    for name in ("README.md", "export.json"):
        (tmp_path / name).write_text("another")
        assert model_digest(tmp_path) == digests[0]
    for name in counted:
        (tmp_path / name).write_text("another")
        digests.append(model_digest(tmp_path))
    (tmp_path / "vocab.txt").rename(tmp_path / "merges.txt")
    digests.append(model_digest(tmp_path))
    (tmp_path / "modeling.py").touch()
    digests.append(model_digest(tmp_path))
    assert len(set(digests)) == len(digests)


def _cut_short(directory: Path) -> None:
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])


def _without_a_weight(directory: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.1.mlp.c_fc.weight"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_cut_short, "transformers cannot load .*file not fully covered"),
        (_without_a_weight, r"has no weight model\.layers\.1\.mlp\.c_fc\.weight"),
        (
            lambda directory: (directory / "tokenizer.json").write_text('{"a": 1}'),
            "transformers cannot",
        ),
        (
            lambda directory: (directory / "tokenizer.json").unlink(),
            r"no tokenizer \(tokenizer\.json\)",
        ),
    ],
)
def test_a_damaged_directory_is_one_sentence(
    tiny_shards: Path, tmp_path: Path, spoil: Callable[[Path], object], said: str
) -> None:
    pytest.importorskip("transformers")
    from tests.tiny_exports import tiny_export

    directory = tiny_export(tmp_path / "export", tiny_shards, "vanilla")
    read_tokenizer(directory, False)
    read_language_model(directory, False, "auto")
    spoil(directory)
    with pytest.raises(UserError, match=said):
        read_language_model(directory, False, "auto")
        read_tokenizer(directory, False)
