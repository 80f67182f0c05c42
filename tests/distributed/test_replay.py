"""Steps made again: bit-equal at the run's layout, equal up to rounding at another; runs told
apart."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from laboratory.replay import prepare
from laboratory.replay.__main__ import ranked_by_share
from laboratory.replay.prepare import Past, look_up, replayed
from laboratory.replay.report import (
    agreement,
    compare_states,
    diff_document,
    first_recorded,
    first_saved,
    layer_norms,
    replay_document,
)
from pretrain.__main__ import app
from pretrain.errors import UserError
from pretrain.runs.directory import RunDirectory
from tests.command_line import files_under
from tests.ranks import ROOT, rank_environment, run_ranks, train_on_warm_ranks, warm_cli
from tests.tiny import tiny_overrides

pytestmark = [pytest.mark.timeout(1200), pytest.mark.slow]
STEPS = 12
MODERN = {
    "model__norm": "rmsnorm",
    "model__mlp": "swiglu",
    "model__qk_norm": "true",
    "model__z_loss": 1e-3,
}
RUNS: dict[str, tuple[int, dict[str, object]]] = {
    "one": (1, {}),
    "parallel": (4, {"parallel__tensor_model_parallel_size": 2, "deepspeed__config": "zero1"}),
    "zero3": (2, {"deepspeed__config": "zero3", "model__dropout": 0.1}),
    "unfreezes": (1, {"attention__variant": "unfreeze"}),
    "documents": (2, {"data__reset_at_document_end": True, "deepspeed__config": "zero2"}),
}


@pytest.fixture(autouse=True)
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real ranks from the server of warm ones, in place of the launcher's new processes."""

    def launch(command: Sequence[str], ranks: int) -> int:
        run_ranks(ranks, "tests.distributed.workers.replay:one_rank", {"words": command[3:]})
        return 0

    monkeypatch.setattr(prepare, "launch_local_ranks", launch)


def trained(shards: Path, directory: Path, name: str, **changes: object) -> Path:
    ranks, settings = RUNS[name]
    values = {
        "schedule__steps": STEPS,
        "checkpoint__every": 4,
        "checkpoint__keep_last": 9,
        **MODERN,
        **settings,
        **changes,
    }
    done = train_on_warm_ranks(tiny_overrides(shards, directory, name, **values), ranks)
    assert done.returncode == 0, done.stderr
    return directory / name


@pytest.fixture(scope="module")
def run(tiny_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tiny_shards, tmp_path_factory.mktemp("replay"), "parallel")


@pytest.fixture(scope="module")
def single(tiny_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run on one rank."""
    return trained(tiny_shards, tmp_path_factory.mktemp("one"), "one")


def made_again(past: Past, overrides: Sequence[str] = (), ranks: int = 0) -> tuple[str, dict]:
    with replayed(past, overrides, ranks) as (_, answer):
        return agreement(past.record, *answer["trace"][-1][1:]), answer


def test_a_step_is_bit_equal_at_its_layout_and_close_at_another(run: Path) -> None:
    files = files_under(run)
    past = look_up(run, 7)
    assert past.checkpoint is not None and past.checkpoint.name == "step_00000004"
    words, answer = made_again(past)
    assert words == "bit-equal to the record" and answer["begins_after"] == 4
    documents = answer["documents"]
    assert sum(entry["tokens"] for entry in documents) == 8 * 32
    total = sum(entry["loss"] for entry in documents)
    assert total / (8 * 32) == pytest.approx(past.record["loss/train"], rel=1e-6)
    shares = [entry["share"] for entry in documents]
    assert shares == sorted(shares, reverse=True) and sum(shares) == pytest.approx(1)
    norms = layer_norms(answer["gradient_norms"])
    assert list(norms)[1:3] == ["layer 0", "layer 1"]
    norm = past.record["optim/grad_norm"]
    assert sum(part_norm**2 for part_norm in norms.values()) == pytest.approx(norm**2)

    layout = [
        "parallel.tensor_model_parallel_size=1",
        "deepspeed.config=zero0",
        "data.micro_batch_size=4",
    ]
    words, other = made_again(past, layout, ranks=1)
    assert words.startswith("within ") and float(words.split()[1]) <= 1e-6
    names = [[entry["document"] for entry in listed] for listed in (documents, other["documents"])]
    assert names[0] == names[1]
    for name, part_norm in layer_norms(other["gradient_norms"]).items():
        assert part_norm == pytest.approx(norms[name], rel=1e-4)
    assert files_under(run) == files


def test_what_cannot_be_replayed_is_refused(run: Path) -> None:
    for step in (0, STEPS + 1):
        with pytest.raises(
            UserError, match=f"has no step {step}: its records go from 1 to {STEPS}"
        ):
            look_up(run, step)
    with pytest.raises(UserError, match="would change the step itself"):
        made_again(look_up(run, 3), ["optimizer.learning_rate=1"])
    refused = warm_cli(["replay", str(run.parent), "--step", "3"])
    assert refused.returncode == 2 and "is not a run directory" in refused.stderr


def test_the_first_difference_of_two_runs_is_found(tiny_shards: Path, tmp_path: Path) -> None:
    """Learning rates that part after step 5, so the weights do, and the losses one step later."""
    constant = {"schedule__kind": "constant"}
    single = trained(tiny_shards, tmp_path / "whole", "one", **constant)
    other = trained(tiny_shards, tmp_path, "one", schedule__steps=5, **constant)
    trained(tiny_shards, tmp_path, "one", optimizer__learning_rate=1e-3, **constant)
    step, words = first_recorded(single, other)
    assert step == 6 and words.startswith("the records differ from step 6 on, optim/lr ")
    saved, equal_until, tensors = first_saved(single, other)
    assert tensors is not None and (equal_until, tensors.step) == (4, 8)
    assert saved == "the checkpoints of step 8 differ"
    assert all(row[2] > 0 for row in tensors.rows) and not tensors.alone
    assert compare_states(RunDirectory(single), RunDirectory(single), STEPS) is None
    for step in (7, 4):  # after the change of the rate, and before it
        assert made_again(look_up(other, step))[0] == "bit-equal to the record"


def test_a_branch_is_compared_from_where_it_begins(tiny_shards: Path, tmp_path: Path) -> None:
    wsd = {"schedule__kind": "wsd", "schedule__decay": 0.5}
    trunk = trained(tiny_shards, tmp_path / "trunk", "one", **wsd)
    short = {"schedule__steps": 8, "schedule__branch_from": str(trunk)}
    branch = trained(tiny_shards, tmp_path / "branch", "one", **wsd, **short)
    content = diff_document(trunk, branch).content
    assert content["first_step"] == 5 and len(content["reproduced"]) == 2
    assert all("bit-equal to the record" in sentence for sentence in content["reproduced"])
    keys = [cause.partition(":")[0] for cause in content["causes"]]
    assert keys == ["schedule.steps", "schedule.branch_from"]
    with pytest.raises(UserError, match=f"replay step 3 of its trunk, {trunk}$"):
        look_up(branch, 3)


def test_runs_that_differ_in_what_they_measured_are_equal_when_repeated(
    tiny_shards: Path, tmp_path: Path
) -> None:
    validated = {"data__validate_every": 2, "schedule__steps": 5}
    pair = [
        trained(
            tiny_shards, tmp_path / str(number), "one", data__validation_samples=number, **validated
        )
        for number in (4, 8)
    ]
    content = diff_document(*pair).content
    assert content["first_step"] == 2 and "data.validation_samples: 4 and 8" in content["causes"]
    assert "losses, gradient norms and tensors are equal" in content["answer"]


def test_what_cannot_be_repeated_is_compared_all_the_same(single: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(single, tmp_path / "one")
    records = (copy / "metrics.jsonl").read_text().splitlines()
    third = {**json.loads(records[2]), "loss/train": 1.0}
    (copy / "metrics.jsonl").write_text("\n".join([*records[:2], json.dumps(third), *records[3:]]))
    config = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(
        re.sub(r"(?m)^  directory: .*shards$", "  directory: gone", config)
    )
    content = diff_document(single, copy).content
    assert content["first_step"] == 3 and content["reproduced"] == []
    assert "the records differ from step 3 on" in content["answer"]
    assert "Step 3 was not repeated: data directory gone does not exist" in content["answer"]
    (copy / "metrics.jsonl").write_text("\n".join(records[::2]))
    other = shutil.copytree(copy, tmp_path / "other")
    (other / "metrics.jsonl").write_text("\n".join(records[1::2]))
    shutil.rmtree(other / "checkpoints")
    answer = diff_document(other, copy).content["answer"]
    assert answer.startswith("Nothing to compare: no step is recorded by both; no step has a")


def test_the_stage_that_auto_chose_then_is_taken_again(single: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(single, tmp_path / "one")
    file = copy / "environment.json"
    assert "deepspeed.config=zero0" in look_up(copy, 3).settings
    facts = json.loads(file.read_text())
    facts["segments"][0]["zero_stage"] = 1
    file.write_text(json.dumps(facts))
    assert "deepspeed.config=zero1" in look_up(copy, 3).settings


def restarted(original: Path, directory: Path, *starts: tuple[int, dict[str, object]]) -> Path:
    """A copy of a run that says it was started again: (first step, {key: value before})."""
    copy = shutil.copytree(original, directory / "one")
    file = copy / "environment.json"
    facts = json.loads(file.read_text())
    (first,) = facts["segments"]
    facts["segments"] += [
        {**first, "first_step": step, "changes": {key: {"was": was} for key, was in old.items()}}
        for step, old in starts
    ]
    file.write_text(json.dumps(facts))
    return copy


def test_the_last_start_that_can_have_made_a_step_made_it(single: Path, tmp_path: Path) -> None:
    """Ten steps, then twelve; then back to step 5, and on with another rate."""
    starts = ((11, {"schedule.steps": 10}), (6, {"optimizer.learning_rate": 0.25}))
    copy = restarted(single, tmp_path, *starts)
    first = look_up(copy, 5).settings
    assert {"schedule.steps=10", "optimizer.learning_rate=0.25"} <= {*first}
    assert not any("learning_rate" in text or "steps" in text for text in look_up(copy, 9).settings)


def test_steps_of_other_settings_are_not_made_with_those_of_the_step(
    single: Path, tmp_path: Path
) -> None:
    copy = restarted(single, tmp_path, (7, {"optimizer.learning_rate": 0.25, "telemetry.every": 2}))
    assert look_up(copy, 9).checkpoint == copy / "checkpoints/step_00000008"
    said = r"changed optimizer.learning_rate at step 7 .* restore .*step_00000006$"
    with pytest.raises(UserError, match=said):
        look_up(copy, 8)
    copy = restarted(single, tmp_path / "uncounted", (7, {"telemetry.every": 2}))
    assert look_up(copy, 8).checkpoint == copy / "checkpoints/step_00000004"


def test_a_step_whose_loss_is_not_finite_is_shown(tiny_shards: Path, tmp_path: Path) -> None:
    # In fp32 the first update makes the weights so large that products overflow.
    overrides = tiny_overrides(tiny_shards, tmp_path, "nan", optimizer__learning_rate=1e30)
    assert train_on_warm_ranks(overrides, 1).returncode
    past = look_up(tmp_path / "nan", 2)
    with replayed(past) as (_, answer):
        document = replay_document(past, answer, another_layout=False)
    assert document.content["documents"][0]["loss"] is None
    text = "\n".join(map(str, document.page))
    assert "gradient norm not finite; without a finite record of the step" in text
    assert "### 1. " in text and "loss not finite)" in text


def test_documents_whose_loss_is_not_finite_come_first() -> None:
    losses = (1.0, math.nan, 3.0)
    ranked = ranked_by_share([{"loss": loss} for loss in losses])
    assert [entry["loss"] for entry in ranked[1:]] == [3.0, 1.0] and math.isnan(ranked[0]["loss"])
    assert [entry["share"] for entry in ranked[1:]] == [0.75, 0.25]


def test_a_replay_ends_at_a_signal(single: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "pretrain", "replay", str(single), "--out", str(out)]
    with subprocess.Popen(
        command, cwd=ROOT, env=rank_environment(), stderr=subprocess.PIPE, text=True
    ) as replay:
        process = psutil.Process(replay.pid)
        while not process.children() or process.children()[0].num_threads() == 1:
            assert replay.poll() is None
            time.sleep(0.01)
        time.sleep(0.5)  # past the rank's first lines
        replay.terminate()
        assert replay.wait(60) == 128 + signal.SIGTERM
        assert replay.stderr is not None
        assert replay.stderr.read() == "rank 0 was ended by signal 15 (Terminated)\n"
    assert not out.exists()


@pytest.mark.full
def test_a_hundred_steps_of_ten_runs(tiny_shards: Path, tmp_path: Path) -> None:
    generator = random.Random(25)
    words = []
    for seed in (1, 2):
        for name in RUNS:
            run_directory = trained(tiny_shards, tmp_path / str(seed), name, run__seed=seed)
            for step in generator.sample(range(1, STEPS + 1), 10):
                words.append((name, seed, step, made_again(look_up(run_directory, step))[0]))
    assert len(words) == 100
    assert [outcome for outcome in words if outcome[-1] != "bit-equal to the record"] == []


def test_the_verbs_write_their_pages(run: Path, single: Path, tmp_path: Path) -> None:
    """Replay with the launcher's own processes, of a run that has one."""
    done = warm_cli(["replay", str(single), "--step", "5", "--out", str(tmp_path / "page")])
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert "bit-equal to the record (from step 4 on, the layout of the run" in (
        " ".join(done.stdout.split())
    )
    page = (tmp_path / "page/report.md").read_text()
    assert "## Gradient norm by part" in page and "### 1. " in page
    app(["diff", str(single), str(run), "--out", str(tmp_path / "diff")], standalone_mode=False)
    content = json.loads((tmp_path / "diff/diff.json").read_text())
    assert "parallel.tensor_model_parallel_size: 1 and 2" in content["causes"]
    assert (
        content["first_step"] <= 3 and "states of tensors differ, the first in" in content["answer"]
    )
    assert content["tensors"] and max(row[2] for row in content["tensors"]) < 1e-4
