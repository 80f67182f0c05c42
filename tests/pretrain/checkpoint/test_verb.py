"""`python -m pretrain checkpoint list|verify`: whole and damaged checkpoints."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from tests.command_line import assert_refused
from tests.ranks import run_program, train_on_warm_ranks, warm_cli
from tests.tiny import tiny_overrides

pytestmark = pytest.mark.distributed
NEWEST = "step_00000004"
RANK_FILE = "rank_00001.safetensors"


@pytest.fixture(scope="module")
def run(tiny_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints after steps 2 and 4, by two ranks."""
    runs = tmp_path_factory.mktemp("listed")
    overrides = tiny_overrides(tiny_shards, runs, "run", schedule__steps=4, checkpoint__every=2)
    done = train_on_warm_ranks(overrides, ranks=2)
    assert done.returncode == 0, done.stderr
    return runs / "run"


def test_list_tells_what_there_is_without_loading_torch(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    checkpoints = copy / "checkpoints"
    (checkpoints / "step_00000001").mkdir()
    shutil.copytree(checkpoints / NEWEST, checkpoints / "step_00000003")
    (checkpoints / "step_00000003/COMPLETE").rename(checkpoints / "step_00000003/RUINED")
    shutil.copytree(checkpoints / NEWEST, checkpoints / f"{NEWEST}.damaged")
    shutil.copytree(checkpoints / "step_00000002", checkpoints / "step_00000005")
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
    assert rows[1].startswith(f"step_00000002 512 {' '.join(size)} {layout} ") and rows[1].endswith(
        " s good"
    )
    ends = ["withdrawn: no finite loss", "good", "damaged, kept aside", "no loss of it yet"]
    assert all(row.endswith(end) for row, end in zip(rows[2:], ends, strict=True)), rows


def test_verify_of_whole_checkpoints_ends_with_0(run: Path) -> None:
    done = warm_cli(["checkpoint", "verify", str(run)])
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.splitlines()[1].startswith(f"{NEWEST}: 4 files, ")
    assert done.stdout.count(": whole, good\n") == 2
    checkpoints = json.loads(warm_cli(["checkpoint", "verify", str(run), "--json"]).stdout)
    assert [(each["step"], each["tokens"], each["state"]) for each in checkpoints] == [
        (2, 512, "good"),
        (4, 1024, "good"),
    ]
    assert checkpoints[1]["layout"]["world_size"] == 2 and checkpoints[1]["problems"] == []


def test_verify_names_every_damaged_file_and_ends_with_1(run: Path, tmp_path: Path) -> None:
    """test_files.py has the other damages of a file."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    (copy / "checkpoints" / NEWEST / RANK_FILE).unlink()
    flipped = copy / "checkpoints/step_00000002" / RANK_FILE
    content = bytearray(flipped.read_bytes())
    content[len(content) // 2] ^= 1
    flipped.write_bytes(content)
    done = warm_cli(["checkpoint", "verify", str(copy)])
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    lines = done.stdout.splitlines()
    assert f"{flipped} does not have the SHA-256 that it was saved with" in lines[1]
    assert any(f"{NEWEST}/{RANK_FILE} is missing" in line for line in lines)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    for verb in ("list", "verify"):
        done = warm_cli(["checkpoint", verb, str(tmp_path / "nothing")])
        assert_refused(done, "nothing has no directory checkpoints", "give the directory of a run")
