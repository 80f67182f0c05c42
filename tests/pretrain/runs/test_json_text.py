"""JSON as its standard has it, and who reads JSON by hand."""

from __future__ import annotations

import ast

import pytest

from pretrain.runs.json_text import parse_json
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


BY_HAND = {
    "api.py": "what an export of this version has just written",
    "compare/loss_files.py": "losses that any trainer has written",
    "doctor/rendezvous.py": "what ranks tell each other",
    "export/run_exports.py": "exports, compared by the hashes of their files",
    "finetuning/records.py": "lines of a user's text",
    "ranks/watch.py": "what ranks tell each other",
    "replay/__main__.py": "a request of this program",
    "replay/prepare.py": "the answer to it",
    "runs/json_text.py": "the one way for all others",
    "runs/metrics_file.py": "checked line by line, at twice the speed",
    "study/models.py": "configurations of anybody's models",
    "study/seal.py": "what a form has judged before",
}


def test_other_json_is_read_with_a_form() -> None:
    reading = {
        str(path.relative_to(ROOT / "pretrain"))
        for path in sorted((ROOT / "pretrain").rglob("*.py"))
        for node in nodes(path)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("json.loads", "json.load")
    }
    assert reading <= BY_HAND.keys()
