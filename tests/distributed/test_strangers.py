"""Runs of a stranger: read by every verb, and nothing that they name is written to or reached."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from pretrain.config.sources import dump_yaml
from pretrain.errors import UserError
from pretrain.export.run_exports import _remove_outdated, exported
from pretrain.runs.directory import GOOD, RunDirectory
from pretrain.runs.facts import read_facts
from tests.command_line import files_under
from tests.distributed.workers.strangers import ALLOWED, LOG
from tests.ranks import ROOT, run_program, train_to_end
from tests.tiny import tiny_overrides

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
WSD = {"schedule__kind": "wsd", "schedule__decay": 0.25, "checkpoint__every": 2}


@pytest.fixture(scope="module")
def runs(tiny_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of one rank: the stranger's, and another variant."""
    directory = tmp_path_factory.mktemp("runs")
    for name, changes in {
        "theirs": {"attention__variant": "vanilla", "checkpoint__keep_last": 9, **WSD},
        "other": {"attention__variant": "orthogonal", **WSD},
    }.items():
        train_to_end(tiny_overrides(tiny_shards, directory, name, **changes), ranks=1)
    return directory


def make_hostile(run: Path, forbidden: Path) -> None:
    """Let a run's files name `forbidden` wherever anything could be written or sent to."""
    forbidden.mkdir()
    monitor = {"enabled": True, "output_path": f"{forbidden}/monitor", "job_name": "theirs"}
    monitors: dict[str, Any] = {
        "csv_monitor": monitor,
        "tensorboard": monitor,
        "wandb": {"enabled": True, "project": "theirs"},
        "comet": {"enabled": True, "project": "theirs"},
        "flops_profiler": {"enabled": True, "output_file": f"{forbidden}/flops"},
        "comms_logger": {"enabled": True},
    }
    settings = run / "deepspeed.json"
    settings.write_text(json.dumps({"zero_optimization": {"stage": 0}, **monitors}))
    files = RunDirectory(run)
    config = read_facts(files.config)
    config["deepspeed"] = {"config": str(settings), "overrides": monitors}
    config["run"]["directory"] = f"{forbidden}/runs"
    config["data"]["cache_directory"] = f"{forbidden}/cache"
    config["telemetry"] |= {"wandb": True, "profile": {"at": 1, "steps": 1, "ranks": "all"}}
    config["checkpoint"] |= {"export_at_end": True, "fall_back": True, "keep_last": 1}
    files.config.write_text(dump_yaml(config))
    for checkpoint in files.complete_checkpoints():
        (checkpoint / GOOD).unlink(missing_ok=True)
        (checkpoint / GOOD).symlink_to(forbidden / "touched")


def test_no_verb_writes_or_sends_where_a_strangers_run_says(runs: Path, tmp_path: Path) -> None:
    run, forbidden, out = tmp_path / "theirs", tmp_path / "forbidden", tmp_path / "out"
    shutil.copytree(runs / "theirs", run, symlinks=True)
    make_hostile(run, forbidden)
    files = files_under(run)
    allowed = [out, *(tmp_path / name for name in ("home", "scratch", "watch")), run / "exports"]
    for directory in allowed[:-1]:
        directory.mkdir()
    (tmp_path / "watch/sitecustomize.py").write_text(
        "from tests.distributed.workers.strangers import watch\nwatch()\n"
    )
    log = tmp_path / "log"
    environment = {
        "PYTHONPATH": f"{tmp_path / 'watch'}:{ROOT}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": str(tmp_path / "home"),
        "TMPDIR": str(tmp_path / "scratch"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "scratch"),  # that of pytest's process may be set
        LOG: str(log),
        ALLOWED: ":".join(f"{path}/" for path in (*allowed, log)),
    }
    module = "tests.distributed.workers.strangers"
    done = run_program(
        [sys.executable, "-m", module, run, runs / "theirs", runs / "other", out],
        environment=environment,
    )
    assert done.returncode == 0, done.stderr
    assert log.read_text().splitlines() == []
    assert [*forbidden.iterdir()] == []
    after = files_under(run)
    assert {name: after[name] for name in files} == files
    assert {name.split("/")[0] for name in after.keys() - files.keys()} == {"exports"}
    replayed = json.loads((out / "replay/replay.json").read_text())
    assert replayed["trace"][-1][1] == replayed["recorded"]["loss/train"]


def test_a_branch_only_reads_a_strangers_trunk(
    runs: Path, tiny_shards: Path, tmp_path: Path
) -> None:
    trunk, forbidden = tmp_path / "theirs", tmp_path / "forbidden"
    shutil.copytree(runs / "theirs", trunk, symlinks=True)
    make_hostile(trunk, forbidden)
    files = files_under(trunk)
    changes = {"attention__variant": "vanilla", **WSD, "schedule__branch_from": trunk}
    changes["schedule__steps"] = 4
    overrides = tiny_overrides(tiny_shards, tmp_path / "runs", "branch", **changes)
    train_to_end(overrides, ranks=1)
    assert files_under(trunk) == files and [*forbidden.iterdir()] == []


def test_a_strangers_exports_that_lead_elsewhere_are_neither_written_nor_removed(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    (run / "checkpoints/step_00000007").mkdir(parents=True)
    (run / "checkpoints/step_00000007/COMPLETE").touch()
    (run / "config.yaml").touch()
    mine = tmp_path / "home"
    for name in ("documents", "step_00000001"):
        (mine / name).mkdir(parents=True)
        (mine / name / "letter.txt").touch()
    (run / "exports").symlink_to(mine)
    with pytest.raises(UserError, match=r"exports is a link, .* `python -m pretrain export"):
        exported(run)
    (run / "exports").unlink()
    mine.rename(run / "exports")  # nor is what is no export removed from a real one
    _remove_outdated(RunDirectory(run))
    assert len(files_under(run / "exports")) == 2
