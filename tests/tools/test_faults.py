"""The campaign of faults: two faults on two real ranks, and a judge that sees what is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.ranks import train_on_warm_ranks
from tools.faults.__main__ import campaign
from tools.faults.judge import differences
from tools.faults.plan import STEPS, Fault, Layout, draw, overrides_for
from tools.faults.references import Reference, size_on_disk
from tools.faults.table import as_record, markdown, recorded

pytestmark = [pytest.mark.distributed, pytest.mark.full, pytest.mark.timeout(600)]
SMALLEST = Layout(2, 1, 1)


@pytest.fixture(scope="module")
def reference(tiny_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The undisturbed run."""
    runs = tmp_path_factory.mktemp("undisturbed")
    done = train_on_warm_ranks(overrides_for(SMALLEST, tiny_shards, runs), ranks=SMALLEST.ranks)
    assert done.returncode == 0, done.stderr
    return runs / "run"


def test_two_faults_end_as_if_nothing_had_happened(
    reference: Path, tiny_shards: Path, tmp_path: Path
) -> None:
    drawn = [draw(1, list(Fault).index(fault)) for fault in (Fault.KILL_ONE, Fault.IO_ERROR)]
    from_nothing = [
        replace(case, resumed=False, in_start=False, moment=0.4, offset=0.3) for case in drawn
    ]
    cases = [replace(case, layout=SMALLEST, then=SMALLEST, rank=1) for case in from_nothing]
    references = {SMALLEST: Reference(reference, 10.0, 0.1, size_on_disk(reference))}
    record = tmp_path / "record.jsonl"

    def note(outcome: object) -> None:
        with record.open("a") as file:
            file.write(json.dumps(as_record(outcome)) + "\n")  # type: ignore[arg-type]

    outcomes = campaign(cases, tmp_path, tiny_shards, jobs=2, keep=True, made=references, note=note)
    assert [outcome.problems for outcome in outcomes] == [[], []]
    assert [outcome.happened for outcome in outcomes] == [True, True]
    assert "Input/output error" in outcomes[1].sentence
    text = markdown(outcomes, "python -m tools.faults", 60.0)
    assert "**2 of 2**" in text and "| EIO on write | 1 | 1 |" in text
    assert [outcome.case.fault for outcome in recorded(record)] == [Fault.KILL_ONE, Fault.IO_ERROR]


def other_weight(run: Path) -> None:
    file = next((run / f"checkpoints/step_{STEPS:08d}").glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def step_lost(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([*lines[:7], *lines[8:]]) + "\n")


def no_events(run: Path) -> None:
    max((run / "tensorboard").glob("events*")).unlink()


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (other_weight, "1 of"),
        (step_lost, "steps [8] missing"),
        (no_events, "TensorBoard's loss/train"),
        (lambda run: (run / "state").write_text("running\n"), "not finished"),
    ],
)
def test_the_judge_sees_what_differs(
    spoil: Callable[[Path], None], word: str, reference: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(reference, run)
    assert differences(run, reference, same_layout=True) == []
    spoil(run)
    assert word in "; ".join(differences(run, reference, same_layout=True))
