"""Files that are complete or absent, and hashes of them: errors, and what is left on the disk."""

import hashlib
import os
import subprocess
from pathlib import Path

import pytest

from data_pipeline.errors import DataError
from data_pipeline.io.files import (
    hash_file,
    is_abandoned,
    refuse_unwritable,
    replace_file,
    sha256_file,
    sync_directory,
    temporary_path,
    write_atomically,
)
from tests.mounts import mounted


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


def test_a_temporary_file_is_abandoned_where_its_process_has_ended(tmp_path: Path) -> None:
    done = subprocess.Popen(["true"])
    done.wait()
    here = temporary_path(tmp_path / "own")
    elsewhere = tmp_path / f"x.ids.another-host-{os.getpid()}.tmp"
    for path in (here, elsewhere):
        path.touch()
    assert not is_abandoned(here) and not is_abandoned(elsewhere)
    assert is_abandoned(here.with_name(here.name.replace(str(os.getpid()), str(done.pid))))
    os.utime(elsewhere, (0, 0))
    assert is_abandoned(elsewhere)
    elsewhere.unlink()
    assert not is_abandoned(elsewhere)


def test_the_hash_of_a_file(tmp_path: Path) -> None:
    content = bytes(range(256)) * 40_000
    (tmp_path / "file").write_bytes(content)
    assert hash_file(tmp_path / "file") == hashlib.sha256(content).hexdigest()
    with pytest.raises(OSError):
        hash_file(tmp_path / "missing")
    with pytest.raises(DataError, match=r"^cannot read .*missing: No such file"):
        sha256_file(tmp_path / "missing")


def test_a_directory_that_is_not_there_yet_can_be_written(tmp_path: Path) -> None:
    refuse_unwritable(tmp_path / "not" / "there")
    assert not list(tmp_path.iterdir())


def test_a_directory_that_takes_no_files_is_refused(tmp_path: Path) -> None:
    with mounted(tmp_path, "ro"), pytest.raises(DataError) as refused:
        refuse_unwritable(tmp_path / "not" / "there")
    assert f"{tmp_path} takes no new files (its permissions, or it is mount" in str(refused.value)


def test_a_directory_whose_file_system_syncs_none_is_left_at_that() -> None:
    """As /proc, and as file systems of some networks and virtual machines."""
    directory = os.open("/proc/self", os.O_RDONLY)
    with pytest.raises(OSError, match="Invalid argument"):
        os.fsync(directory)
    os.close(directory)
    sync_directory(Path("/proc/self"))
