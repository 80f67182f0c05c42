"""Weights & Biases gets the numbers of metrics.jsonl, in one run over a resume.

Read back from its files.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pretrain.config.load import load_config
from pretrain.config.resolved import resolve
from pretrain.errors import UserError
from tests.ports import free_ports
from tests.pretrain.telemetry.records import make_record, open_telemetry, read_strictly, recorded

THERE = find_spec("wandb") is not None
needs_wandb = pytest.mark.skipif(
    not THERE, reason="needs the optional package wandb: pip install '.[wandb]'"
)
BLOCK, HEADER = 32768, 7


@pytest.fixture(autouse=True)
def its_own_environment() -> Iterator[None]:
    """Wandb reads its environment variables once for all runs of a process."""
    yield
    if THERE:
        import wandb

        wandb.teardown()


@pytest.mark.skipif(THERE, reason="wandb is installed")
def test_without_the_package_it_is_refused_in_one_sentence() -> None:
    config = load_config("demo", ["telemetry.wandb=true", "parallel.tensor_model_parallel_size=1"])
    with pytest.raises(
        UserError,
        match=r"telemetry\.wandb=true but the package wandb is not installed; .*pip install",
    ):
        resolve(config, 1)


@needs_wandb
def test_offline_files_hold_the_run_and_its_resume_under_one_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = tmp_path / "run"
    for resume_step, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        chosen = [make_record(step, validated=step == 2) for step in steps]
        recorded(run, *chosen, wandb=True, resume_step=resume_step)
    identity = (run / "wandb/id").read_text().strip()
    attempts = sorted(run.glob("wandb/offline-run-*/*.wandb"))
    assert len(attempts) == 2 and {path.stem for path in attempts} == {f"run-{identity}"}
    logged = [history for path in attempts for history in histories(path)]
    assert [exit_code(path) for path in attempts] == [0, 0]
    assert [history["_step"] for history in logged] == [1, 2, 3, 3, 4]
    by_step = {history["_step"]: history for history in logged}
    for record in read_strictly(run):
        for tag in record.keys() - {"step", "tokens", "samples", "memory/host_rss"}:
            assert by_step[record["step"]][tag] == record[tag], tag


@needs_wandb
def test_a_server_that_is_away_stops_a_new_run_and_no_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{free_ports(1)[0]}")
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "10")
    with pytest.raises(UserError, match=r"telemetry\.wandb: .*set WANDB_MODE=offline"):
        open_telemetry(tmp_path / "new", wandb=True)
    assert "telemetry: wandb does not continue the run (" in resumed(tmp_path / "run")
    (path,) = (tmp_path / "run").glob("wandb/offline-run-*/*.wandb")
    assert [history["_step"] for history in histories(path)] == [2]


@needs_wandb
def test_a_service_of_wandb_that_has_gone_stops_a_new_run_and_no_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a job has it whose submission came from a program that used wandb."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SERVICE", f"3-99999-unix-{tmp_path}/gone")
    with pytest.raises(UserError, match=r"telemetry\.wandb: .*/gone; run .*telemetry\.wandb=false"):
        open_telemetry(tmp_path / "new", wandb=True)
    said = resumed(tmp_path / "run")
    assert "/gone); its numbers are in metrics.jsonl alone" in said
    assert [record["step"] for record in read_strictly(tmp_path / "run")] == [1, 2]


@needs_wandb
def test_a_run_that_an_error_ends_is_not_shown_as_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    telemetry = open_telemetry(tmp_path, wandb=True)
    telemetry.log(make_record(1))
    telemetry.close(failed=True)
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert exit_code(path) == 1


def resumed(run: Path) -> str:
    """The console of a run that had one step without wandb, and continues with it."""
    recorded(run, make_record(1))
    output = io.StringIO()
    console = Console(file=output, width=1000)
    recorded(run, make_record(2), wandb=True, resume_step=1, console=console)
    return output.getvalue()


def exit_code(path: Path) -> int:
    (code,) = [
        record.exit.exit_code
        for record in records(path)
        if record.WhichOneof("record_type") == "exit"
    ]
    return int(code)


def histories(path: Path) -> Iterator[dict[str, Any]]:
    """The history records of a .wandb file."""
    for record in records(path):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            names = ("/".join(item.nested_key) if item.nested_key else item.key for item in items)
            yield {
                name: json.loads(item.value_json) for name, item in zip(names, items, strict=True)
            }


def records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file: LevelDB's log format, with wandb's protocol buffers in it."""
    from wandb.proto.wandb_internal_pb2 import Record

    content = path.read_bytes()
    offset, parts = HEADER, b""
    while offset + HEADER <= len(content):
        if BLOCK - offset % BLOCK < HEADER:
            offset += BLOCK - offset % BLOCK  # the rest of a block is too short for a header
            continue
        length = int.from_bytes(content[offset + 4 : offset + 6], "little")
        kind = content[offset + 6]
        parts += content[offset + HEADER : offset + HEADER + length]
        offset += HEADER + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(parts)
            parts = b""
