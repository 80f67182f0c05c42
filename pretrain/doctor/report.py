"""The doctor's report: a table for people, and the JSON that the job script reads."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pretrain.doctor.verdict import Gathered, Problem, bad_nodes, exit_code, name_ranks
from pretrain.runs.directory import write_json

MIN_WIDTH = 150
COLUMNS = (
    *(
        "node",
        "ranks",
        "GPUs",
        "all-reduce GB/s: node, link, all",
        "disk free, write",
        "/dev/shm free",
    ),
    *("clock", "data", "bank", "result"),
)
CHECKS = ("gpus", "all-reduce", "disk", "shm", "clock", "data", "bank")


def attempt() -> str:
    """Return an identity of this start of this job; an earlier start may have used the same report file."""
    names = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID", "TORCHELASTIC_RUN_ID")
    return "/".join(os.environ.get(name, "") for name in names)


def write_report(
    path: Path, gathered: Gathered, problems: Sequence[Problem], warnings: Sequence[str]
) -> None:
    """Write the JSON atomically; its `bad_nodes` are names for `sbatch --exclude`."""
    nodes = {}
    for node, ranks in gathered.ranks_of.items():
        facts = gathered.facts.get(ranks[0], {})
        nodes[node] = {
            "ranks": ranks,
            "clock_ahead_seconds": gathered.clocks.get(node, (None,))[0],
            "all_reduce_gb_per_s": (gathered.collectives.get(ranks[0]) or {}).get("node"),
            **{key: facts.get(key) for key in ("versions", "gpus", "disk", "shm", "data")},
        }
    write_json(path, report_content(problems) | {"warnings": list(warnings), "nodes": nodes})


def write_head_node_report(path: Path, problem: Problem) -> None:
    """Write the report of a rank that does not reach rank 0, unless rank 0 has written its own after all."""
    try:
        written = json.loads(path.read_text())["attempt"] == attempt()
    except (OSError, ValueError, KeyError):
        written = False
    if not written:
        write_json(path, report_content([problem]))


def report_content(problems: Sequence[Problem]) -> dict[str, Any]:
    """Return the entries that every report has."""
    return {
        "exit_code": exit_code(problems),
        "bad_nodes": bad_nodes(problems),
        "problems": [{"nodes": list(p.nodes), "check": p.check, "text": p.text} for p in problems],
        "attempt": attempt(),
    }


def print_report(gathered: Gathered, problems: Sequence[Problem], warnings: Sequence[str]) -> None:
    """Print the table, one row a node, then the facts that all nodes share, then the problems."""
    table = Table(box=None, pad_edge=False, show_edge=False)
    for column in COLUMNS:
        table.add_column(column, no_wrap=column in ("node", "ranks", "result"))
    for node, ranks in gathered.ranks_of.items():
        table.add_row(*map(Text, _row(gathered, node, ranks, problems)))
    console = Console(
        width=get_terminal_size((MIN_WIDTH, 24)).columns, no_color=True, highlight=False
    )
    with console.capture() as capture:
        console.print(table)
    lines = [line.rstrip() for line in capture.get().splitlines()]
    lines += _common_lines(gathered)
    lines += [f"warning: {warning}" for warning in warnings]
    nodes = len(gathered.ranks_of)
    fine = f"fit for this run: all {gathered.world_size} ranks on {nodes} node{'s' if nodes > 1 else ''}"
    lines += [problem.sentence for problem in problems if problem.nodes] or (
        [] if problems else [fine]
    )
    print("\n".join(lines), flush=True)


def _row(
    gathered: Gathered, node: str, ranks: Sequence[int], problems: Sequence[Problem]
) -> list[str]:
    facts = gathered.facts.get(ranks[0], {})
    disk = facts.get("disk")
    collectives = gathered.collectives.get(ranks[0], {})
    bad = {problem.check for problem in problems if node in problem.nodes}
    failed = bad | {problem.check for problem in problems if not problem.nodes}
    speeds = [collectives.get("node"), gathered.links.get(node), collectives.get("world")]
    cells = {
        "gpus": _gpus(facts.get("gpus")),
        "all-reduce": ", ".join("-" if speed is None else f"{speed:.2f}" for speed in speeds),
        "disk": f"{disk['free'] / 1e9:,.1f} GB, {disk['bytes_per_second'] / 1e6:,.0f} MB/s"
        if disk
        else "-",
        "shm": f"{facts['shm']['free'] / 2**30:.2f} GiB" if facts.get("shm") else "-",
        "clock": f"{gathered.clocks[node][0]:+.3f} s" if node in gathered.clocks else "-",
        "data": facts["data"]["fingerprint"][:8] if "data" in facts else "-",
        "bank": facts["bank"]["digests"][-1][1][:8]
        if facts.get("bank", {}).get("digests")
        else "-",
    }
    shown = [f"{cells[check]} BAD" if check in failed else cells[check] for check in CHECKS]
    named = name_ranks(ranks).removeprefix("ranks ").removeprefix("rank ")
    return [node, named, *shown, "BAD" if bad else "see below" if failed else "ok"]


def _common_lines(gathered: Gathered) -> list[str]:
    """Return lines with rank 0's versions, disk and bank; a rank with others is a problem of its own."""
    facts = next(iter(gathered.facts.values()), {})
    versions = [f"{name} {value}" for name, value in facts.get("versions", {}).items() if value]
    lines = [f"versions: {', '.join(versions)}"] if versions else []
    if disk := facts.get("disk"):
        lines.append(
            f"checkpoints: {disk['checkpoint'] / 1e9:.2f} GB each, {disk['needed'] / 1e9:.2f} GB needed, "
            f"tried in {disk['directory']}"
        )
    made = [len(f["bank"]["digests"]) for f in gathered.facts.values() if "bank" in f]
    if "bank" in facts:
        heads = facts["bank"]["heads"]
        part = (
            f"all {heads}"
            if min(made) == heads
            else f"the first {min(made)} of {heads}, head by head,"
        )
        order = f"{part} heads regenerated and compared on {len(made)} ranks"
        lines.append(f"frozen bank: {order}" if heads else "frozen bank: this variant has none")
    return lines


def _gpus(facts: Mapping[str, Any] | None) -> str:
    if not facts:
        return "-"
    names = facts["names"]
    return f"{len(names)} x {names[0]}" if names else "none (CPU)"
