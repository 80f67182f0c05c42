"""Identity of a model directory, and the refusal of its code."""

from __future__ import annotations

from pathlib import Path

import pytest

from pretrain.errors import UserError
from pretrain.study.models import model_digest, require_trust


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


def test_code_is_not_run_unasked(tmp_path: Path) -> None:
    require_trust(tmp_path, False)
    (tmp_path / "modeling.py").touch()
    require_trust(tmp_path, True)
    with pytest.raises(
        UserError, match=r"has code of its own, modeling.py: read it, then give --trust-code"
    ):
        require_trust(tmp_path, False)
