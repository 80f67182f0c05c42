"""Output whose reader goes away, and cores of a share of the machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.ranks.cores import usable_cores
from tests.ranks import ROOT, run_program

LOST = """
import os, sys
from pretrain.ranks.output import outlive_output, say_at_once
outlive_output()
outlive_output()
print("read", flush=True)
sys.stdin.readline()
for line in range(3):
    print("lost", flush=True)
say_at_once("lost")
os.system("echo lost")
print("at the end", file=sys.stderr)
"""


def test_a_process_outlives_the_reader_of_its_output_and_says_so_once() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", LOST],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin and process.stdout and process.stderr
    assert process.stdout.readline() == "read\n"
    process.stdout.close()
    process.stdin.write("go\n")
    process.stdin.close()
    errors = process.stderr.read()
    assert process.wait(timeout=60) == 0
    assert errors.splitlines() == [
        "warning: standard output cannot be written any more (Broken pipe); the work continues "
        "without it",
        "at the end",
    ]


def test_a_process_outlives_both_outputs() -> None:
    program = """
import sys
from pretrain.ranks.output import outlive_output
outlive_output()
print("lost", flush=True)
print("lost", file=sys.stderr, flush=True)
open(sys.argv[1], "w").write("done")
"""
    full = os.open("/dev/full", os.O_WRONLY)
    with subprocess.Popen(
        [sys.executable, "-c", program, os.devnull], cwd=ROOT, stdout=full, stderr=full
    ) as process:
        assert process.wait(timeout=60) == 0
    os.close(full)


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_a_stream_that_came_closed_is_no_place_for_a_file(
    closed: tuple[int, ...], tmp_path: Path
) -> None:
    """Without a standard output the file would be descriptor 1, and get what a library prints."""
    program = """
import os, sys
from pretrain.ranks.output import outlive_output
outlive_output()
print("lost", flush=True)
print("lost", file=sys.stderr, flush=True)
with open(sys.argv[1], "w") as file:
    os.system("echo lost; echo lost >&2")
    file.write("kept")
"""
    redirections = " ".join(f"{number}>&-" for number in closed)
    kept = tmp_path / "kept"
    script = f'exec "$0" -c "$1" "$2" {redirections}'
    done = run_program(["sh", "-c", script, sys.executable, program, kept], timeout=60)
    assert (done.returncode, kept.read_text()) == (0, "kept")


@pytest.mark.parametrize(
    ("line", "files", "cores"),
    [
        ("0::/job/step", {"job/cpu.max": "100000 100000", "job/step/cpu.max": "max 100000"}, 1),
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        (
            "4:cpu,cpuacct:/job",
            {
                "cpu,cpuacct/job/cpu.cfs_quota_us": "90000",
                "cpu,cpuacct/job/cpu.cfs_period_us": "100000",
            },
            1,
        ),
        ("0::/job", {"job/cpu.max": "250000 100000"}, 3),
        ("0::/job/step", {"job/cpu.max": "200000 100000", "job/step/cpu.max": "400000 100000"}, 2),
        ("4:cpu:/job", {"cpu/job/cpu.cfs_quota_us": "-1", "cpu/job/cpu.cfs_period_us": "9"}, None),
        ("4:memory:/job", {"memory/job/cpu.max": "100000 100000"}, None),
        ("0::/job", {"job/cpu.max": "spoilt"}, None),
    ],
)
def test_cores_are_those_of_the_share(
    line: str,
    files: dict[str, str],
    cores: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    for name, content in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    cgroup_file = tmp_path / "own"
    cgroup_file.write_text(f"{line}\n")
    assert usable_cores(tmp_path / "groups", cgroup_file) == (cores or 8)
    assert usable_cores(tmp_path / "groups", tmp_path / "missing") == 8
