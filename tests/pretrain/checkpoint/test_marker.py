"""A COMPLETE marker with nonsense in it, or that cannot be read, is one sentence."""

from pathlib import Path

import pytest

from pretrain.checkpoint.format import read_marker
from pretrain.errors import UserError


@pytest.mark.parametrize(
    "content", ["", "{", '"x"', "[1]", "null", "3", '{"a": "b"}', '{"a": null}', "{}"]
)
def test_a_marker_with_nonsense_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "COMPLETE").write_text(content)
    with pytest.raises(
        UserError, match=r"COMPLETE (is damaged: .*|does not name the files.*); restore it"
    ):
        read_marker(tmp_path)


def test_a_marker_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "COMPLETE").mkdir()
    with pytest.raises(UserError, match=r"COMPLETE cannot be read \("):
        read_marker(tmp_path)
