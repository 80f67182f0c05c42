"""`telemetry.profile`: which steps it shows, and that its table adds up.

It changes nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pretrain.runs.metrics_file import read_metrics
from pretrain.runs.tags import STEP_SECONDS
from tests.ranks import train_to_end
from tests.tiny import tiny_overrides

pytestmark = pytest.mark.slow

STEPS = 5


@pytest.fixture(scope="module")
def runs(tiny_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same training twice.

    As always, and deterministic with both ranks' steps 3 and 4 profiled.
    """
    runs = tmp_path_factory.mktemp("profile")
    watched = {"telemetry__profile": "{at: 3, steps: 2, ranks: all}", "run__deterministic": "true"}
    for name, changes in {"plain": {}, "watched": watched}.items():
        overrides = tiny_overrides(tiny_shards, runs, name, schedule__steps=STEPS, **changes)
        train_to_end(overrides, ranks=2)
    return runs


def contents(runs: Path, name: str) -> dict[str, Any]:
    return json.loads((runs / "watched/profile" / name).read_text())


def test_the_trace_has_the_steps_that_were_asked_for_and_no_others(runs: Path) -> None:
    for rank in (0, 1):
        events = contents(runs, f"trace_rank_{rank}.json")["traceEvents"]
        steps = {name for event in events if "training step" in (name := str(event.get("name")))}
        assert steps == {"training step 3", "training step 4"}
        names = {str(event.get("name")) for event in events}
        assert {"aten::mm", "aten::_fused_adamw_"} <= names


def test_the_table_is_of_one_step_and_adds_up(runs: Path) -> None:
    table = contents(runs, "kernels_rank_0.json")
    assert (table["first_step"], table["steps"]) == (3, 2)
    seconds = table["seconds_per_step"]
    assert {"product", "attention", "optimizer", "collective", "norm", "host"} <= seconds.keys()
    assert min(seconds.values()) >= 0
    lines = (runs / "watched/profile/kernels_rank_0.txt").read_text().splitlines()
    rows = {
        line.split()[0]: [float(number.strip("%")) for number in line.split()[1:]]
        for line in lines[1:]
    }
    assert rows.keys() == seconds.keys() | {"all"}
    whole, percent = rows.pop("all")
    assert whole == pytest.approx(1e3 * sum(seconds.values()), abs=1e-3) and percent == 100
    assert sum(row[0] for row in rows.values()) == pytest.approx(whole, abs=0.01)
    # It is about the time that the steps took: nothing is missing, and nothing counted twice.
    records = list(read_metrics(runs / "watched/metrics.jsonl"))
    took = 1e3 * sum(record[STEP_SECONDS.tag] for record in records[2:4]) / 2
    assert 0.5 * took < whole < 1.5 * took


def test_profiled_and_deterministic_the_training_is_the_same(runs: Path) -> None:
    losses = [
        [record["loss/train"] for record in read_metrics(runs / name / "metrics.jsonl")]
        for name in ("plain", "watched")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == STEPS
    assert not (runs / "plain/profile").exists()
