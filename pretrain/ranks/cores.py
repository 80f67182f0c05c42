"""Cores that this process may use: those of its affinity, within the share of its control group."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


def usable_cores(groups: Path = GROUPS, groups_file: Path = OWN_GROUPS) -> int:
    """Return how many threads can run at a time, at least 1.

    A job in a container or on a part of a node must not start a thread for each of the node's
    cores.

    Args:
        groups: Mount point of the kernel's control groups.
        groups_file: File that names this process's groups.
    """
    available = len(os.sched_getaffinity(0))
    shares = [math.ceil(share) for share in _shares(groups, groups_file)]
    return max(1, min([available, *shares]))


def _shares(groups: Path, groups_file: Path) -> Iterator[float]:
    """Yield the limits of this process's groups and of their ancestors, in cores."""
    try:
        lines = groups_file.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        # Version 1 has a hierarchy per controller; version 2 a single one, without a name.
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = groups / controllers if controllers else groups
        group = mount / path.lstrip("/")
        while True:
            share = _share(group)
            if share is not None:
                yield share
            if group in (mount, group.parent):
                break
            group = group.parent


def _share(group: Path) -> float | None:
    """Return a group's limit in cores; None if it has none."""
    try:
        quota, period = (group / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:  # version 1 of control groups
            quota = (group / "cpu.cfs_quota_us").read_text().strip()
            period = (group / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    limited = quota.isdigit() and period.isdigit() and int(period) > 0
    return int(quota) / int(period) if limited else None
