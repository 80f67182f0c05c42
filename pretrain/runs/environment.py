"""The content of environment.json: versions, commit, host, command, starts."""

from __future__ import annotations

import platform
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pretrain

PACKAGES = ("torch", "deepspeed", "megatron-core", "numpy", "sentencepiece", "tensorboard")
STARTED = "%Y-%m-%dT%H:%M:%S%z"


def describe_environment(**facts: Any) -> dict[str, Any]:
    """Return the content of environment.json: versions, commit, host, start, given facts."""
    return {
        "python": sys.version.split()[0],
        "packages": package_versions(),
        "git_commit": git_commit(),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "command": sys.argv,
        "started": time.strftime(STARTED),
        **facts,
    }


def earlier_settings(environment: Mapping[str, Any]) -> list[tuple[str, Any, int]]:
    """Return (section.key, value, last step) of settings that a resume has changed.

    A branch, whose trunk is of another length, begins with its own. A start that a later one went
    back behind has trained nothing of the run.

    Args:
        environment: content of environment.json.
    """
    segments = environment.get("segments", [])
    first = 1 if segments and segments[0].get("branched_from") else 0
    starts: list[tuple[int, dict[str, dict[str, Any]]]] = []
    for segment in segments[first:]:
        changes = {key: dict(change) for key, change in segment.get("changes", {}).items()}
        while starts and starts[-1][0] >= segment["first_step"]:
            for key, change in starts.pop()[1].items():
                changes[key] = {**change, "is": changes.get(key, change).get("is")}
        starts.append((segment["first_step"], changes))
    return [
        (key, change["was"], first_step - 1)
        for first_step, changes in starts
        for key, change in changes.items()
        if change["was"] != change.get("is")
    ]


def package_versions() -> dict[str, str | None]:
    """Return versions of this program and of packages behind its results; None: missing."""
    return {package: package_version(package) for package in PACKAGES} | {
        "ora-pretrain": pretrain.__version__
    }


@cache
def package_version(package: str) -> str | None:
    """Return a package's version, or None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def git_commit() -> str | None:
    """Return the commit of the program's own checkout, with `+` if it has uncommitted changes.

    Asked once a process: a later commit is not of the code that runs. A copy that a job runs
    (slurm/pin.sh) has it in a file.
    """
    here = Path(__file__).parent
    copied = here.parents[1] / "git_commit"
    if copied.is_file():
        return copied.read_text().strip() or None
    command = [
        "git",
        "-C",
        str(here),
        "describe",
        "--always",
        "--abbrev=40",
        "--dirty=+",
        "--exclude=*",
    ]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None if result.returncode == 0 else None
