"""Which program, packages and device trained the runs of a comparison."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pretrain.runs.finished import FinishedRun

PACKAGES = ("torch", "deepspeed", "megatron-core")


def provenance(runs: Sequence[FinishedRun]) -> list[str]:
    """One line for each origin, the most frequent first: commit, versions, device × processes."""
    origins = Counter(_origin(run) for run in runs)
    return [f"{count} of {len(runs)} runs: {origin}" for origin, count in origins.most_common()]


def _origin(run: FinishedRun) -> str:
    environment = run.environment
    commit, versions = environment.get("git_commit"), environment.get("packages", {})
    parts = [f"commit {commit[:12]}" if commit else "no commit recorded"]
    parts += [f"{name} {versions[name]}" for name in PACKAGES if name in versions]
    if "python" in environment:
        parts.append(f"Python {environment['python']}")
    return ", ".join([*parts, f"{run.device} × {environment['world_size']}"])
