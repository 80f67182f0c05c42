"""The shipped scripts as shipped: accepted by Slurm for nodes of 8 GPUs, clean for shellcheck."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import ROOT, run_program
from tests.slurm.drills import CODE, Drills

JOBS = sorted(path.name for path in (ROOT / "slurm").glob("*.sh") if "#SBATCH" in path.read_text())


def test_all_job_scripts_are_there() -> None:
    expected = {"download.sh", "tokenizer.sh", "tokenize.sh", "merge.sh", "sweep.sh", "compare.sh"}
    assert set(JOBS) == expected | {"pretrain_small.sh", "pretrain_base.sh", "pretrain_large.sh"}


def test_slurm_accepts_every_script_as_shipped(drills: Drills) -> None:
    for name in JOBS:
        done = drills.cluster.run("sbatch", "--test-only", f"slurm/{name}")
        assert done.returncode == 0 and "to start at" in done.stderr, (name, done.stderr)


@pytest.mark.parametrize("name", JOBS)
def test_options_are_in_the_header(name: str) -> None:
    """sbatch silently ignores #SBATCH after the first command."""
    lines = (ROOT / "slurm" / name).read_text().splitlines()
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert not [line for line in lines[first_command:] if line.startswith("#SBATCH")]
    options = {
        line.removeprefix("#SBATCH ").split("=")[0] for line in lines if line.startswith("#SBATCH ")
    }
    assert {"--job-name", "--open-mode", "--output", "--time", "--nodes"} <= options
    if name.startswith(("pretrain", "sweep")):
        assert {"--gres", "--exclusive", "--requeue", "--signal"} <= options
        # With it a requeued job would want as many nodes as it had.
        assert "--ntasks-per-node" not in options


def test_shellcheck(shellcheck: str) -> None:
    scripts = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "slurm").glob("*.sh"))]
    command = [shellcheck, "--external-sources", "--enable=quote-safe-variables", *scripts]
    done = run_program(command)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("script", "settings", "message"),
    [
        (
            "pretrain_small.sh",
            {"ORA_SITE": "/nowhere/site.sh"},
            "error: ORA_SITE=/nowhere/site.sh does not exist",
        ),
        (
            "pretrain_small.sh",
            {"ORA_ROOT": "/nowhere", "ORA_CODE": ""},
            "error: /nowhere is not a checkout of ora-pretrain",
        ),
        (
            "pretrain_small.sh",
            {"ORA_PYTHON": "/nowhere/python"},
            "error: /nowhere/python is not on ",
        ),
        ("tokenize.sh", {}, "error: ORA_CORPUS is not set: see slurm/lib.sh"),
        ("compare.sh", {"ORA_RUNS": "/nowhere"}, "error: no run in ORA_RUNS=/nowhere"),
    ],
)
def test_a_wrong_setting_is_one_sentence(
    drills: Drills, tmp_path: Path, script: str, settings: dict[str, str], message: str
) -> None:
    shape = ["--nodes=1", "--cpus-per-task=1", f"--output={tmp_path}/log"]
    if script == "tokenize.sh":
        shape.append("--array=0")
    number = drills.cluster.sbatch(
        *shape, f"slurm/{script}", environment=drills.environment(settings)
    )
    (ended,) = drills.cluster.wait_for_end(number)
    log = (tmp_path / "log").read_text()
    assert (ended.state, ended.restarts, ended.exit_code) == ("FAILED", 0, "2:0"), log
    assert [line for line in log.splitlines() if line.startswith(message)], log


def in_shell(tmp_path: Path, scontrol: str, script: str) -> subprocess.CompletedProcess[str]:
    """Run a script after lib.sh and training.sh, with a program as scontrol; no time passes."""
    for name, text in (("scontrol", scontrol), ("sleep", "")):
        (tmp_path / name).write_text(f"#!/bin/bash\necho $* >>{tmp_path}/{name}.calls\n{text}\n")
        (tmp_path / name).chmod(0o755)
    command = ["bash", "-c", f". slurm/lib.sh; . slurm/training.sh; ORA_JOB=7; {script}"]
    return run_program(command, {"PATH": f"{tmp_path}:{os.environ['PATH']}"}, timeout=120)


def test_a_segment_waits_for_a_slurmctld_that_is_away_for_ten_minutes(tmp_path: Path) -> None:
    away = f"""[ $(wc -l <{tmp_path}/scontrol.calls) -gt 120 ] && exec echo JobId=7 JobState=RUNNING
        echo 'slurm_load_jobs error: Unable to contact slurm controller (failure)' >&2; exit 1"""
    done = in_shell(tmp_path, away, "ora_job_field JobState")
    assert done.stdout == "RUNNING\n"
    assert (tmp_path / "sleep.calls").read_text() == 120 * "5\n"  # ten minutes
    assert "slurmctld does not answer (slurm_load_jobs error: Unable to contact" in done.stderr


@pytest.mark.parametrize(
    "scontrol",
    [
        "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1",
        "echo 'bash: scontrol: command not found' >&2; exit 127",
    ],
    ids=["slurmctld", "no scontrol"],
)
def test_a_segment_does_not_wait_for_a_refusal(scontrol: str, tmp_path: Path) -> None:
    done = in_shell(tmp_path, scontrol, "ora_job_field JobState || echo refused")
    assert done.stdout == "refused\n"
    assert len((tmp_path / "scontrol.calls").read_text().splitlines()) == 1


def test_a_requeued_job_meets_at_another_port(tmp_path: Path) -> None:
    script = """export SLURM_JOB_ID=123456 SLURM_JOB_NODELIST=n1
        for SLURM_RESTART_COUNT in 0 1 2 3; do ora_meeting_point; echo $MASTER_PORT; done"""
    ports = [int(line) for line in in_shell(tmp_path, "echo NodeAddr=n1", script).stdout.split()]
    assert len(set(ports)) == 4 and all(10_000 <= port < 30_000 for port in ports)


def test_a_decision_survives_the_signal_that_is_passed_on_to_all_steps(tmp_path: Path) -> None:
    """Python is in a container that srun starts."""
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n')
    srun.chmod(0o755)
    script = """ORA_SRUN_WORDS=(--container-image=x)
        ORA_COMMAND=(bash -c 'kill -USR1 $$; echo requeue')
        ora_python -m pretrain.job end-tokenizing"""
    assert in_shell(tmp_path, "", script).stdout == "requeue\n"


def with_python(
    tmp_path: Path, program: str, *command: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a job script without Slurm, with a program in place of Python that ends with 3."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/bash\n{program}\nexit 3\n")
    python.chmod(0o755)
    job = {"SLURM_JOB_ID": "77", "SLURM_JOB_NAME": "x", "SLURM_JOB_NUM_NODES": "1"}
    site = {"ORA_SITE": "/dev/null", "ORA_CODE": str(ROOT), "ORA_PYTHON": str(python)}
    return run_program(["bash", *command], job | site | environment, timeout=120)


def test_outside_a_job_the_scripts_say_so() -> None:
    done = run_program(["bash", "slurm/pretrain_small.sh"])
    assert done.returncode == 2 and "submit this script with sbatch" in done.stderr


@pytest.mark.parametrize("name", [name for name in JOBS if name.startswith(("pretrain", "sweep"))])
def test_every_script_that_trains_reads_the_directory_of_the_runs_the_prefix_and_the_timeout(
    name: str, tmp_path: Path
) -> None:
    """The program writes down what it gets, and decides about nothing."""
    program = f'printf \'%s\\n\' "${{ORA_TEST:-}}" "$@" >>{tmp_path}/words'
    settings = {"ORA_GRID": "a1_init", "ORA_NUM_TASKS": "1", "ORA_DOCTOR": "0"}
    settings |= {"SLURM_ARRAY_TASK_ID": "0", "SLURM_JOB_NODELIST": "n1"}
    settings |= {"ORA_PREFIX": "env ORA_TEST=1", "ORA_TIMEOUT_SECONDS": "500"}
    runs = {"ORA_RUN_DIRECTORY": "/scratch/runs"}
    with_python(tmp_path, program, f"slurm/{name}", "run.seed=7", **settings, **runs)
    words = (tmp_path / "words").read_text().splitlines()
    assert words[0] == "1"
    assert words.index("parallel.timeout_seconds=500") < words.index("run.seed=7")
    assert words.index("run.directory=/scratch/runs") < words.index("run.seed=7")


def test_a_signal_while_the_site_prepares_is_kept_and_steps_get_the_whole_environment(
    tmp_path: Path,
) -> None:
    """The program says whether srun would hand the environment on."""
    site = tmp_path / "site.sh"
    site.write_text("ora_environment() { kill -USR1 $$; }\n")
    settings = {"ORA_SITE": str(site), "SLURM_EXPORT_ENV": "NONE"}
    program = "echo given $SLURM_EXPORT_ENV >&2"
    done = with_python(tmp_path, program, "slurm/pretrain_small.sh", **settings)
    assert done.returncode == 3 and "given ALL\n" in done.stderr, done.stderr
    assert "SIGUSR1: the time limit or a preemption is near" in done.stderr


def pinned(checkout: Path, *arguments: str) -> Path:
    done = run_program(["bash", "slurm/pin.sh", *arguments], where=checkout)
    assert (done.returncode, done.stderr) == (0, "")
    return Path(done.stdout.strip())


@pytest.mark.parametrize("name", JOBS)
def test_a_restart_runs_the_copy_of_its_job_and_makes_one_where_none_is(
    name: str, tmp_path: Path
) -> None:
    """Slurm also restarts a job whose first start never ran."""
    for folder in CODE:
        (tmp_path / folder).mkdir()
    for path in (ROOT / "slurm").glob("*.sh"):
        shutil.copy(path, tmp_path / "slurm")
    shutil.copy(ROOT / "slurm/run.py", tmp_path / "slurm")
    job = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": "1"}
    environment = {**job, "SLURM_JOB_NAME": name, "ORA_PYTHON": "/nowhere/python"}

    def start() -> Path:
        done = run_program(["bash", f"slurm/{name}"], environment, where=tmp_path)
        assert done.returncode == 2 and "error: /nowhere/python is not on " in done.stderr
        return (tmp_path / "slurm/code/job-77").resolve(strict=True)

    first = start()
    (tmp_path / "pretrain/edited.py").touch()
    assert start() == first
    del environment["SLURM_RESTART_COUNT"]  # a new job of the same number
    assert start() != first


def test_a_copy_of_the_code_stays_as_it_was_pinned(tmp_path: Path) -> None:
    """Of a checkout with one module, in a directory that holds another of the same name."""
    checkout = tmp_path / "checkout"
    for folder in CODE:
        (checkout / folder).mkdir(parents=True)
    for name in ("pin.sh", "run.py"):
        shutil.copy(ROOT / "slurm" / name, checkout / "slurm")
    (checkout / "pretrain/__init__.py").touch()
    module = checkout / "pretrain/words.py"
    module.write_text("import sys\nprint('submitted', sys.argv[1:])\n")
    first = pinned(checkout)
    assert pinned(checkout, "7") == first and first.parent == checkout / "slurm/code"
    module.write_text("print('edited')\n")
    assert pinned(checkout, "8") != first

    def run(code: Path) -> str:
        command = [sys.executable, code / "slurm/run.py", "-m", "pretrain.words", "-m", "a b"]
        return run_program(command, where=checkout).stdout

    assert run(checkout / "slurm/code/job-7") == "submitted ['-m', 'a b']\n"
    assert run(checkout / "slurm/code/job-8") == run(checkout) == "edited\n"
    assert not list(checkout.glob("slurm/code/new-*"))
    assert pinned(checkout, "") == checkout  # outside a job nothing is copied
