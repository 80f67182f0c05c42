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
    """Return the content of environment.json: versions, commit, host, start, and `facts`."""
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

    The first segment of a branch is left out: its changes are from the trunk, which has another
    length. A start from an earlier step undoes the changes of the starts after that step, since
    their training was discarded.

    Args:
        environment: Content of environment.json.
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


def data_changes(environment: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return (clause, first step) of the data that a resume has changed, not those of a branch.

    A start from an earlier step undoes the changes of the starts after that step.

    Args:
        environment: Content of environment.json.
    """
    segments = environment.get("segments", [])
    return [
        (clause, segment["first_step"])
        for number, segment in enumerate(segments)
        if "branched_from" not in segment
        and all(later["first_step"] > segment["first_step"] for later in segments[number + 1 :])
        for clause in segment.get("data_changes", ())
    ]


def package_versions() -> dict[str, str | None]:
    """Return the versions of this program and of the packages that affect its results."""
    return {package: package_version(package) for package in PACKAGES} | {
        "ora-pretrain": pretrain.__version__
    }


@cache
def package_version(package: str) -> str | None:
    """Return a package's version; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def git_commit() -> str | None:
    """Return the commit of the program's checkout, with `+` if it has uncommitted changes.

    Read once per process, because a later commit would not be the running code's. A copy made for a
    job (slurm/pin.sh) holds the commit in a file.
    """
    package_folder = Path(__file__).parent
    commit_file = package_folder.parents[1] / "git_commit"
    if commit_file.is_file():
        return commit_file.read_text().strip() or None
    options = ("--always", "--abbrev=40", "--dirty=+", "--exclude=*")
    command = ["git", "-C", str(package_folder), "describe", *options]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None if result.returncode == 0 else None
