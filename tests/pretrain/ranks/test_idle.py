"""What an idle process waits for is named, and it ends; one that computes or reads does not."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

from pretrain.ranks.idle import AwakeTime, Idleness, file_in_use
from tests.ranks import run_program

PROGRAM = """
import sys
from pathlib import Path
from pretrain.ranks.idle import ending_when_idle
with ending_when_idle("reading the data", 0.5):
    if len(sys.argv) > 1:
        Path(sys.argv[1]).read_bytes()
assert "torch" not in sys.modules
"""


def test_a_start_that_waits_for_a_file_ends_with_its_name(tmp_path: Path) -> None:
    pipe = tmp_path / "manifest.json"
    os.mkfifo(pipe)
    for arguments, code in (([str(pipe)], 2), ([], 0)):
        done = run_program([sys.executable, "-c", PROGRAM, *arguments])
        assert done.returncode == code, done.stderr
        said = f": {pipe} does not answer; look at its file system\n" if code else ""
        assert done.stderr.endswith(said) and done.stderr.count("\n") == bool(code)


def test_who_computes_or_reads_is_not_idle(tmp_path: Path) -> None:
    idle = Idleness()
    time.sleep(0.2)
    idle.look(5.0)  # as if it were more: pytest's own threads use some milliseconds
    assert idle.seconds == 5.0
    until = time.process_time() + 0.2
    while time.process_time() < until:
        pass
    idle.look(5.0)
    assert idle.seconds == 0.0
    file = tmp_path / "large"
    file.write_bytes(bytes(100_000))
    idle.look(0.0)
    file.read_bytes()
    idle.look(20.0)
    assert idle.seconds == 0.0


def test_the_innermost_path_of_a_thread_is_what_it_works_on(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    blocked = threading.Thread(target=pipe.read_bytes, daemon=True)
    blocked.start()
    while file_in_use(blocked.ident or 0) is None:
        time.sleep(0.01)
    assert file_in_use(blocked.ident or 0) == pipe
    pipe.write_bytes(b"")
    blocked.join()
    assert file_in_use(blocked.ident or 0) is None


def test_a_suspension_counts_as_a_quarter_of_the_timeout() -> None:
    waited = AwakeTime(0.4)
    time.sleep(0.2)
    assert waited.look() == 0.1
    assert waited.look() < 0.2
