"""JSON as its standard has it, and who reads JSON by hand."""

from __future__ import annotations

import ast

import pytest

from data_pipeline.io.forms import parse_json
from tests.parsed_files import nodes
from tests.ranks import ROOT


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "it has the key 'c' twice"),
        ('{"a": NaN}', "it has NaN, which JSON does not know"),
        ("[-Infinity]", "it has -Infinity"),
        ("[" * 100_000, "it nests too deeply"),
        ("9" * 5000, "4300"),
        ("{", "Expecting property name"),
        (b"\xff", "codec can't decode"),
    ],
)
def test_what_is_no_json_is_a_value_error(text: str | bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_json(text)
    assert parse_json('{"a": [1, null]}') == {"a": [1, None]}


READERS = ("json.loads", "json.load", "orjson.loads")
BY_HAND = {
    "data_pipeline/io/files.py": "what it has just written itself",
    "data_pipeline/io/forms.py": "the one way for all others",
    "data_pipeline/sources/formats.py": "the first two lines of a user's file, to tell its kind",
    "data_pipeline/sources/records.py": "lines of a user's text",
    "data_pipeline/tokenizer/tokenizer.py": "configurations of anybody's tokenizers",
    "laboratory/compare/loss_files.py": "losses that any trainer has written",
    "megatron_patches/attention/module.py": "compared with the live rows, whatever it is",
    "pretrain/doctor/rendezvous.py": "what ranks tell each other",
    "pretrain/runs/metrics_file.py": "checked line by line, at twice the speed",
    "pretrain/export/models.py": "configurations of anybody's models",
    "laboratory/study/seal.py": "what it has just written itself",
    "laboratory/study/sealed.py": "what it has just written itself",
    "laboratory/results/documentation.py": "committed versions, of this repository",
    "laboratory/results/records.py": "committed records and seals, of this repository",
}


def test_other_json_is_read_with_a_form() -> None:
    reading = {
        str(path.relative_to(ROOT))
        for package in ("data_pipeline", "megatron_patches", "pretrain", "laboratory")
        for path in sorted((ROOT / package).rglob("*.py"))
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in READERS
    }
    assert reading == BY_HAND.keys()
