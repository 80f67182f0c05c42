"""Progress: a bar on a terminal, lines with the time left in a log."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from data_pipeline.io.pool import Progress
from data_pipeline.io.progress import ProgressLine, time_left
from data_pipeline.sources.discovery import find_inputs
from tests.data_pipeline.helpers import REPOSITORY, Workshop


def test_the_time_left_is_that_of_the_bytes_left() -> None:
    assert time_left(10.0, 100, 900) == "ETA 0:01:30"
    assert time_left(3600.0, 1, 25) == "ETA 25:00:00"
    assert time_left(5.0, 0, 100) == "ETA unknown"


@pytest.mark.distributed
def test_lines_in_a_log(
    workshop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = find_inputs([workshop.corpus]).files
    seen: list[Progress] = []
    with ProgressLine(log_seconds=0) as line:
        line.total_bytes = sum(file.size for file in files)

        def report(progress: Progress) -> None:
            seen.append(progress)
            line.update(progress)

        manifest, _ = workshop.tokenize(tmp_path / "out", workers=2, report=report)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(seen) > 16
    assert lines[-1].startswith("100.0%, ETA 0:00:00: ") and "tokens joined to shards" in lines[-1]
    units = [line for line in lines if "tokens/s" in line]
    assert units and all(
        re.match(r"\d+\.\d%, ETA (\d+:\d\d:\d\d|unknown): ", line) for line in units
    )
    assert any("; reading demo-0000" in line for line in units)
    assert sum(p.documents for p in seen) == sum(shard.documents for shard in manifest.shards)
    assert sum(p.tokens for p in seen) == sum(shard.tokens for shard in manifest.shards)
    assert sum(p.text_bytes for p in seen) == sum(shard.text_bytes for shard in manifest.shards)
    assert sum(p.input_bytes for p in seen) == sum(file.size for file in files)
    # Of a run that has nothing to do, all bytes are skipped and none is counted for the rate.
    seen.clear()
    workshop.tokenize(tmp_path / "out", report=seen.append)
    assert sum(p.skipped_bytes for p in seen) == sum(file.size for file in files)
    assert sum(p.input_bytes for p in seen) == 0


@pytest.mark.distributed
@pytest.mark.parametrize("columns", [80, 40])
def test_a_bar_on_a_terminal(workshop: Workshop, tmp_path: Path, columns: int) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "data_pipeline", *workshop.command(tmp_path / "out")]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": str(columns)}
    done = subprocess.Popen(
        command, cwd=REPOSITORY, stderr=theirs, stdout=subprocess.DEVNULL, env=environment
    )
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 4096):
            shown += chunk
    except OSError:  # how Linux says that the other side is closed
        pass
    os.close(ours)
    assert done.wait() == 0
    text = shown.decode(errors="replace")
    assert "ETA" in text
    # The share and the time left come first, so that a narrow terminal cuts something else.
    bars = re.findall(r"\d+\.\d%, ETA [^\r\n\x1b]*", text)
    assert bars and all(len(bar) <= columns for bar in bars)
    # 80 columns are enough.
    assert columns < 80 or re.search(r"tokens, [\d,]+/s, \d+\.\d MB/s", text)
