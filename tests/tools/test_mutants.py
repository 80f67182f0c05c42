"""The faults that are planted, the score of a sample, and that a fault fails a test and no fault does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import ROOT, rank_environment
from tools.mutants.changes import Change, changes, planted
from tools.mutants.places import LEFT_OUT, TESTS, faults, modules
from tools.mutants.score import UNTOUCHED, Outcome, interval, summary, survivors
from tools.mutants.trials import KILLED, SURVIVED

SOURCE = '''
"""A docstring with 1 number."""
LIMIT: Final = 3

def share(values: list[int], last: bool = False) -> float:
    """Return 1 number."""
    if not values:
        raise ValueError(f"{LIMIT:03d} values")
    total = 0
    for value in values:
        if value < LIMIT and value != -1:
            total += value
    print(total)
    return total / len(values)
'''


def test_faults_are_in_code_and_not_in_types_or_texts() -> None:
    found = {(change.line, change.before, change.after) for change in changes(SOURCE)}
    assert found == {
        (3, "3", "4"),
        (5, "False", "True"),
        (7, "not values", "values"),
        (8, "raise ValueError(f'{LIMIT:03d} values')", "pass"),
        (9, "0", "1"),
        (11, "if value < LIMIT and value != -1:\n    total += value",
             "if not (value < LIMIT and value != -1):\n    total += value"),
        (11, "value < LIMIT and value != -1", "value < LIMIT or value != -1"),
        (11, "value < LIMIT", "value <= LIMIT"),
        (11, "value != -1", "value == -1"),
        (11, "-1", "1"),
        (11, "1", "2"),
        (12, "total += value", "pass"),
        (12, "total += value", "total -= value"),
        (13, "print(total)", "pass"),
        (14, "total / len(values)", "total * len(values)"),
    }  # fmt: skip
    assert {change.function for change in changes(SOURCE)} == {"", "share"}


def test_each_fault_is_planted_alone() -> None:
    every = changes(SOURCE)
    for change in every:
        module = planted(SOURCE, change.number)
        names: dict[str, object] = {"Final": None, "print": lambda text: None}
        exec(compile(module, "toy", "exec"), names)
    (plus,) = (change for change in every if change.after == "total -= value")
    names = {"Final": None, "print": lambda text: None}
    exec(compile(planted(SOURCE, plus.number), "toy", "exec"), names)
    assert names["share"]([2, 2]) == -2.0  # type: ignore[operator]
    with pytest.raises(ValueError, match="no fault 99"):
        planted(SOURCE, 99)


def test_the_places_are_there() -> None:
    listed, named = [str(path) for path in modules()], {str(path) for path, _ in faults()}
    assert named == set(listed) and len(listed) == len(set(listed)) > 30
    assert all((ROOT / place).exists() for place in TESTS)
    for place in LEFT_OUT:
        path, _, function = place.partition("::")
        assert (ROOT / path).is_file() and f"def {function}" in (ROOT / path).read_text()


def test_the_score_and_its_interval() -> None:
    low, high = interval(67, 100)
    assert (round(low, 4), round(high, 4)) == (0.5731, 0.7544)
    assert interval(0, 10)[0] == pytest.approx(0) and interval(10, 10)[1] == pytest.approx(1)
    module, change = Path("pretrain/study/gaps.py"), Change(1, 7, "holm", "a < b", "a <= b")
    outcomes = [
        Outcome(module, change, verdict, 3) for verdict in (KILLED, SURVIVED, UNTOUCHED, KILLED)
    ]
    text = summary(outcomes, 900, "make mutants", "abc")
    assert "**2 of 4** faults, drawn from 900, were found: 50.0%" in text
    assert "| `pretrain/study` | 4 | 2 |" in text
    line = "* pretrain/study/gaps.py:7 holm: `a < b` → `a <= b`"
    assert survivors(outcomes) == f"{line}\n{line} ({UNTOUCHED})\n"


PROGRAM = """
import sys
from pathlib import Path
from tools.mutants.changes import changes
from tools.mutants.trials import attempt
module, test = Path("data_pipeline/shards/proportions.py"), "tests/data_pipeline/shards/test_proportions.py"
(fault,) = [each.number for each in changes(module.read_text()) if each.before == "weight / sum(exact)"]
print([attempt(module, number, [test], 60.0, Path(sys.argv[1])) for number in (0, fault)])
"""


@pytest.mark.distributed
def test_a_fault_fails_a_test_and_no_fault_does_not(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path / "log"],
        cwd=ROOT,
        env=rank_environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout == f"{[SURVIVED, KILLED]}\n", done.stderr
