"""Files of configurations, and what is said where one is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from pretrain.config.load import load_config
from pretrain.config.resolved import resolve
from pretrain.errors import UserError


def yaml_file(directory: Path, text: str) -> str:
    """Write a configuration; return its path."""
    path = directory / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def refusal(name_or_path: str, *overrides: str, ranks: int | None = None) -> str:
    """Return the sentence with which a configuration is refused, alone or on so many ranks."""
    with pytest.raises(UserError) as raised:
        config = load_config(name_or_path, overrides)
        if ranks is not None:
            resolve(config, ranks)
    assert "\n" not in str(raised.value)
    return str(raised.value)
