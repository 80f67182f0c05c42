"""One unbroken series of records, whatever happens to the process that writes it."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest
from rich.console import Console

from pretrain.errors import UserError
from pretrain.runs.metrics_file import read_metrics
from pretrain.runs.tags import HOST_BYTES
from pretrain.telemetry.event_file import FILE_PREFIX
from pretrain.telemetry.telemetry import Telemetry
from tests.pretrain.telemetry.records import (
    deterministic,
    make_record,
    open_telemetry,
    read_scalars,
    read_strictly,
    recorded,
)


@pytest.mark.parametrize("every", [1, 3])
def test_resumed_equals_uninterrupted(tmp_path: Path, every: int) -> None:
    def log(telemetry: Telemetry, first: int, last: int) -> None:
        for step in range(first, last + 1):
            seconds_stall = 0.2 if step % 8 == 0 else None
            telemetry.log(make_record(step, validated=step == 10, seconds_stall=seconds_stall))
            if seconds_stall is not None:
                telemetry.sync()

    straight = open_telemetry(tmp_path / "straight", every=every)
    log(straight, 1, 20)
    straight.close()
    killed = open_telemetry(tmp_path / "killed", every=every)
    log(killed, 1, 13)  # never closed, as after kill -9
    with (tmp_path / "killed" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 14, "tok')
    (events,) = (tmp_path / "killed/tensorboard").glob(FILE_PREFIX + "*")
    with events.open("ab") as file:
        file.write(b"\x40\x00\x00\x00\x00\x00\x00\x00half a record")
    for first_resumed in (9, 17):
        resumed = open_telemetry(tmp_path / "killed", every=every, resume_step=first_resumed - 1)
        log(resumed, first_resumed, 20)
    resumed.close()
    assert deterministic(read_strictly(tmp_path / "killed")) == deterministic(
        read_strictly(tmp_path / "straight")
    )
    shown = read_scalars(tmp_path / "killed")
    expected = read_scalars(tmp_path / "straight")
    for tag in (HOST_BYTES.tag, HOST_BYTES.charted):
        del shown[tag], expected[tag]
    assert shown == expected


def test_an_extra_record_at_a_signal_does_not_change_later_variances(tmp_path: Path) -> None:
    straight = recorded(tmp_path / "straight", *map(make_record, range(1, 21)), every=4)
    stopped = tmp_path / "stopped"
    recorded(stopped, *map(make_record, range(1, 10)), make_record(10, seconds_stall=0.3), every=4)
    resumed = recorded(stopped, *map(make_record, range(11, 21)), every=4, resume_step=10)
    records = {record["step"]: record for record in deterministic(resumed)}
    assert sorted(records) == [4, 8, 10, 12, 16, 20]
    for record in deterministic(straight):
        assert records[record["step"]] == record


def test_starting_again_from_the_beginning_drops_everything_old(tmp_path: Path) -> None:
    old = open_telemetry(tmp_path)
    for step in range(1, 8):
        old.log(make_record(step, loss=9.0))
    old.close({"loss/train": 9.0})
    (record,) = recorded(tmp_path, make_record(1, loss=1.0), resume_step=0)
    assert record["loss/train"] == 1.0
    assert read_scalars(tmp_path)["loss/train"] == [(1, 1.0)]


def test_event_files_of_a_faster_clock_are_still_purged(tmp_path: Path) -> None:
    recorded(tmp_path, *(make_record(step, loss=9.0) for step in range(1, 8)))
    (written,) = (tmp_path / "tensorboard").glob(FILE_PREFIX + "*")
    written.rename(
        written.with_name(f"{FILE_PREFIX}{int(time.time()) + 3600:010d}.other-host.99999.0")
    )
    recorded(tmp_path, *(make_record(step, loss=1.0) for step in range(4, 7)), resume_step=3)
    assert read_scalars(tmp_path)["loss/train"] == [(1, 9), (2, 9), (3, 9), (4, 1), (5, 1), (6, 1)]


def test_resume_without_the_old_records_is_said(tmp_path: Path) -> None:
    output = io.StringIO()
    (record,) = recorded(tmp_path, make_record(9), resume_step=8, console=Console(file=output))
    assert "metrics.jsonl ends at step 0 but the run resumes at step 8" in output.getvalue()
    assert record["step"] == 9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"step": 1}\nnot json\n{"step": 3}\n', "line 2 is not a JSON object"),
        ('{"step": 1}\n{"loss/train": 2}\n', "line 2 is not a JSON object"),
        ('{"step": 1}\n{"step": 2}\n{"step": 2}\n', "line 3 is step 2 but follows step 2"),
    ],
)
def test_a_damaged_metrics_file_is_named_by_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(UserError, match=message):
        list(read_metrics(tmp_path / "metrics.jsonl"))
    with pytest.raises(UserError, match=message):
        open_telemetry(tmp_path, resume_step=5)
    assert (tmp_path / "metrics.jsonl").read_text() == text
