"""YAML files and overrides of the command line.

A configuration that says what was given, or one sentence.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from pretrain.config.keys import KEYS
from pretrain.config.load import load_config, parse_config
from pretrain.config.sources import dump_yaml, override_text, parse_overrides, parse_yaml
from tests.fuzz.damage import damaged, odd_json, odd_values, right_or_refused

DEMO = (Path(__file__).parents[2] / "pretrain/configs/demo.yaml").read_bytes()
words = st.one_of(
    odd_values.map(lambda value: json.dumps(value)),
    st.text(max_size=12),
    st.sampled_from(
        [
            "~",
            "off",
            "1e-3",
            "[1, 2]",
            "{a: b}",
            "!!python/object:os.system x",
            "&a [*a]",
            "*a",
            "!!binary x",
            "!!timestamp 2001-99-99",
            "!!set {a}",
            "? a",
            "1_0",
            "0x10",
            "0o7",
            "1:20",
            "2001-01-01",
            "<<: {a: 1}",
            "- a",
            "|\n x",
            "'",
            '"\\ud800"',
            "!!int x",
            "!!float []",
            "!!bool x",
            "!!null x",
            "[[[[",
            "%YAML 9.9",
            "---\n---\n",
        ]
    ),
)
overrides = st.lists(
    st.one_of(st.tuples(st.sampled_from(sorted(KEYS)), words).map("=".join), st.text(max_size=20)),
    min_size=1,
    max_size=3,
)


def is_finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


@pytest.mark.distributed
@given(overrides)
@example(["attention.adapters=&a [*a]"])
@example(["optimizer.betas=" + "[" * 5000])
@example(["deepspeed.overrides={a: &a [x], b: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]}"])
@example(["run.seed=" + "9" * 5000])
@example(["run.name=\x00"])
@example(["\n"])
@example(["a\nb.c=1"])
@example(['schedule.branch_from="\\ud800\\udc00"'])
@example(["data.directory=\x00"])
@example(["model.num_layers=17667215"])
def test_overrides(items: list[str]) -> None:
    config = right_or_refused(lambda: load_config("demo", items))
    if not isinstance(config, str):
        assert_read_back(config)


def assert_read_back(config: Any) -> None:
    """What was accepted is written to config.yaml, and read it is the same configuration."""
    again = parse_config(parse_yaml(config.to_yaml()))
    assert again.as_dict() == config.as_dict()


@pytest.mark.distributed
@given(
    st.one_of(damaged(DEMO), odd_json(yaml.safe_load(DEMO)).map(lambda v: json.dumps(v).encode()))
)
@example(b"run: &a\n  name: *a\n")
@example(
    b"a: &a [x]\n"
    + b"".join(
        b"%c: &%c [%s]\n" % (98 + n, 98 + n, b",".join([b"*%c" % (97 + n)] * 9)) for n in range(12)
    )
)
@example(b"[" * 5000)
@example(b"{" * 5000)
@example(b"run: " + b"{a: " * 3000)
def test_files(folder: Path, content: bytes) -> None:
    path = folder / "config.yaml"
    path.write_bytes(content)
    config = right_or_refused(lambda: load_config(str(path)))
    if not isinstance(config, str):
        assert_read_back(config)


@given(
    st.dictionaries(
        st.text(max_size=6), st.one_of(odd_values.filter(is_finite), st.none()), max_size=4
    )
)
def test_what_is_written_is_read_back(values: dict[str, Any]) -> None:
    if "\ud800" in json.dumps(values, ensure_ascii=False):
        return
    assert parse_yaml(dump_yaml(values) or "{}") == values or not values
    for value in values.values():
        ((_, read),) = parse_overrides([override_text("run.seed", value)])
        assert read == value
