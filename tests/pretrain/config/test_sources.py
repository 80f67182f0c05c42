"""Text that is no configuration: every such mistake is one sentence, and exit code 2."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.config.load import load_config, parse_config
from pretrain.config.resolved import resolve
from pretrain.config.sources import parse_yaml
from pretrain.errors import UserError
from tests.ranks import ROOT


def refusal(name_or_path: str, *overrides: str) -> str:
    """Return the sentence of the refusal."""
    with pytest.raises(UserError) as raised:
        resolve(load_config(name_or_path, overrides), 2)
    sentence = str(raised.value)
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("1: 2\n", "line 1: the key '1' is not text"),
        ("true: {a: 1}\n", "line 1: the key 'true' is not text"),
        ("null: 2\n", "line 1: the key 'null' is not text"),
        ("run:\n  name: x\n  7: 2\n", "line 3: the key '7' is not text"),
        ("run:\n  5e-4: 2\n", "line 2: the key '5e-4' is not text"),
        ("run:\n  seed: !!int ''\n", "is not valid YAML"),
        ("run:\n  name: !!bool x\n", "is not valid YAML"),
        ("run:\n  name: !mine x\n", "is not valid YAML: line 2"),
        ("[" * 2000, "is not valid YAML"),
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    sentence = refusal(str(path))
    assert sentence.startswith(f"config {path}")
    assert named in sentence


def test_aliases_are_values() -> None:
    assert parse_yaml("{a: &a [1, 2], b: *a}") == {"a": [1, 2], "b": [1, 2]}


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("run.name=a\nb: c", "override 'run.name=a\\nb: c': the value is not valid YAML"),
        ("run.name=\udcff", "the value is not valid YAML"),
        ("attention.frozen_heads={'" + "9" * 900 + "': 1}", "names no layers"),
        ("deepspeed.config=none.json", "is neither a file nor one of"),
        ("run.name=my run", "'run.name' is 'my run': it should be one word without /"),
        ("attention.adapters=low_rank", "it should be a list, such as [a, b]"),
        ("attention.frozen_heads=0.5", "it should be a mapping, such as {key: value}"),
    ],
)
def test_overrides_that_are_no_value(override: str, named: str) -> None:
    assert named in refusal("demo", override)


def test_numbers_too_large_for_a_float() -> None:
    values = load_config("demo").as_dict()
    values["attention"]["frozen_heads"] = {"0": 10**400}
    with pytest.raises(UserError, match=r"attention\.frozen_heads"):
        parse_config(values)


@pytest.mark.parametrize("name", ["a" * 400, "a/b\udcff", "."])
def test_names_that_are_no_file(name: str) -> None:
    assert "is neither a file nor one of the shipped configs" in refusal(name)


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("\ufeff" + load_config("demo").to_yaml(), encoding="utf-8")
    assert load_config(str(path)).to_yaml() == load_config("demo").to_yaml()


def test_the_command_line_answers_with_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("1: 2\n")
    for arguments in (
        [str(path).encode()],
        [b"demo", b"run.name=\xff"],
        [b"demo", b"model.num_layers=x"],
    ):
        shown = subprocess.run(
            [sys.executable.encode(), b"-m", b"pretrain", b"show", *arguments],
            cwd=ROOT,
            capture_output=True,
            timeout=120,
        )
        assert shown.returncode == 2 and shown.stdout == b""
        assert shown.stderr.startswith(b"error: ") and shown.stderr.count(b"\n") == 1
