"""Checkpoints that are damaged or another run's: one sentence, exit code 2, nothing changed.

And what `python -m pretrain checkpoint list|verify` says of whole and of damaged ones.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.checkpoint.loading import StoredCheckpoint
from tests.command_line import (
    assert_refused,
    assert_same_checkpoint,
    checkpoint_tensors,
    deterministic_metrics,
    files_under,
)
from tests.ranks import ROOT, run_program, train_on_warm_ranks, train_to_end, warm_cli
from tests.tiny import tiny_overrides

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
NEWEST, BEFORE = "checkpoints/step_00000004", "checkpoints/step_00000002"
RANK_FILE = "rank_00001.safetensors"


class Trained:
    """A run of 4 steps on 2 ranks with checkpoints after 2 and 4; tests go on from copies of it."""

    def __init__(self, shards: Path, runs: Path) -> None:
        self.shards, self.runs = shards, runs
        train_to_end(self.overrides("trained", schedule__steps=4), ranks=2)

    def overrides(self, name: str, **changes: object) -> list[str]:
        settings: dict[str, object] = {
            "model__num_layers": 1,
            "schedule__steps": 6,
            "schedule__kind": "constant",
            "checkpoint__every": 2,
            "checkpoint__keep_last": 3,
            "data__loader_workers": 0,
            "telemetry__tensorboard": "false",
        }
        return tiny_overrides(self.shards, self.runs, name, **(settings | changes))

    def copy(self, name: str) -> Path:
        shutil.copytree(self.runs / "trained", self.runs / name)
        return self.runs / name

    def resume(self, name: str, **changes: object) -> subprocess.CompletedProcess[str]:
        return train_on_warm_ranks(self.overrides(name, **changes), ranks=2)

    def resume_to_end(self, name: str, **changes: object) -> subprocess.CompletedProcess[str]:
        return train_to_end(self.overrides(name, **changes), ranks=2)


@pytest.fixture(scope="module")
def trained(tiny_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tiny_shards, tmp_path_factory.mktemp("damaged"))


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


# What else can be wrong with files, and what makes another run of one, is in
# tests/pretrain/checkpoint.
def test_a_checkpoint_that_cannot_be_trusted_is_one_sentence(trained: Trained) -> None:
    run = trained.copy("flipped")
    flip(run / NEWEST / RANK_FILE)
    files = files_under(run)
    sentence = (RANK_FILE, "does not have the SHA-256", "checkpoint.fall_back=true")
    assert_refused(trained.resume("flipped"), *sentence)
    assert files_under(run) == files
    trained.resume_to_end("flipped", checkpoint__verify="size")


def test_another_run_is_one_sentence(trained: Trained) -> None:
    files = files_under(trained.runs / "trained")
    sentence = ("frozen digest mismatch", "seed=1234", "seed=7", "set attention.seed")
    assert_refused(trained.resume("trained", attention__seed=7), *sentence)
    assert files_under(trained.runs / "trained") == files


def test_a_damaged_checkpoint_is_kept_aside_if_that_is_asked_for(trained: Trained) -> None:
    whole = trained.copy("whole")
    run = trained.copy("aside")
    flip(run / NEWEST / RANK_FILE)
    damaged = files_under(run / NEWEST)
    trained.resume_to_end("whole")
    done = trained.resume_to_end("aside", checkpoint__fall_back="true")
    assert (
        f"damaged and kept aside as step_00000004.damaged: {run / NEWEST / RANK_FILE} does not"
        in done.stdout
    )
    assert "resumes after step 2" in done.stdout
    assert files_under(run / f"{NEWEST}.damaged") == damaged
    ours, theirs = (
        [record["loss/train"] for record in deterministic_metrics(path)] for path in (run, whole)
    )
    assert ours == theirs and len(ours) == 6
    last = "checkpoints/step_00000006"
    assert_same_checkpoint(run / last, whole / last)


def test_without_a_checkpoint_before_it_a_damaged_one_stops_the_run(trained: Trained) -> None:
    run = trained.copy("alone")
    shutil.rmtree(run / BEFORE)
    flip(run / NEWEST / RANK_FILE)
    files = files_under(run)
    done = trained.resume("alone", checkpoint__fall_back="true")
    assert_refused(done, RANK_FILE, "there is no checkpoint before it to continue from")
    assert files_under(run) == files


def test_a_checkpoint_without_its_marker_is_kept_and_the_run_does_not_go_back_unasked(
    trained: Trained,
) -> None:
    run = trained.copy("unmarked")
    (run / NEWEST / "COMPLETE").unlink()
    left = ["state.node-7.tmp", ".state.7", "checkpoints/.step_00000001", "lock.node-7.tmp"]
    for name in left:
        (run / name).touch()
    files = files_under(run)
    refusal = (
        "step_00000004 is not complete any more",
        "latest names it; restore it, or set checkpoint.fall",
    )
    assert_refused(trained.resume("unmarked"), *refusal)
    assert files_under(run) == files
    verified = warm_cli(["checkpoint", "verify", str(run)])
    assert (
        verified.returncode == 1
        and "step_00000004/COMPLETE is missing, though the" in verified.stdout
    )
    kept = files_under(run / NEWEST)
    done = trained.resume_to_end("unmarked", checkpoint__fall_back="true")
    assert "resumes after step 2" in done.stdout
    assert "step_00000004 is not complete any more" in done.stdout
    assert (
        "kept aside as step_00000004.incomplete: step_00000004 has all its files but" in done.stdout
    )
    assert files_under(run / f"{NEWEST}.incomplete") == kept
    assert [name for name in left if (run / name).exists()] == ["lock.node-7.tmp"]
    verified = warm_cli(["checkpoint", "verify", str(run)])
    assert verified.returncode == 0, verified.stdout


def test_what_is_good_is_not_deleted_for_lost_files_and_lost_settings_are_told(
    trained: Trained,
) -> None:
    run = trained.copy("filtered")
    (run / NEWEST / "PROVEN").touch()
    for lost in (f"{NEWEST}/COMPLETE", f"{NEWEST}/checkpoint.json", "checkpoints/latest"):
        (run / lost).unlink()
    settings = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(settings[: len(settings) // 2])
    files = files_under(run)
    refusal = (
        "step_00000004 has lost files: it has PROVEN, but no COMPLETE; restore it, or set",
        "checkpoint.fall_back=true to continue from step_00000002",
    )
    assert_refused(trained.resume("filtered"), *refusal)
    assert files_under(run) == files
    kept = files_under(run / NEWEST)
    changes = {"checkpoint__fall_back": "true", "optimizer__learning_rate": 1e-3}
    done = trained.resume_to_end("filtered", **changes)
    assert "kept aside as step_00000004.incomplete: step_00000004 has lost COMPLETE" in done.stdout
    assert files_under(run / f"{NEWEST}.incomplete") == kept
    assert f"kept aside as config.yaml.damaged: {run / 'config.yaml'}" in done.stdout
    segments = json.loads((run / "environment.json").read_text())["segments"]
    assert [segment.get("lost") for segment in segments] == [None, ["config.yaml"]]


@pytest.mark.parametrize(
    ("lost", "told"),
    [
        ((BEFORE, NEWEST), "step_00000004 is not complete any more, though"),
        ((BEFORE, f"{NEWEST}/COMPLETE"), "step_00000004 is not complete any more, though"),
        (("checkpoints", "metrics.jsonl"), "/summary.json tells of one"),
        (("checkpoints", "summary.json"), "/metrics.jsonl tells of one"),
        (("checkpoints", "metrics.jsonl", "summary.json"), "/state tells of one"),
    ],
)
def test_no_start_from_nothing_over_the_records_of_a_run(
    lost: tuple[str, ...], told: str, trained: Trained
) -> None:
    run = trained.copy(f"lost-{len(''.join(lost))}")
    for path in (run / name for name in lost):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    files = files_under(run)
    done = trained.resume(run.name, checkpoint__fall_back="true")
    assert_refused(
        done, str(run / "checkpoints"), told, "or choose another run.name to start afresh"
    )
    assert files_under(run) == files


def test_a_finished_run_is_given_no_settings_that_it_was_not_trained_with(trained: Trained) -> None:
    run = trained.copy("finished")
    trained.resume_to_end(run.name)
    files = files_under(run)
    done = trained.resume(run.name, optimizer__learning_rate=0.5)
    assert_refused(done, "has trained all its 6 steps, but optimizer.learning_rate is 0.5, was")
    assert files_under(run) == files


def test_of_an_older_checkpoint_that_is_a_link_only_the_link_is_removed(trained: Trained) -> None:
    run = trained.copy("linked")
    elsewhere = trained.runs / "elsewhere"
    (run / BEFORE).rename(elsewhere)
    (run / BEFORE).symlink_to(elsewhere)
    whole = files_under(elsewhere)
    trained.resume_to_end("linked", checkpoint__keep_last=1)
    assert [path.name for path in (run / "checkpoints").glob("*step*")] == ["step_00000006"]
    assert files_under(elsewhere) == whole


def test_the_example_of_the_documentation_reads_every_parameter(
    trained: Trained,
) -> None:
    page = (ROOT / "docs/api.md").read_text().partition("## A parameter of a checkpoint\n")[2]
    names: dict[str, Any] = {}
    exec(page.partition("```python\n")[2].partition("```")[0], names)
    checkpoint = trained.runs / "trained" / NEWEST
    expected = checkpoint_tensors(checkpoint)
    stored = StoredCheckpoint(checkpoint)
    assert len(stored.parameters) == 11
    for name, parameter in stored.parameters.items():
        for kind in parameter.kinds:
            wanted = expected[f"{kind}/{name}"]
            assert torch.equal(stored.full(kind, name), wanted)
            assert torch.equal(names["read"](checkpoint, name, kind), wanted)


def test_list_tells_what_there_is_without_loading_torch(trained: Trained) -> None:
    copy = trained.copy("listed")
    checkpoints = copy / "checkpoints"
    (checkpoints / "step_00000001").mkdir()
    shutil.copytree(copy / NEWEST, checkpoints / "step_00000003")
    (checkpoints / "step_00000003/COMPLETE").rename(checkpoints / "step_00000003/RUINED")
    shutil.copytree(copy / NEWEST, copy / f"{NEWEST}.damaged")
    shutil.copytree(copy / BEFORE, checkpoints / "step_00000005")
    (checkpoints / "step_00000005/PROVEN").unlink()
    program = (
        "import sys; from pretrain.__main__ import main\n"
        "try: main()\n"
        "finally: assert 'torch' not in sys.modules"
    )
    done = run_program([sys.executable, "-c", program, "checkpoint", "list", str(copy)])
    assert done.returncode == 0, done.stderr
    header, *rows = (" ".join(line.split()) for line in done.stdout.splitlines())
    assert header == "checkpoint tokens size written by age state"
    size = rows[1].split()[2:4]
    layout = "2 ranks: TP 1 x DP 2, ZeRO 0, fp32"
    assert [row.split()[0] for row in rows] == sorted(
        path.name for path in checkpoints.glob("step_*")
    )
    assert rows[0].startswith("step_00000001 – 0 B – ") and rows[0].endswith("unfinished")
    assert rows[1].startswith(f"step_00000002 512 {' '.join(size)} {layout} ")
    ends = ["good", "withdrawn: no finite loss", "good", "damaged, kept aside", "no loss of it yet"]
    assert all(row.endswith(end) for row, end in zip(rows[1:], ends, strict=True)), rows


def test_verify_of_whole_checkpoints_ends_with_0(trained: Trained) -> None:
    run = trained.runs / "trained"
    done = warm_cli(["checkpoint", "verify", str(run)])
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.splitlines()[1].startswith("step_00000004: 4 files, ")
    assert done.stdout.count(": whole, good\n") == 2
    checkpoints = json.loads(warm_cli(["checkpoint", "verify", str(run), "--json"]).stdout)
    assert [(saved["step"], saved["tokens"], saved["state"]) for saved in checkpoints] == [
        (2, 512, "good"),
        (4, 1024, "good"),
    ]
    assert checkpoints[1]["layout"]["world_size"] == 2 and checkpoints[1]["problems"] == []


def test_verify_names_every_damaged_file_and_ends_with_1(trained: Trained) -> None:
    copy = trained.copy("verified")
    (copy / NEWEST / RANK_FILE).unlink()
    flipped = copy / BEFORE / RANK_FILE
    flip(flipped)
    done = warm_cli(["checkpoint", "verify", str(copy)])
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    lines = done.stdout.splitlines()
    assert f"{flipped} does not have the SHA-256 that it was saved with" in lines[1]
    assert any(f"{NEWEST}/{RANK_FILE} is missing" in line for line in lines)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    for verb in ("list", "verify"):
        done = warm_cli(["checkpoint", verb, str(tmp_path / "nothing")])
        assert_refused(done, "nothing has no directory checkpoints", "give the directory of a run")


def test_another_file_beside_the_checkpoints_stops_nothing(trained: Trained) -> None:
    run = trained.copy("archived")
    (run / "checkpoints/step_00000004.tar.gz").write_bytes(b"an archive")
    done = train_on_warm_ranks(trained.overrides(run.name), ranks=1)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(
    os.geteuid() == 0 and not shutil.which("setpriv"), reason="root may do everything"
)
@pytest.mark.parametrize("mode", [pytest.param(0o000, marks=pytest.mark.full), 0o555])
def test_a_directory_without_permission_is_one_sentence(mode: int, trained: Trained) -> None:
    run = trained.copy(f"locked-{mode}")
    files = files_under(run)
    (run / "checkpoints").chmod(mode)
    as_anybody = (
        ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    )
    command = [*as_anybody, sys.executable, "-m", "pretrain", "train", "demo"]
    done = run_program([*command, *trained.overrides(run.name)])
    (run / "checkpoints").chmod(0o755)
    assert_refused(done, f"{run / 'checkpoints'} cannot be read and written", "permissions")
    assert files_under(run) == files
