"""The campaign itself, small: two faults on two real ranks, and that its judge sees what is wrong."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.ranks import train_on_warm_ranks
from tools.faults.__main__ import campaign
from tools.faults.cases import Outcome
from tools.faults.judge import differences
from tools.faults.plan import LAYOUTS, STEPS, Fault, Layout, draw, overrides_for
from tools.faults.references import Reference, size_on_disk
from tools.faults.starts import run_start
from tools.faults.table import as_record, markdown, put_into, recorded

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]
SMALLEST = Layout(2, 1, 1)


@pytest.fixture(scope="module")
def reference(tiny_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The undisturbed run."""
    runs = tmp_path_factory.mktemp("undisturbed")
    done = train_on_warm_ranks(overrides_for(SMALLEST, tiny_shards, runs), ranks=SMALLEST.ranks)
    assert done.returncode == 0, done.stderr
    return runs / "run"


@pytest.mark.full  # the faults themselves are met one by one in tests/distributed
def test_two_faults_end_as_if_nothing_had_happened(
    reference: Path, tiny_shards: Path, tmp_path: Path
) -> None:
    drawn = [draw(1, list(Fault).index(fault)) for fault in (Fault.KILL_ONE, Fault.IO_ERROR)]
    from_nothing = [
        replace(case, resumed=False, in_start=False, moment=0.4, place=0.3) for case in drawn
    ]
    cases = [replace(case, layout=SMALLEST, then=SMALLEST, rank=1) for case in from_nothing]
    made = {SMALLEST: Reference(reference, 10.0, 0.1, size_on_disk(reference))}
    outcomes = campaign(cases, tmp_path, tiny_shards, jobs=2, keep=True, made=made)
    assert [outcome.problems for outcome in outcomes] == [[], []]
    assert [outcome.happened for outcome in outcomes] == [True, True]
    assert "Input/output error" in outcomes[1].sentence
    text = markdown(outcomes, "python -m tools.faults", 60.0)
    assert "**2 of 2**" in text and "| EIO on write | 1 | 1 |" in text


def other_weight(run: Path) -> None:
    file = next((run / f"checkpoints/step_{STEPS:08d}").glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def records_of(change: Callable[[list[str]], list[str]]) -> Callable[[Path], None]:
    def to(run: Path) -> None:
        lines = (run / "metrics.jsonl").read_text().splitlines()
        (run / "metrics.jsonl").write_text("\n".join(change(lines)) + "\n")

    return to


def other_loss(lines: list[str]) -> list[str]:
    record = json.loads(lines[4])
    return [
        *lines[:4],
        json.dumps(record | {"loss/train": record["loss/train"] + 1e-9}),
        *lines[5:],
    ]


def no_events(run: Path) -> None:
    newest = max((run / "tensorboard").glob("events*"))
    newest.unlink()


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (other_weight, "1 of"),
        (records_of(lambda lines: [*lines[:7], *lines[8:]]), "steps [8] missing"),
        (records_of(lambda lines: [*lines[:7], lines[6], *lines[7:]]), "steps [7] twice"),
        (records_of(other_loss), "step 5: loss/train"),
        (no_events, "TensorBoard's loss/train"),
        (lambda run: (run / "state").write_text("running\n"), "not finished"),
        (
            lambda run: (run / f"checkpoints/step_{STEPS:08d}/COMPLETE").unlink(),
            "last checkpoint is missing",
        ),
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


def test_what_a_start_leaves_behind_is_seen_and_ended(tmp_path: Path) -> None:
    """The command refuses its configuration at once; a process that its start has made stays."""
    left: list[subprocess.Popen[bytes]] = []

    def leave(start: object) -> None:
        mark = {"FAULTS_START": start.mark}  # type: ignore[attr-defined]
        left.append(subprocess.Popen(["sleep", "100"], env=mark))
        time.sleep(0.1)

    end = run_start(["model.nonsense=1"], SMALLEST, tmp_path / "run", tmp_path / "log", leave)
    assert end.code == 2 and len(end.sentences) == 1 and not end.has_traceback
    assert end.left == (f"process {left[0].pid}",)
    assert left[0].wait(10) < 0


def test_a_seed_draws_the_same_faults_and_all_kinds_alike() -> None:
    numbers = range(6 * len(Fault))
    cases = [draw(3, number) for number in numbers]
    assert (
        cases == [draw(3, number) for number in numbers] != [draw(4, number) for number in numbers]
    )
    for fault in Fault:
        assert sum(case.fault is fault for case in cases) == 6
    assert {case.layout for case in cases} == set(LAYOUTS)
    assert all((case.then != case.layout) == (case.fault is Fault.OTHER_LAYOUT) for case in cases)
    assert all(0 <= case.rank < case.layout.ranks for case in cases)


def test_an_interrupted_campaign_goes_on_from_its_record(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    bad = Outcome(draw(3, 5), happened=True, different=["not finished"], seconds=2.5)
    for outcome in (Outcome(draw(4, 4)), Outcome(draw(3, 4)), bad):
        with path.open("a") as file:
            file.write(json.dumps(as_record(outcome)) + "\n")
    with path.open("a") as file:
        file.write('{"case": 9, "se')  # killed here
    assert recorded(path) == [Outcome(draw(3, 4)), bad, Outcome(draw(4, 4))]
    assert recorded(path) == [Outcome(draw(3, 4)), bad, Outcome(draw(4, 4))]
    assert recorded(tmp_path / "none") == []


def test_the_table_goes_between_the_marks_of_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- campaign: begin -->\nold\n<!-- campaign: end -->\nafter\n")
    put_into(page, "new\n")
    assert (
        page.read_text() == "before\n<!-- campaign: begin -->\nnew\n<!-- campaign: end -->\nafter\n"
    )
    page.write_text("nothing\n")
    with pytest.raises(ValueError, match="campaign: begin"):
        put_into(page, "new\n")
