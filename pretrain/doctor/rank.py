"""The course of the preflight on one rank.

Rank 0 gathers the facts, finds the problems and prints; the others answer and receive the exit code.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from pretrain.doctor.checks import local_facts
from pretrain.doctor.collectives import Collectives
from pretrain.doctor.rendezvous import NoAnswer, Rendezvous
from pretrain.doctor.report import print_report, write_head_node_report, write_report
from pretrain.doctor.request import Request
from pretrain.doctor.verdict import (
    BAD_NODES,
    SITE,
    Gathered,
    Problem,
    bad_nodes,
    exit_code,
    find_problems,
    find_warnings,
    ranks_by_node,
)
from pretrain.ranks.environment import LaunchEnvironment, head_node, missing_nodes, node_name

CLOCK_ROUNDS = 5
SLACK_SECONDS = 15.0
"""Most seconds between the time limit of a rank and the time limit of the rank that waits for it."""
COLLECTIVE_SECONDS = 60.0


def run_doctor(request: Request) -> int:
    """Run the whole preflight; return the exit code, the same on every rank that rank 0 could reach.

    Raises UserError: the launcher's environment is incomplete, or rank 0 cannot listen at its address.
    """
    own = LaunchEnvironment.read()
    try:
        rendezvous = Rendezvous(own, request.timeout)
        return (
            _first_rank(request, rendezvous) if own.rank == 0 else _other_rank(request, rendezvous)
        )
    except NoAnswer as error:
        return _without_rank_0(request, own.rank, error)


def _first_rank(request: Request, rendezvous: Rendezvous) -> int:
    own, node = rendezvous.own, rendezvous.node
    rendezvous.post("hello/0", node)
    came = rendezvous.collect("hello", range(own.world_size), request.timeout)
    absent = [rank for rank in range(own.world_size) if rank not in came]
    missing = missing_nodes(absent, came, own.world_size, os.environ)
    nodes = ranks_by_node(came)
    rendezvous.post("roster", nodes)
    clocks = {node: (0.0, 0.0)}
    for other, ranks in nodes.items():
        if other != node and (measured := _measure_clock(rendezvous, ranks[0], _slack(request))):
            clocks[other] = measured
    rendezvous.post("facts/0", local_facts(request, own, True, lambda what: None))
    facts = rendezvous.collect("facts", came, request.timeout + _slack(request))
    run_collectives = len(facts) == own.world_size and not any(
        {"gpus", "config"} & set(each["failures"]) for each in facts.values()
    )
    rendezvous.post("collectives", run_collectives)
    collectives: dict[int, Any] = {}
    if run_collectives:
        results = Collectives(rendezvous, nodes, _limit(request), lambda what: None).run()
        rendezvous.post("collectives/0", results)
        collectives = rendezvous.collect("collectives", came, 2 * _limit(request) + _slack(request))
    done = collectives if run_collectives else facts
    doing = {rank: rendezvous.read(f"doing/{rank}", 0.001) for rank in came if rank not in done}
    gathered = Gathered(
        world_size=own.world_size,
        nodes=came,
        facts=facts,
        collectives=collectives,
        last={rank: what or "nothing" for rank, what in doing.items()},
        missing=missing,
        clocks=clocks,
        seconds=request.timeout,
        ran_collectives=run_collectives,
    )
    return _conclude(request, rendezvous, gathered)


def _conclude(request: Request, rendezvous: Rendezvous, gathered: Gathered) -> int:
    problems, warnings = find_problems(gathered), find_warnings(gathered)
    code = exit_code(problems)
    print_report(gathered, problems, warnings)
    if request.report is not None:
        try:
            write_report(request.report, gathered, problems, warnings)
        except OSError as error:
            print(
                f"error: --report {request.report} cannot be written ({error.strerror})",
                file=sys.stderr,
            )
            code = max(code, SITE)
    _complain(problems)
    rendezvous.post("verdict", code)
    # The store goes with this process: let everybody read the verdict first.
    rendezvous.collect("bye", [rank for rank in gathered.nodes if rank != 0], _slack(request))
    return code


def _other_rank(request: Request, rendezvous: Rendezvous) -> int:
    own, node = rendezvous.own, rendezvous.node
    rendezvous.post(f"hello/{own.rank}", node)

    def say(what: str) -> None:
        rendezvous.post(f"doing/{own.rank}", what)

    nodes = _expect(rendezvous, "roster", request.timeout + _slack(request))
    if own.rank not in nodes.get(node, []):  # too late: counted among the missing
        return int(_expect(rendezvous, "verdict", 3 * request.timeout + 2 * _slack(request)))
    leader = nodes[node][0] == own.rank
    if leader and node != next(iter(nodes)):
        _show_clock(rendezvous, request.timeout)
    rendezvous.post(f"facts/{own.rank}", local_facts(request, own, leader, say))
    # Rank 0 first measured the clocks, then made its own checks, then waited for everybody's.
    if _expect(rendezvous, "collectives", 3 * request.timeout + 2 * _slack(request)):
        results = Collectives(rendezvous, nodes, _limit(request), say).run()
        rendezvous.post(f"collectives/{own.rank}", results)
    wait = (len(nodes) + 3) * (_limit(request) + _slack(request))
    code = int(_expect(rendezvous, "verdict", wait + request.timeout))
    rendezvous.post(f"bye/{own.rank}", True)
    return code


def _without_rank_0(request: Request, rank: int, error: NoAnswer) -> int:
    """Report that rank 0 does not answer: its node is the bad one, as far as this rank can see."""
    head = head_node()
    whom = f"rank {rank} on node {node_name()}"
    text = f"rank 0 does not answer {whom} within {request.timeout:.0f} s ({error})"
    problem = Problem("answer", text, (head,) if head else ())
    if request.report is not None:
        write_head_node_report(request.report, problem)
    print(f"error: {problem.sentence}", file=sys.stderr, flush=True)
    return BAD_NODES if head else SITE


def _complain(problems: Sequence[Problem]) -> None:
    """Print the problems of no single node as errors, or else the names of the bad nodes."""
    texts = [problem.text for problem in problems if not problem.nodes]
    for text in texts:
        print(f"error: {text}", file=sys.stderr, flush=True)
    if problems and not texts:
        print(f"bad-nodes: {','.join(bad_nodes(problems))}", flush=True)


def _measure_clock(rendezvous: Rendezvous, rank: int, seconds: float) -> tuple[float, float] | None:
    """Return (seconds by which the rank's clock is ahead of this one, uncertainty) from a few round trips."""
    best: tuple[float, float] | None = None
    for number in range(CLOCK_ROUNDS):
        sent = time.time()
        rendezvous.post(f"clock/{rank}/{number}/ask", True)
        there = rendezvous.read(f"clock/{rank}/{number}/answer", seconds)
        answered = time.time()
        if there is None:
            return best
        half = (answered - sent) / 2
        if best is None or half < best[1]:
            best = (there - sent - half, half)
    return best


def _show_clock(rendezvous: Rendezvous, seconds: float) -> None:
    for number in range(CLOCK_ROUNDS):
        if rendezvous.read(f"clock/{rendezvous.own.rank}/{number}/ask", seconds) is None:
            return
        rendezvous.post(f"clock/{rendezvous.own.rank}/{number}/answer", time.time())


def _expect(rendezvous: Rendezvous, key: str, seconds: float) -> Any:
    value = rendezvous.read(key, seconds)
    if value is None:
        raise NoAnswer(f"no word of its {key}")
    return value


def _limit(request: Request) -> float:
    return min(request.timeout, COLLECTIVE_SECONDS)


def _slack(request: Request) -> float:
    return min(request.timeout, SLACK_SECONDS)
