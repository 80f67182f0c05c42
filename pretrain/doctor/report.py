"""The doctor's report: a table for people, and the JSON that the job script reads."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

from rich.console import Console

from pretrain.doctor.verdict import Gathered, Problem, bad_nodes, exit_code, name_ranks
from pretrain.reporting.tables import Table, rich_table
from pretrain.runs.directory import write_json

MIN_WIDTH = 150
CHECKS = {
    "gpus": "GPUs",
    "all-reduce": "all-reduce GB/s: node, link, all",
    "disk": "disk free, write",
    "shm": "/dev/shm free",
    "clock": "clock",
    "data": "data",
    "bank": "bank",
}
"""{check: title of its column}."""


def attempt() -> str:
    """Return an identity of this start of this job: an earlier one may have used the same file."""
    names = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID", "TORCHELASTIC_RUN_ID")
    return "/".join(os.environ.get(name, "") for name in names)


def write_report(
    path: Path, gathered: Gathered, problems: Sequence[Problem], warnings: Sequence[str]
) -> None:
    """Write the JSON atomically; its `bad_nodes` are names for `sbatch --exclude`.

    Args:
        path: file to write.
        gathered: facts of all ranks.
        problems: what follows from them.
        warnings: sentences about slow nodes.
    """
    nodes = {}
    for node, ranks in gathered.ranks_of.items():
        facts = gathered.facts.get(ranks[0], {})
        nodes[node] = {
            "ranks": ranks,
            "clock_ahead_seconds": gathered.clocks.get(node, (None,))[0],
            "all_reduce_gb_per_s": (gathered.collectives.get(ranks[0]) or {}).get("node"),
            **{key: facts.get(key) for key in ("versions", "gpus", "disk", "shm", "data")},
        }
    write_json(path, _content(problems) | {"warnings": list(warnings), "nodes": nodes})


def write_head_node_report(path: Path, problem: Problem) -> None:
    """Write the report of a rank that does not reach rank 0, unless rank 0 has written its own.

    Args:
        path: file to write.
        problem: that rank 0 does not answer.
    """
    try:
        written = json.loads(path.read_text())["attempt"] == attempt()
    except (OSError, ValueError, KeyError):
        written = False
    if not written:
        write_json(path, _content([problem]))


def _content(problems: Sequence[Problem]) -> dict[str, Any]:
    """Return the entries that every report has."""
    return {
        "exit_code": exit_code(problems),
        "bad_nodes": bad_nodes(problems),
        "problems": [{"nodes": list(p.nodes), "check": p.check, "text": p.text} for p in problems],
        "attempt": attempt(),
    }


def print_report(gathered: Gathered, problems: Sequence[Problem], warnings: Sequence[str]) -> None:
    """Print the table, one row a node, then the facts that all nodes share, then the problems.

    Args:
        gathered: facts of all ranks.
        problems: what follows from them.
        warnings: sentences about slow nodes.
    """
    header = ["node", "ranks", *CHECKS.values(), "result"]
    rows = [_row(gathered, node, problems) for node in gathered.ranks_of]
    width = get_terminal_size((MIN_WIDTH, 24)).columns
    console = Console(width=width, no_color=True, highlight=False)
    with console.capture() as capture:
        words = range(2, len(header) - 1)  # the others are not broken
        console.print(rich_table(Table(header, rows, words), bare=True))
    lines = [line.rstrip() for line in capture.get().splitlines()]
    lines += _common_lines(gathered)
    lines += [f"warning: {warning}" for warning in warnings]
    lines += [problem.sentence for problem in problems if problem.nodes]
    if not problems:
        nodes = len(gathered.ranks_of)
        where = f"{nodes} node{'s' if nodes > 1 else ''}"
        lines.append(f"fit for this run: all {gathered.world_size} ranks on {where}")
    print("\n".join(lines), flush=True)


def _row(gathered: Gathered, node: str, problems: Sequence[Problem]) -> list[str]:
    ranks = gathered.ranks_of[node]
    facts = gathered.facts.get(ranks[0], {})
    collectives = gathered.collectives.get(ranks[0], {})
    speeds = [collectives.get("node"), gathered.links.get(node), collectives.get("world")]
    cells = dict.fromkeys(CHECKS, "-")
    cells["all-reduce"] = ", ".join("-" if one is None else f"{one:.2f}" for one in speeds)
    if gpus := facts.get("gpus"):
        names = gpus["names"]
        cells["gpus"] = f"{len(names)} x {names[0]}" if names else "none (CPU)"
    if disk := facts.get("disk"):
        speed = disk["bytes_per_second"] / 1e6
        cells["disk"] = f"{disk['free'] / 1e9:,.1f} GB, {speed:,.0f} MB/s"
    if shm := facts.get("shm"):
        cells["shm"] = f"{shm['free'] / 2**30:.2f} GiB"
    if node in gathered.clocks:
        cells["clock"] = f"{gathered.clocks[node][0]:+.3f} s"
    if data := facts.get("data"):
        cells["data"] = data["fingerprint"][:8]
    if digests := facts.get("bank", {}).get("digests"):
        cells["bank"] = digests[-1][1][:8]
    bad = {problem.check for problem in problems if node in problem.nodes}
    failed = bad | {problem.check for problem in problems if not problem.nodes}
    shown = [f"{cell} BAD" if check in failed else cell for check, cell in cells.items()]
    result = "BAD" if bad else "see below" if failed else "ok"
    return [node, name_ranks(ranks).split(" ", 1)[1], *shown, result]


def _common_lines(gathered: Gathered) -> list[str]:
    """Return lines with rank 0's versions, disk and bank.

    A rank with others is a problem of its own.
    """
    facts = next(iter(gathered.facts.values()), {})
    versions = [f"{name} {value}" for name, value in facts.get("versions", {}).items() if value]
    lines = [f"versions: {', '.join(versions)}"] if versions else []
    if disk := facts.get("disk"):
        size, needed = disk["checkpoint"] / 1e9, disk["needed"] / 1e9
        place = disk["directory"]
        lines.append(f"checkpoints: {size:.2f} GB each, {needed:.2f} GB needed, tried in {place}")
    if "bank" not in facts:
        return lines
    made = [len(f["bank"]["digests"]) for f in gathered.facts.values() if "bank" in f]
    heads = facts["bank"]["heads"]
    fewest = min(made)
    part = f"all {heads}" if fewest == heads else f"the first {fewest} of {heads}, head by head,"
    compared = f"{part} heads regenerated and compared on {len(made)} ranks"
    lines.append(f"frozen bank: {compared if heads else 'this variant has none'}")
    return lines
