"""A COMPLETE marker with nonsense in it, or that cannot be read, is one sentence."""

from pathlib import Path

import pytest

from pretrain.checkpoint.checkpoints import check_files
from pretrain.errors import UserError


@pytest.mark.parametrize("content", ["", "{", '"x"', "[1]", "null", "3", '{"a": "b"}', '{"a": null}', None])
def test_a_marker_with_nonsense_is_named(tmp_path: Path, content: str | None) -> None:
    marker = tmp_path / "COMPLETE"
    (tmp_path / "a").touch()
    if content is None:
        marker.mkdir()
    else:
        marker.write_text(content)
    with pytest.raises(UserError, match=r"COMPLETE is damaged \(.*\); remove .* to resume from an older"):
        check_files(tmp_path)
