"""What a terminal and a log file get to see of a run."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from tests.pretrain.telemetry.records import (
    make_record,
    open_telemetry,
)


def test_log_file_gets_few_plain_lines(tmp_path: Path) -> None:
    output = io.StringIO()
    telemetry = open_telemetry(tmp_path, console=Console(file=output, width=60), seconds_between_lines=60.0)
    for step in range(1, 21):
        telemetry.log(make_record(step, validated=step == 10))
    telemetry.close()
    lines = output.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 1/20", "step 10/20", "step 20/20"]
    assert "tokens/s" in lines[0] and "grad norm" in lines[0] and lines[0].endswith(" left")
    assert "perplexity 13.46  (prose 12.18, topics 20.09)" in lines[1]
    assert "\x1b" not in output.getvalue()


def test_terminal_gets_one_progress_bar(tmp_path: Path) -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=140)
    telemetry = open_telemetry(tmp_path, console=console)
    for step in range(1, 21):
        telemetry.log(make_record(step))
    telemetry.say("a message of the loop [not markup]")
    telemetry.close()
    assert "20/20" in output.getvalue() and "tokens/s" in output.getvalue()
    assert "a message of the loop [not markup]" in output.getvalue()
