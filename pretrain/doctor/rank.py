"""The course of the preflight on one rank.

Rank 0 gathers the facts, finds the problems and prints; the others answer and receive the exit
code.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data_pipeline.io.files import write_json
from data_pipeline.io.forms import parse_json
from pretrain.doctor.checks import all_reduce_failures, local_facts
from pretrain.doctor.rendezvous import NoAnswer, Rendezvous
from pretrain.doctor.request import Request
from pretrain.doctor.verdict import (
    BAD_NODES,
    SITE,
    Gathered,
    Problem,
    bad_nodes,
    exit_code,
    find_problems,
    name_ranks,
    ranks_by_node,
)
from pretrain.ranks.environment import LaunchEnvironment, head_node, missing_nodes, node_name

COLLECTIVE_SECONDS = 60.0
SLACK_SECONDS = 15.0
"""Most seconds between the time limit of a rank and that of the rank waiting for it."""


def run_doctor(request: Request) -> int:
    """Run the whole preflight.

    Returns:
        The exit code, the same on every rank that rank 0 could reach.

    Raises:
        UserError: the launcher's environment is incomplete, or rank 0 cannot listen at its address.
    """
    launch = LaunchEnvironment.read()
    try:
        rendezvous = Rendezvous(launch, request.timeout)
        if launch.rank == 0:
            return _first_rank(request, rendezvous)
        return _other_rank(request, rendezvous)
    except NoAnswer as error:
        return _without_rank_0(request, launch.rank, error)


def _first_rank(request: Request, rendezvous: Rendezvous) -> int:
    launch = rendezvous.launch
    slack = _slack(request)
    limit = _limit(request)
    rendezvous.post("hello/0", rendezvous.node)
    nodes_by_rank = rendezvous.collect("hello", range(launch.world_size), request.timeout)
    absent = [rank for rank in range(launch.world_size) if rank not in nodes_by_rank]
    nodes = ranks_by_node(nodes_by_rank)
    clocks = _call_roll(rendezvous, nodes, slack)
    rendezvous.post("facts/0", local_facts(request, launch, True))
    facts = rendezvous.collect("facts", nodes_by_rank, request.timeout + slack)
    fit = len(facts) == launch.world_size and not any(
        {"gpus", "config"} & set(checked["failures"]) for checked in facts.values()
    )
    rendezvous.post("fit", fit)
    sums: dict[int, Any] | None = None
    if fit:
        rendezvous.post("sums/0", all_reduce_failures(rendezvous, nodes, limit))
        sums = rendezvous.collect("sums", nodes_by_rank, 2 * limit + slack)
    gathered = Gathered(
        nodes=nodes_by_rank,
        facts=facts,
        sums=sums,
        missing=missing_nodes(absent, nodes_by_rank, launch.world_size, os.environ),
        clocks=clocks,
        seconds=request.timeout,
    )
    return _conclude(request, rendezvous, gathered)


def _conclude(request: Request, rendezvous: Rendezvous, gathered: Gathered) -> int:
    problems = find_problems(gathered, request.allow)
    code = exit_code(problems)
    _print_report(gathered, problems)
    if request.report is not None:
        try:
            _write_report(request.report, gathered, problems)
        except OSError as error:
            _complain(f"--report {request.report} cannot be written ({error.strerror})")
            code = max(code, SITE)
    # A problem of no single node is printed as an error; else the last line names the bad nodes.
    common = [problem.text for problem in problems if not problem.nodes]
    for text in common:
        _complain(text)
    if problems and not common:
        print(f"bad-nodes: {','.join(bad_nodes(problems))}", flush=True)
    rendezvous.post("verdict", code)
    # The store ends with this process, so every rank must read the verdict first.
    rendezvous.collect("bye", [rank for rank in gathered.nodes if rank != 0], _slack(request))
    return code


def _other_rank(request: Request, rendezvous: Rendezvous) -> int:
    rank, node = rendezvous.launch.rank, rendezvous.node
    # Rank 0 reads the clocks, makes its own checks, and waits for everybody's.
    patience = 4 * (request.timeout + _limit(request) + _slack(request))

    def expect(key: str) -> Any:
        value = rendezvous.read(key, patience)
        if value is None:
            raise NoAnswer(f"no word of its {key}")
        return value

    rendezvous.post(f"hello/{rank}", node)
    nodes = expect("roster")
    rendezvous.post(f"clock/{rank}", time.time())
    if rank in nodes.get(node, []):  # else too late: rank 0 counts this rank as missing
        rendezvous.post(
            f"facts/{rank}", local_facts(request, rendezvous.launch, rank == nodes[node][0])
        )
        if expect("fit"):
            failures = all_reduce_failures(rendezvous, nodes, _limit(request))
            rendezvous.post(f"sums/{rank}", failures)
    code = int(expect("verdict"))
    rendezvous.post(f"bye/{rank}", True)
    return code


def _without_rank_0(request: Request, rank: int, error: NoAnswer) -> int:
    """Report that rank 0 does not answer: its node is the bad one as far as this rank can see."""
    head = head_node()
    whom = f"rank {rank} on node {node_name()}"
    text = f"rank 0 does not answer {whom} within {request.timeout:.0f} s ({error})"
    problem = Problem("answer", text, (head,) if head else ())
    if request.report is not None:
        write_head_node_report(request.report, problem)
    _complain(problem.sentence)
    return BAD_NODES if head else SITE


def _call_roll(
    rendezvous: Rendezvous, nodes: Mapping[str, Sequence[int]], seconds: float
) -> dict[str, tuple[float, float]]:
    """Tell all ranks who came, and compare the clock of each node's first rank with this one.

    A rank answers with its time as soon as it reads the roster, for which it waits. So its clock
    was read between this rank's question and the arrival of the answer.

    Returns:
        {node: (seconds ahead of this clock, uncertainty in seconds)} of the nodes that answer.
    """
    asked = time.time()
    rendezvous.post("roster", nodes)
    clocks = {rendezvous.node: (0.0, 0.0)}
    for node, (leader, *_) in nodes.items():
        if node == rendezvous.node:
            continue
        node_time = rendezvous.read(f"clock/{leader}", seconds)
        if node_time is not None:
            half = (time.time() - asked) / 2
            clocks[node] = (node_time - asked - half, half)
    return clocks


def _complain(text: str) -> None:
    print(f"error: {text}", file=sys.stderr, flush=True)


def _limit(request: Request) -> float:
    return min(request.timeout, COLLECTIVE_SECONDS)


def _slack(request: Request) -> float:
    return min(request.timeout, SLACK_SECONDS)


def _attempt() -> str:
    """Return an identity of this start of the job: an earlier start may have used the same file."""
    names = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID", "TORCHELASTIC_RUN_ID")
    return "/".join(os.environ.get(name, "") for name in names)


def _write_report(path: Path, gathered: Gathered, problems: Sequence[Problem]) -> None:
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
        written = parse_json(path.read_bytes())["attempt"] == _attempt()
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
        "attempt": _attempt(),
    }


def _print_report(gathered: Gathered, problems: Sequence[Problem]) -> None:
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
