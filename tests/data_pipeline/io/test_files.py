"""Files that are complete or absent, and hashes of them: errors, and what is left on the disk."""

import hashlib
from pathlib import Path

import pytest

from data_pipeline.errors import DataError
from data_pipeline.io.files import hash_file, replace_file, sha256_file, write_atomically


def test_a_replaced_file_has_the_new_content_and_nothing_beside_it(tmp_path: Path) -> None:
    for content in (b"old", b"new"):
        replace_file(tmp_path / "new/file", content)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["file"]
    assert (tmp_path / "new/file").read_bytes() == b"new"


@pytest.mark.parametrize(
    ("write", "error"), [(replace_file, OSError), (write_atomically, DataError)]
)
def test_what_cannot_be_written_is_named_and_leaves_nothing(write, error, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "directory").mkdir()
    with pytest.raises(error, match="directory"):
        write(tmp_path / "directory", b"content")
    assert [path.name for path in tmp_path.iterdir()] == ["directory"]


def test_a_refusal_of_the_file_system_names_the_file() -> None:
    with pytest.raises(FileNotFoundError) as refused:
        replace_file(Path("/proc/1/no_such_file"), b"content")
    assert refused.value.filename == "/proc/1/no_such_file"


def test_the_hash_of_a_file(tmp_path: Path) -> None:
    content = bytes(range(256)) * 40_000
    (tmp_path / "file").write_bytes(content)
    counts: list[int] = []
    assert (
        hash_file(tmp_path / "file", progress=counts.append) == hashlib.sha256(content).hexdigest()
    )
    assert sum(counts) == len(content) and len(counts) > 1
    with pytest.raises(OSError):
        hash_file(tmp_path / "missing")
    with pytest.raises(DataError, match=r"^cannot read .*missing: No such file"):
        sha256_file(tmp_path / "missing")
