"""What a terminal and a log file get to see of a run."""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich.console import Console

from tests.pretrain.telemetry.records import make_record, open_telemetry, recorded


def test_log_file_gets_few_plain_lines(tmp_path: Path) -> None:
    output = io.StringIO()
    steps = [make_record(step, validated=step == 10) for step in range(1, 21)]
    console = Console(file=output, width=60)
    recorded(tmp_path, *steps, console=console, seconds_between_lines=60.0)
    lines = output.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 1/20", "step 10/20", "step 20/20"]
    assert "tokens/s" in lines[0] and "grad norm" in lines[0] and lines[0].endswith(" left")
    assert "perplexity 13.46  (prose 12.18, topics 20.09)" in lines[1]
    assert "\x1b" not in output.getvalue()


def test_a_terminal_of_80_columns_shows_step_time_left_and_speed_whole(tmp_path: Path) -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=80)
    telemetry = open_telemetry(tmp_path, console=console, total_steps=190_735)
    for step in range(1, 21):
        telemetry.log(make_record(step, validated=step == 20))
    telemetry.say(
        "a message of the loop [not markup] that is longer than the terminal, by some of its words"
    )
    telemetry.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.getvalue())
    lines = [line.rstrip() for part in shown.split("\n") for line in part.split("\r")]
    assert [line for line in lines if len(line) > 80 or "…" in line] == []
    (last,) = {line for line in lines if "20/190735" in line and "norm" in line}
    assert re.search(r"20/190735 left (-|\d+):(--|\d\d):(--|\d\d) +loss .* tokens/s$", last)
    at = lines.index(
        "a message of the loop [not markup] that is longer than the terminal, by some of"
    )
    assert lines[at + 1] == "its words"
