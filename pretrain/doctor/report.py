"""The doctor's report: lines for people, and the JSON that the job script reads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_pipeline.io.files import write_json
from data_pipeline.io.forms import parse_json
from pretrain.doctor.verdict import Gathered, Problem, bad_nodes, exit_code, name_ranks


def attempt() -> str:
    """Return an identity of this start of the job: an earlier start may have used the same file."""
    names = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID", "TORCHELASTIC_RUN_ID")
    return "/".join(os.environ.get(name, "") for name in names)


def write_report(path: Path, gathered: Gathered, problems: Sequence[Problem]) -> None:
    """Write the JSON atomically; its `bad_nodes` are names for `sbatch --exclude`."""
    nodes = {}
    for node, ranks in gathered.ranks_of.items():
        facts = gathered.facts.get(ranks[0], {})
        nodes[node] = {
            "ranks": ranks,
            "clock_ahead_seconds": gathered.clocks.get(node, (None,))[0],
            **{key: facts.get(key) for key in ("versions", "gpus", "disk", "shm", "data")},
        }
    write_json(path, _content(problems) | {"nodes": nodes})


def write_head_node_report(path: Path, problem: Problem) -> None:
    """Write the report of a rank that cannot reach rank 0, unless rank 0 has written its own."""
    try:
        written = parse_json(path.read_bytes())["attempt"] == attempt()
    except (OSError, ValueError, KeyError, TypeError):
        written = False
    if not written:
        write_json(path, _content([problem]))


def _content(problems: Sequence[Problem]) -> dict[str, Any]:
    """Return the entries that all reports share."""
    return {
        "exit_code": exit_code(problems),
        "bad_nodes": bad_nodes(problems),
        "problems": [{"nodes": list(p.nodes), "check": p.check, "text": p.text} for p in problems],
        "attempt": attempt(),
    }


def print_report(gathered: Gathered, problems: Sequence[Problem]) -> None:
    """Print a line for each node, then rank 0's versions, then the problems."""
    lines = [_node_line(gathered, node, problems) for node in gathered.ranks_of]
    facts = next(iter(gathered.facts.values()), {})
    versions = [f"{name} {value}" for name, value in facts.get("versions", {}).items() if value]
    lines += [f"versions: {', '.join(versions)}"] if versions else []
    lines += [problem.sentence for problem in problems if problem.nodes]
    if not problems:
        nodes = len(gathered.ranks_of)
        where = f"{nodes} node{'s' if nodes > 1 else ''}"
        lines.append(f"fit for this run: all {len(gathered.nodes)} ranks on {where}")
    print("\n".join(lines), flush=True)


def _node_line(gathered: Gathered, node: str, problems: Sequence[Problem]) -> str:
    ranks = gathered.ranks_of[node]
    names = gathered.facts.get(ranks[0], {}).get("gpus", {}).get("names", [])
    gpus = f"{len(names)} x {names[0]}" if names else "no GPU"
    result = "ok" if all(problem.nodes for problem in problems) else "see below"
    if any(node in problem.nodes for problem in problems):
        result = "BAD"
    return f"{node}, {name_ranks(ranks)}: {gpus}, {result}"
