"""What may be removed of a run: of checkpoints without a marker only what a killed save leaves."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pretrain.runs.directory import GOOD, MARKER, WITHDRAWN, RunDirectory
from pretrain.runs.removal import make_room, put_away, remove_left_behind, remove_oldest
from tests.fabricated_checkpoints import about, bare_checkpoint, write_two_ranks
from tests.mounts import mounted
from tests.parsed_files import nodes
from tests.ranks import ROOT

PARTS = {"rank_00000.safetensors", "rank_00001.safetensors"}
INDEX, ABOUT = "parameters.json", "checkpoint.json"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return complete_run(tmp_path / "run")


def complete_run(path: Path) -> RunDirectory:
    """A run with a complete checkpoint of two ranks, of step 6."""
    run = RunDirectory(path)
    write_two_ranks(run.checkpoint(6), about())
    return run


def keep(checkpoint: Path, names: set[str]) -> None:
    for path in checkpoint.iterdir():
        if path.name not in names:
            path.unlink()


@pytest.mark.parametrize(
    "names",
    [
        {*PARTS, INDEX, ABOUT},
        {*PARTS, INDEX},
        {*PARTS, GOOD},
        {GOOD},
        PARTS,
        {ABOUT},
        {*PARTS, "notes of mine"},
    ],
    ids=lambda names: "+".join(sorted(names)),
)
def test_a_checkpoint_that_has_lost_files_is_kept_aside(run: RunDirectory, names: set[str]) -> None:
    path = run.checkpoint(6)
    for name in names - {file.name for file in path.iterdir()}:
        (path / name).touch()
    keep(path, names)
    aside = put_away(run, path)
    assert aside == path.with_name(f"{path.name}.incomplete") and not path.exists()
    assert {file.name for file in aside.iterdir()} == names


def test_what_a_killed_save_leaves_is_removed(run: RunDirectory) -> None:
    path = run.checkpoint(6)
    first, second = sorted(PARTS)
    whole = (path / second).read_bytes()
    cases: dict[str, set[str]] = {
        "nothing yet": set(),
        "half a file": {first},
        "one of two": {first, second, "rank_00000.written"},
        "the index, half": {*PARTS, "rank_00000.written", f"{INDEX}.host-12.tmp"},
        "the index": {*PARTS, "rank_00000.written", INDEX},
    }
    for names in cases.values():
        path.mkdir(exist_ok=True)
        for name in names:
            (path / name).write_bytes(whole[:-1] if name in PARTS else b"{}")
        keep(path, names)
        assert put_away(run, path) is None and list(run.checkpoints.iterdir()) == [], names


def test_what_latest_names_or_is_elsewhere_is_kept_and_what_counts_stays(
    run: RunDirectory, tmp_path: Path
) -> None:
    path = run.checkpoint(6)
    assert put_away(run, path) is None and path.is_dir()
    keep(path, set())
    run.latest.write_text(path.name + "\n")
    assert run.lost_checkpoints() == [path]
    aside = put_away(run, path, begun_here=True)
    assert aside is not None and not path.exists()
    run.latest.unlink()
    aside.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    aside = put_away(run, path)
    assert aside is not None and aside.is_symlink()
    (tmp_path / "elsewhere").rename(path)
    assert run.lost_checkpoints() == []
    assert put_away(run, path) is None and not path.exists()


def test_room_for_a_checkpoint_is_made_without_loss(run: RunDirectory) -> None:
    path = run.checkpoint(6)
    make_room(run, path)  # complete: somebody has put it there
    assert (path.with_name(f"{path.name}.incomplete") / MARKER).exists() and not path.exists()
    path.mkdir()
    (path / WITHDRAWN).touch()
    make_room(run, path)
    make_room(run, path)
    assert [entry.name for entry in run.checkpoints.iterdir()] == [f"{path.name}.incomplete"]


def test_the_last_good_checkpoint_outlives_newer_ones(run: RunDirectory) -> None:
    for step in (7, 8, 9):
        bare_checkpoint(run, step)
    (run.checkpoint(7) / GOOD).touch()
    remove_oldest(run, keep_last=1, every=1)
    assert run.complete_checkpoints() == [run.checkpoint(9), run.checkpoint(7)]


@pytest.mark.parametrize(("every", "kept"), [(10, [37, 30, 20, 10]), (0, [37, 34, 30, 24])])
def test_checkpoints_of_a_signal_go_first(run: RunDirectory, every: int, kept: list[int]) -> None:
    for step in (10, 20, 24, 30, 34, 37):
        bare_checkpoint(run, step)
    remove_oldest(run, keep_last=4, every=every)
    assert run.complete_checkpoints() == [run.checkpoint(step) for step in kept]


def test_what_cannot_be_removed_is_named_and_tried_again(run: RunDirectory) -> None:
    bare_checkpoint(run, 7)
    run.removed(run.checkpoint(3)).mkdir()
    in_the_way = run.removed(run.checkpoint(6))
    in_the_way.touch()
    left = remove_oldest(run, keep_last=1, every=1)
    assert left is not None and left.startswith(str(in_the_way))
    assert left.endswith("cannot be removed (Not a directory)")
    in_the_way.unlink()
    assert remove_oldest(run, keep_last=1, every=1) is None
    assert [path.name for path in run.checkpoints.iterdir()] == ["step_00000007"]


def test_what_is_held_stops_no_start_and_goes_later(tmp_path: Path) -> None:
    """As on NFS, which keeps a removed file until every process has closed it."""
    (tmp_path / "disk").mkdir()
    with mounted(tmp_path / "disk", "size=16m") as disk:
        run = complete_run(disk / "run")
        path = run.checkpoint(6)
        for _ in range(2):
            (path / MARKER).replace(path / WITHDRAWN)
            hold(path)
            assert put_away(run, path) is None and not path.exists()
            complete_run(run.path)
        held = sorted(run.half_removed())
        assert [directory.name for directory in held] == [".step_00000006", ".step_00000006-1"]
        assert all([entry.name for entry in directory.iterdir()] == ["held"] for directory in held)
        assert run.complete_checkpoints() == [path]
        left = remove_oldest(run, keep_last=1, every=1)
        assert left is not None and left.startswith((f"{held[0]} is", f"{held[1]} is"))
        assert left.endswith("cannot be removed (Device or resource busy)")
        for directory in held:
            subprocess.run(["umount", directory / "held"], check=True)
        assert remove_oldest(run, keep_last=1, every=1) is None
        assert [*run.checkpoints.iterdir()] == [path]


def hold(checkpoint: Path) -> None:
    """Keep a directory from being removed: a file system is mounted in it."""
    (checkpoint / "held").mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", checkpoint / "held"]
    subprocess.run(command, check=True)


def test_only_temporary_files_of_this_program_are_left_behind(run: RunDirectory) -> None:
    temporary = ["state.node-7.tmp", ".state.7", "latest.a.b-7.tmp"]
    others = ["notes.tmp", "lock.node-7.tmp", "my-1.tmp.txt"]
    for name in (*temporary, *others):
        (run.path / name).touch()
    (run.checkpoints / ".step_00000001").mkdir()
    (run.checkpoints / ".step_00000001-2").mkdir()
    (run.checkpoints / ".step_of_mine").mkdir()
    remove_left_behind(run)
    left = {path.name for path in (*run.path.iterdir(), *run.checkpoints.iterdir())}
    assert left == {*others, "checkpoints", "step_00000006", ".step_of_mine"}


REMOVES = {"rmtree", "unlink", "rmdir", "remove", "removedirs", "truncate"}
OUTSIDE = {
    "laboratory/compare/report.py": "links that it made itself in --out",
    "pretrain/export/directories.py": "what it made itself beside --out",
    "pretrain/export/run_exports.py": "exports, which are made again",
    "laboratory/reporting/plots.py": "figures in --out",
    "pretrain/runs/lock.py": "directories that were made for the lock, if they are empty",
    "pretrain/runs/metrics_file.py": "records after the checkpoint that a run resumes from",
}


def removals(path: Path) -> Iterator[str]:
    for node in nodes(path):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            called = ast.unparse(node.func)
            name = called.rpartition(".")[2]
            of_a_list = name == "remove" and called not in ("os.remove", "remove")
            if name in REMOVES and not of_a_list:
                yield f"{path.name}:{node.lineno}"


def test_all_that_is_removed_of_a_run_is_removed_in_one_place() -> None:
    removals_by_file = {
        str(path.relative_to(ROOT)): [*removals(path)]
        for package in ("pretrain", "laboratory")
        for path in (ROOT / package).rglob("*.py")
    }
    removing = {name for name, places in removals_by_file.items() if places}
    assert removing == {"pretrain/runs/removal.py", *OUTSIDE}


WRITES = {"write_text_atomically", "write_json", "replace_file", "write_text", "write_bytes"}
RECORD = re.compile(r"\.(config|environment|audit|summary|metrics|latest|state_file)\b")
WRITERS = {
    "pretrain/checkpoint/branching.py": "the first records of a branch, which has none yet",
    "laboratory/replay/prepare.py": "of a directory that it has just made",
    "pretrain/runs/directory.py": "the state, and `latest`, once what it named has been judged",
    "pretrain/training/run_files.py": "what `training.earlier` has read before, or refused",
}


def test_the_records_of_a_run_are_written_anew_by_who_has_read_them() -> None:
    writing = {
        str(path.relative_to(ROOT))
        for package in ("pretrain", "laboratory")
        for path in (ROOT / package).rglob("*.py")
        for node in nodes(path)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).rpartition(".")[2] in WRITES
        and RECORD.search(ast.unparse(node))
    }
    assert writing == WRITERS.keys()
