"""The run directory: the contract between `train`, every verb that reads runs back, and users' own tools.

config.yaml  environment.json  data.json  audit.json  metrics.jsonl  tensorboard/  checkpoints/  state
summary.json
"""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "deepspeed", "megatron-core", "numpy", "sentencepiece", "tensorboard", "ora-pretrain")
MARKER = "COMPLETE"
"""In a checkpoint's directory: all of it is there."""


def write_text_atomically(path: Path, text: str) -> None:
    """Write `text` so that `path` holds either the old content or all of the new, whatever happens."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def write_json(path: Path, content: Any) -> None:
    """Atomically write indented JSON."""
    write_text_atomically(path, json.dumps(content, indent=1) + "\n")


def complete_checkpoints(directory: Path) -> list[Path]:
    """Directories with a COMPLETE marker, newest first."""
    return sorted((marker.parent for marker in directory.glob(f"step_*/{MARKER}")), reverse=True)


def read_state(run_path: Path) -> str | None:
    """The run's one-word state (see `ranks.signals`), or None for a run that never started."""
    path = run_path / "state"
    return path.read_text().strip() if path.is_file() else None


def write_state(run_path: Path, state: str) -> None:
    write_text_atomically(run_path / "state", state + "\n")


def describe_environment(**facts: Any) -> dict[str, Any]:
    """What environment.json records: versions, commit, host, start time, and the given facts."""
    return {
        "python": sys.version.split()[0],
        "packages": package_versions(),
        "git_commit": _git_commit(),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "command": sys.argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        **facts,
    }


def package_versions() -> dict[str, str | None]:
    """The installed versions of the packages that results may depend on; None if one is not installed."""
    return {package: _version(package) for package in PACKAGES}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """The commit of the program's own checkout, with `+` if it has uncommitted changes."""
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None if result.returncode == 0 else None
