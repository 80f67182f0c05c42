"""Sentences about a file system that takes no more."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pretrain.runs.storage import storage_sentence
from tests.mounts import mounted
from tests.ranks import run_program
from tools.faults.inflict import STANDS, build_shim, failing_storage


@pytest.mark.distributed
def test_no_room_for_another_file_is_not_told_as_no_room_for_bytes(tmp_path: Path) -> None:
    with mounted(tmp_path, "size=16m,nr_inodes=2"):
        (tmp_path / "one").touch()
        with pytest.raises(OSError) as refusal:
            (tmp_path / "two").touch()
        sentence = storage_sentence(refusal.value, tmp_path, needed=1000)
    assert "16.8 MB are free, but it may hold no more files); make room there" in sentence


def test_a_file_system_that_answers_nobody_is_seen_to_stand(tmp_path: Path) -> None:
    if (shim := build_shim(tmp_path)) is None:
        pytest.skip("there is no C compiler")
    standing, other = tmp_path / "standing", tmp_path / "other"
    standing.mkdir()
    other.mkdir()
    program = (
        "import sys; from pathlib import Path; from pretrain.runs.storage import stands;"
        "print([stands(Path(each), 1.0) for each in sys.argv[1:]], flush=True)"
    )
    environment = failing_storage(
        shim, standing, counter=tmp_path / "counter", after=0, error=STANDS
    )
    command = [sys.executable, "-c", program, standing, other, tmp_path / "nowhere"]
    done = run_program(command, environment, timeout=60)
    assert done.stdout == "[True, False, False]\n", done.stderr
    assert list(standing.iterdir()) == []
