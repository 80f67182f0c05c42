#!/usr/bin/env python3
"""Submit a study: download -> tokenizer -> tokenize (array) -> merge -> pretrain -> compare.

    python slurm/submit.py large              # SlimPajama, vanilla and orthogonal, then comparison
    python slurm/submit.py large --dry-run    # the sbatch commands of that, for a shell
    python slurm/submit.py large --from pretrain --sbatch pretrain="--nodes=2 --time=24:00:00"

Every script is first given to `sbatch --test-only`; nothing is submitted unless all would run here.
Each job waits for the one before (afterok), and is removed if that one fails
(--kill-on-invalid-dep=yes). Standard library only: login nodes have a Python, but often not the
environment. See docs/operations.md.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from chain import ROOT, Job, SubmitError, parser, plan

SBATCH_TIMEOUT = 120
PIN = ROOT / "slurm" / "pin.sh"


def main(arguments: Sequence[str] | None = None) -> int:
    """Submit or print a chain; return the exit code: 0, or 2 for all that the user can fix."""
    options = parser().parse_intermixed_args(arguments)
    try:
        site = site_settings()
        own_place = site.pop("ORA_RUN_DIRECTORY", "")
        options.runs = options.runs or own_place or os.environ.get("ORA_RUN_DIRECTORY") or "runs"
        jobs = plan(options)
        if options.dry_run:
            _print_plan(jobs, site)
            return 0
        if not shutil.which("sbatch"):
            raise SubmitError(
                "there is no sbatch here; run this on a login node, or with --dry-run"
            )
        for directory in log_directories(jobs):
            directory.mkdir(parents=True, exist_ok=True)
        for job in _one_of_each_script(jobs):
            _test(job, site)
        code = os.environ.get("ORA_CODE") or pinned_code()
        ids = submit(jobs, site | {"ORA_CODE": code})
        _print_submitted(jobs, ids, options, code)
    except SubmitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def pinned_code() -> str:
    """Return the copy of this checkout's code that the jobs run; later edits do not reach them.

    Raises:
        SubmitError: the copy cannot be made.
    """
    done = subprocess.run(["bash", str(PIN)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SubmitError(f"{PIN} failed: {done.stderr.strip().removeprefix('error: ')}")
    return done.stdout.strip()


def site_settings() -> dict[str, str]:
    """Return SBATCH_* variables of the site file (partition, account), and its ORA_RUN_DIRECTORY.

    Raises:
        SubmitError: the file fails.
    """
    stated_path = os.environ.get("ORA_SITE")
    path = Path(stated_path) if stated_path else ROOT / "slurm" / "site.sh"
    if not path.exists():
        if stated_path:
            raise SubmitError(f"ORA_SITE={stated_path} does not exist")
        return {}
    environment = {"ORA_ROOT": str(ROOT)} | os.environ
    command = ["bash", "-c", 'set -ae; . "$1" >&2; env -0', "site", str(path)]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=SBATCH_TIMEOUT
        )
    except subprocess.TimeoutExpired:
        raise SubmitError(f"the site file {path} did not end within {SBATCH_TIMEOUT} s") from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise SubmitError(f"the site file {path} failed: {reason}")
    pairs = (entry.partition("=") for entry in done.stdout.split("\0"))
    return {
        name: value
        for name, _, value in pairs
        if name.startswith("SBATCH_") or name == "ORA_RUN_DIRECTORY"
    }


def submit(jobs: Sequence[Job], site: dict[str, str]) -> dict[str, str]:
    """Submit jobs in order; if a submission fails or is interrupted, cancel those before it.

    Args:
        jobs: The chain, each job after those it waits for.
        site: SBATCH_* variables of the site file.

    Returns:
        {name of a job: its id}.

    Raises:
        SubmitError: sbatch refuses a job or does not answer, or the user presses Ctrl-C.
    """
    ids: dict[str, str] = {}
    for job in jobs:
        doubt = f"; ora-{job.name} may be queued all the same (squeue --me --name=ora-{job.name})"
        try:
            done = _call(["sbatch", "--parsable", *_sbatch_words(job, ids)], job, site)
        except SubmitError as error:
            raise SubmitError(f"{error}{_cancel(ids)}{doubt}") from None
        except KeyboardInterrupt:
            raise SubmitError(f"interrupted{_cancel(ids)}{doubt}") from None
        if done.returncode:
            raise SubmitError(f"sbatch refused {_name(job)}: {_reason(done)}{_cancel(ids)}")
        ids[job.name] = done.stdout.strip().split(";")[0]  # "id;cluster" in a federation
    return ids


def _cancel(ids: dict[str, str]) -> str:
    """Cancel jobs; return the end of a sentence that names them, or "" if there are none."""
    if not ids:
        return ""
    command = ["scancel", *ids.values()]
    try:
        code = subprocess.run(command, timeout=SBATCH_TIMEOUT, capture_output=True).returncode
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        code = 1
    submitted = f"; the {len(ids)} jobs submitted before it"
    if code:
        return f"{submitted} could not be cancelled: {' '.join(command)}"
    return f"{submitted} are cancelled ({', '.join(ids.values())})"


def log_directories(jobs: Sequence[Job]) -> list[Path]:
    """Return the directories of `#SBATCH --output`, without which a job fails at once."""
    directories: dict[Path, None] = {}
    for script in dict.fromkeys(job.script for job in jobs):
        for line in script.read_text().splitlines():
            match = re.match(r"#SBATCH\s+(?:--(?:output|error)[=\s]|-[oe]\s*)(\S+)", line)
            if match and "%" not in str(Path(match[1]).parent):
                directories[ROOT / Path(match[1]).parent] = None
    return list(directories)


def _sbatch_words(job: Job, ids: dict[str, str]) -> list[str]:
    """Return sbatch's arguments for a job whose predecessors have these ids."""
    # A job's settings are variables, which SBATCH_EXPORT=NONE would keep from it.
    words = [f"--job-name=ora-{job.name}", "--export=ALL"]
    if job.after:
        after = ":".join(ids[name] for name in job.after)
        words += [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"]
    return [*words, *job.options, str(job.script.relative_to(ROOT)), *job.arguments]


def _test(job: Job, site: dict[str, str]) -> None:
    """Refuse a script that Slurm would not take here with these options."""
    done = _call(["sbatch", "--test-only", *_sbatch_words(replace(job, after=()), {})], job, site)
    if done.returncode:
        raise SubmitError(
            f"sbatch --test-only refuses {_name(job)}: {_reason(done)}; "
            f'change it with --sbatch {job.step}="--nodes=… --gres=…" or in the site file'
        )


def _call(command: list[str], job: Job, site: dict[str, str]) -> subprocess.CompletedProcess[str]:
    environment = os.environ | site | job.settings
    try:
        return subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=SBATCH_TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        slow = f"sbatch did not answer within {SBATCH_TIMEOUT} s"
        raise SubmitError(f"{slow}; is slurmctld up (sinfo)?") from None


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    """Return sbatch's own words, without its prefixes."""
    prefixes = r"^((sbatch|error|allocation failure): )*"
    lines = [
        re.sub(prefixes, "", line).rstrip(".") for line in done.stderr.splitlines() if line.strip()
    ]
    return "; ".join(dict.fromkeys(lines)) or f"exit code {done.returncode} without a message"


def _print_plan(jobs: Sequence[Job], site: dict[str, str]) -> None:
    """Print commands for a shell; job ids are its variables."""
    print(f"cd {shlex.quote(str(ROOT))}")
    for directory in log_directories(jobs):
        print(f"mkdir -p {shlex.quote(os.path.relpath(directory, ROOT))}")
    for name, value in site.items():
        print(f"export {name}={shlex.quote(value)}")
    if not os.environ.get("ORA_CODE"):
        print("export ORA_CODE=$(bash slurm/pin.sh)")
    for job in _one_of_each_script(jobs):
        print(_line(job, ["sbatch", "--test-only", *_sbatch_words(replace(job, after=()), {})]))
    names = {job.name: "$job_" + re.sub(r"\W", "_", job.name, flags=re.ASCII) for job in jobs}
    for job in jobs:
        command = _line(job, ["sbatch", "--parsable", *_sbatch_words(job, names)])
        # A shell variable inside single quotes would stay as it is.
        command = re.sub(r"'(--dependency=afterok:[$\w:]+)'", r'"\1"', command)
        print(f"{names[job.name][1:]}=$({command})")


def _line(job: Job, command: list[str]) -> str:
    settings = [f"{name}={shlex.quote(value)}" for name, value in job.settings.items()]
    return " ".join([*settings, shlex.join(command)])


def _print_submitted(
    jobs: Sequence[Job], ids: dict[str, str], options: argparse.Namespace, code: str
) -> None:
    width = max(len(job.name) for job in jobs)
    for job in jobs:
        job_ids = ", ".join(ids[name] for name in job.after)
        after = f"after {job_ids}" if job_ids else "as soon as there is room"
        print(f"{ids[job.name]:>10}  {job.name:<{width}}  {after}")
    every = ",".join(ids.values())
    remark = (
        "as ORA_CODE says" if os.environ.get("ORA_CODE") else "whatever is edited or pulled now"
    )
    print(f"\ncode:    {os.path.relpath(code)}, {remark}")
    print(f"queue:   squeue --jobs={every} --start")
    print(f"logs:    tail -F {os.path.relpath(log_directories(jobs)[0])}/ora-*")
    if any(job.step == "pretrain" for job in jobs):
        print(f"curves:  tensorboard --logdir {options.runs}")
    print(
        f"history: sacct --jobs={every} --format=JobID,JobName%30,State,ExitCode,Elapsed,NodeList"
    )
    print(f"stop:    scancel {every.replace(',', ' ')}")


def _one_of_each_script(jobs: Sequence[Job]) -> list[Job]:
    return list({job.script: job for job in reversed(jobs)}.values())[::-1]


def _name(job: Job) -> str:
    return f"{job.script.relative_to(ROOT)} (ora-{job.name})"


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader may stop early, as `head` does
    sys.exit(main())
