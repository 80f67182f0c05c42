"""Sentences about a file system that takes no more."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pretrain.runs.storage import storage_sentence


@pytest.mark.distributed
def test_no_room_for_another_file_is_not_told_as_no_room_for_bytes(tmp_path: Path) -> None:
    options = ["mount", "-t", "tmpfs", "-o", "size=16m,nr_inodes=2", "tmpfs", str(tmp_path)]
    if (mounted := subprocess.run(options, capture_output=True)).returncode:
        pytest.skip(f"no tmpfs may be mounted here: {mounted.stderr.decode().strip()}")
    try:
        (tmp_path / "one").touch()
        with pytest.raises(OSError) as refusal:
            (tmp_path / "two").touch()
        sentence = storage_sentence(refusal.value, tmp_path, needed=1000)
    finally:
        subprocess.run(["umount", tmp_path], check=True)
    assert "16.8 MB are free, but it may hold no more files); make room there" in sentence
