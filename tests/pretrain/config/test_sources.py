"""Text that is no configuration: every such mistake is one sentence, soon, and exit code 2."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from pretrain.config.load import load_config, parse_config
from pretrain.config.refusals import check_layout
from pretrain.config.yaml_values import MAX_DEPTH, YamlProblem, parse_yaml
from pretrain.errors import UserError
from tests.ranks import ROOT

SOON = 30.0
"""Seconds. Each of these takes a few milliseconds; what is asserted is that none computes for ever."""


def refusal(name_or_path: str, *overrides: str) -> str:
    """The sentence of the refusal, which came soon and can be printed."""
    started = time.monotonic()
    with pytest.raises(UserError) as raised:
        check_layout(load_config(name_or_path, overrides), 2)
    assert time.monotonic() - started < SOON
    sentence = str(raised.value)
    assert "\n" not in sentence and len(sentence.encode()) < 5000
    return sentence


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("1: 2\n", "line 1: the key '1' is not text"),
        ("true: {a: 1}\n", "line 1: the key 'true' is not text"),
        ("null: 2\n", "line 1: the key 'null' is not text"),
        ("run:\n  name: x\n  7: 2\n", "line 3: the key '7' is not text"),
        ("run:\n  5e-4: 2\n", "line 2: the key '5e-4' is not text"),
        ("run: &again\n  name: *again\n", "at line 1 an alias inside of what it stands for"),
        ("run:\n  name: !!timestamp x\n", "at line 2 the tag !!timestamp"),
        ("run:\n  seed: !!int ''\n", "a tag does not go with its value"),
        ("run:\n  name: !!bool x\n", "a tag does not go with its value"),
        ('run:\n  name: "\\ud800"\n', "at line 2 half of a surrogate pair"),
        (f"run:\n  seed: {'9' * 41}\n", "at line 2 a whole number of more than 40 digits"),
        (f"run: {'[' * 33}{']' * 33}\n", f"nests deeper than {MAX_DEPTH} levels at line 1"),
        ("[" * 2000, f"nests deeper than {MAX_DEPTH} levels"),
        ("a" * 300_000, "is larger than 262,144 bytes"),
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    sentence = refusal(str(path))
    assert sentence.startswith(f"config {path}")
    assert named in sentence


def test_aliases_that_stand_for_more_than_memory_holds() -> None:
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    bomb = f"deepspeed.overrides={{{', '.join(levels)}}}"
    assert "more than 100,000 values once its aliases are written out" in refusal("demo", bomb)


def test_aliases_within_reason_are_values() -> None:
    assert parse_yaml("{a: &a [1, 2], b: *a}") == {"a": [1, 2], "b": [1, 2]}
    with pytest.raises(YamlProblem, match="nests deeper"):  # deep only once they are written out
        chain = ["a0: &a0 [x]", *(f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, 40))]
        parse_yaml("{" + ", ".join(chain) + "}")


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("run.name=\udcff", "override 'run.name=\\udcff' is not UTF-8 text"),
        ("r\udcffn.name=x", "override 'r\\udcffn.name=x' is not UTF-8 text"),
        ("deepspeed.overrides" + ".a" * 500 + "=1", f"nests deeper than {MAX_DEPTH} levels"),
        ("run.name=" + "x" * 5000, "at line 1 a text of more than 4,096 characters"),
        ("run.name=a\nb: c", "override 'run.name=a\\nb: c': the value is not valid YAML"),
        ("x" * 5000 + ".y=1", "has a key of more than 4,096 characters"),
        ('run.name="a\\0b"', "'run.name' is 'a\\x00b': it should have no control characters"),
        ('data.directory="a\\0b"', "'data.directory' is 'a\\x00b': it should have no control characters"),
        ("run.name=" + "ä" * 128, "it should have names of at most 255 bytes"),
        ("run.directory=a/" + "b" * 256, "it should have names of at most 255 bytes"),
        ("attention.frozen_heads={'" + "9" * 900 + "': 1}", "names no layers"),
        ("deepspeed.config=" + "x" * 4000, "is neither a file nor one of"),
    ],
)
def test_overrides_that_are_no_value(override: str, named: str) -> None:
    assert named in refusal("demo", override)


@pytest.mark.parametrize(
    "key",
    [
        "model.num_layers",
        "model.hidden_size",
        "model.num_attention_heads",
        "model.num_query_groups",
        "model.head_dim",
        "model.ffn_hidden_size",
        "model.vocab_size",
        "data.sequence_length",
        "data.micro_batch_size",
        "data.global_batch_size",
        "data.validation_samples",
        "data.loader_workers",
        "schedule.steps",
        "parallel.tensor_model_parallel_size",
        "parallel.timeout_seconds",
        "run.seed",
        "attention.seed",
        "data.seed",
    ],
)
@pytest.mark.parametrize("value", ["1000000000000", "1e300"])
def test_sizes_that_nothing_could_compute_with(key: str, value: str) -> None:
    if key.endswith("seed"):
        value = "18446744073709551616"
    assert f"'{key}' is " in (sentence := refusal("demo", f"{key}={value}"))
    assert "it should be less than or equal to" in sentence


def test_tokens_and_ranks_have_bounds_too() -> None:
    assert "'schedule.tokens'" in refusal("demo", "schedule.steps=null", "schedule.tokens=1e17")
    assert "'attention.low_rank'" in refusal(
        "demo", "attention.adapters=[low_rank]", "attention.low_rank=1e12"
    )


def test_the_largest_model_is_counted_soon() -> None:
    sizes = ["model.num_layers=2048", "model.num_attention_heads=4096", "model.head_dim=64"]
    started = time.monotonic()
    config = load_config("demo", [*sizes, "attention.frozen_heads={'0%-50%': 0.5}"])
    assert len(config.policy().frozen_groups(2048, 4096)) == 2048
    assert time.monotonic() - started < SOON


@pytest.mark.parametrize("key", [1, None, True, 2.5, ("a", "b")])
def test_plain_values_with_a_key_that_is_not_text(key: object) -> None:
    values = load_config("demo").resolved()
    with pytest.raises(UserError, match=r"^the key '.*' is not text"):
        parse_config({**values, key: {}})  # type: ignore[dict-item]
    with pytest.raises(UserError, match=r"^the key '.*' is not text"):
        parse_config({**values, "run": {**values["run"], key: 1}})  # type: ignore[dict-item]


def test_numbers_too_large_for_a_float() -> None:
    values = load_config("demo").resolved()
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
    for arguments in ([b"demo", b"run.name=\xff"], [str(path).encode()], [b"demo", b"model.num_layers=1e12"]):
        shown = subprocess.run(
            [sys.executable.encode(), b"-m", b"pretrain", b"show", *arguments],
            cwd=ROOT,
            capture_output=True,
            timeout=120,
        )
        assert shown.returncode == 2 and shown.stdout == b""
        assert shown.stderr.startswith(b"error: ") and shown.stderr.count(b"\n") == 1
