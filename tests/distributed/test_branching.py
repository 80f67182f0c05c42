"""A branch of a trunk is, from its first step on, the run of its own length without a trunk."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from laboratory.compare.compare_runs import compare_runs
from pretrain.runs.curves import read_curves
from pretrain.runs.tags import LOSS, STEP_SECONDS
from tests.command_line import (
    assert_refused,
    assert_same_checkpoint,
    deterministic_metrics,
    files_under,
)
from tests.ranks import train_on_warm_ranks, train_to_end
from tests.tiny import tiny_overrides

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
TRUNK, STEPS, POINT = 16, 12, 8  # steps 10 to 12 decay, and the trunk has checkpoints at 4, 8, 12 …


class Family:
    """A trunk and a run without one, in a directory; `train` makes more."""

    def __init__(
        self, shards: Path, directory: Path, ranks: int, layout: dict[str, object]
    ) -> None:
        self.shards, self.directory, self.ranks, self.layout = shards, directory, ranks, layout
        self.trunk, self.whole = directory / "trunk", directory / "whole"
        self.train("trunk", schedule__steps=TRUNK)
        self.train("whole")

    def overrides(self, name: str, **changes: object) -> list[str]:
        common = {
            "schedule__kind": "wsd",
            "schedule__decay": 0.25,
            "schedule__steps": STEPS,
            "model__dropout": 0.1,
            "checkpoint__every": 4,
            "checkpoint__keep_last": 9,
            "data__validate_every": 5,
            **({"deepspeed__config": "zero1"} if self.ranks > 1 else {}),
            **self.layout,
        }
        return tiny_overrides(self.shards, self.directory, name, **{**common, **changes})

    def train(self, name: str, **changes: object) -> Path:
        train_to_end(self.overrides(name, **changes), self.ranks)
        return self.directory / name

    def refused(self, *fragments: str, **changes: object) -> None:
        settings = {"schedule__branch_from": self.trunk, **changes}
        assert_refused(
            train_on_warm_ranks(self.overrides("refused", **settings), self.ranks), *fragments
        )
        assert not (self.directory / "refused" / "metrics.jsonl").exists()

    def assert_whole(self, run: Path, whole: Path | None = None) -> None:
        whole = whole or self.whole
        assert deterministic_metrics(run) == deterministic_metrics(whole)
        last = f"checkpoints/step_{STEPS:08d}"
        assert_same_checkpoint(run / last, whole / last, more_than=50)


@pytest.fixture(scope="module")
def family(tiny_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(tiny_shards, tmp_path_factory.mktemp("alone"), ranks=1, layout={})


def test_a_branch_is_the_run_of_its_own_length(
    tiny_shards: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    layout: dict[str, object] = {"parallel__tensor_model_parallel_size": 2}
    directory = tmp_path_factory.mktemp("tp2-dp2-zero1")
    family = Family(tiny_shards, directory, ranks=4, layout=layout)
    trunk_files = files_under(family.trunk)
    branch = family.train("branch", schedule__branch_from=family.trunk, checkpoint__every=2)
    assert files_under(family.trunk) == trunk_files
    family.assert_whole(branch)
    assert not (branch / f"checkpoints/step_{POINT:08d}").exists()

    environment = json.loads((branch / "environment.json").read_text())
    (segment,) = environment["segments"]
    trunk = json.loads((family.trunk / "environment.json").read_text())
    origin = {"run": str(family.trunk), "step": POINT}
    origin |= {key: trunk[key] for key in ("git_commit", "started")}
    assert segment["branched_from"] == origin and segment["first_step"] == POINT + 1
    changes = {
        "schedule.steps": {"was": TRUNK, "is": STEPS},
        "checkpoint.every": {"was": 4, "is": 2},
    }
    assert segment["changes"] == changes

    # It resumes from its own checkpoint of step 10, also where the trunk is gone.
    shutil.rmtree(branch / f"checkpoints/step_{STEPS:08d}")
    gone = family.trunk.rename(family.directory / "gone")
    try:
        lost = {"checkpoint__every": 2, "checkpoint__fall_back": "true"}
        family.train("branch", schedule__branch_from=family.trunk, **lost)
    finally:
        gone.rename(family.trunk)
    family.assert_whole(branch)
    first, second = json.loads((branch / "environment.json").read_text())["segments"]
    assert first["branched_from"] == origin and second["first_step"] == 11


def test_a_branch_of_a_branch(family: Family) -> None:
    family.train(
        "middle", schedule__branch_from=family.trunk, schedule__steps=14, checkpoint__every=9
    )
    end = family.train("end", schedule__branch_from=family.directory / "middle")
    family.assert_whole(end)
    (segment,) = json.loads((end / "environment.json").read_text())["segments"]
    trunk = json.loads((family.trunk / "environment.json").read_text())
    origin = segment["branched_from"]
    assert (origin["run"], origin["step"]) == (str(family.directory / "middle"), 9)
    assert segment["first_step"] == 10
    assert origin["started"] == trunk["segments"][0]["started"]


def test_a_branch_may_freeze_where_its_trunk_trains_on(tiny_shards: Path, tmp_path: Path) -> None:
    settings: dict[str, object] = {"attention__variant": "vanilla", "deepspeed__config": "zero1"}

    def freeze(at: float, **more: int) -> dict[str, object]:
        return {"attention__phases": json.dumps([{"at": at, "freeze": "all", **more}])}

    family = Family(tiny_shards, tmp_path, ranks=2, layout=settings | freeze(0.9))
    for step, point in ((8, POINT), (6, POINT - 4)):
        branch = family.train(
            f"after_{step}", schedule__branch_from=family.trunk, **freeze(step / STEPS)
        )
        (segment,) = json.loads((branch / "environment.json").read_text())["segments"]
        assert segment["branched_from"]["step"] == point
    family.assert_whole(family.directory / "after_8", family.train("alone", **freeze(8 / STEPS)))
    family.refused("applied after steps [14], in this run it would after [2]", **freeze(2 / STEPS))
    family.refused("written with attention.phases=[", **freeze(8 / STEPS, decay_steps=2))


def test_compare_reads_a_branch(family: Family) -> None:
    other = family.train(
        "other", schedule__branch_from=family.trunk, schedule__decay=0.5, checkpoint__every=2
    )
    curves = read_curves(other / "metrics.jsonl")
    assert curves.steps.tolist() == list(range(1, STEPS + 1)) and np.isfinite(curves[LOSS]).all()
    timed = np.isfinite(curves[STEP_SECONDS])
    assert curves.steps[timed].tolist() == list(range(5, STEPS + 1))  # its own steps alone
    comparison = compare_runs([family.whole, other], "whole", ["schedule.decay"])
    measured = {variant.runs[0].name: variant.cost.step_seconds for variant in comparison.variants}
    assert measured["other"] is not None and measured["other"].n == STEPS - 4


def test_what_does_not_match_is_refused_with_the_key(family: Family, tmp_path: Path) -> None:
    family.refused(
        "optimizer.weight_decay is 0.5, was 0.01 in the trunk", optimizer__weight_decay=0.5
    )
    family.refused("schedule.warmup_steps is 3, was 2 in the trunk", schedule__warmup_steps=3)
    family.refused("model.dropout=0.1 but this run has 0.3", model__dropout=0.3)
    family.refused(
        "no complete checkpoint up to step 3", "complete: 4, 8, 12, 16)", schedule__steps=4
    )
    nothing = tmp_path / "nothing"
    sentence = f"schedule.branch_from={nothing}: {nothing / 'config.yaml'} is missing"
    family.refused(sentence, schedule__branch_from=nothing)


def test_a_damaged_checkpoint_is_left_where_it_is(family: Family) -> None:
    file = family.trunk / f"checkpoints/step_{POINT:08d}/rank_00000.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    try:
        family.refused("rank_00000.safetensors does not have the SHA-256")
        trunk_files = files_under(family.trunk)
        earlier = family.train(
            "earlier", schedule__branch_from=family.trunk, checkpoint__fall_back="true"
        )
        assert files_under(family.trunk) == trunk_files
        family.assert_whole(earlier)
        origin = json.loads((earlier / "environment.json").read_text())["segments"][0][
            "branched_from"
        ]
        assert origin["step"] == POINT - 4
    finally:
        file.write_bytes(content)
