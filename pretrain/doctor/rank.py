"""The course of the preflight on one rank.

Rank 0 gathers, judges and speaks; the others answer and take its verdict.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pretrain.doctor.checks import local_facts
from pretrain.doctor.collectives import Collectives
from pretrain.doctor.rendezvous import Meeting, NoAnswer, Place
from pretrain.doctor.report import print_report, write_head_node_report, write_report
from pretrain.doctor.request import Request
from pretrain.doctor.verdict import (
    BAD_NODES,
    SITE,
    Gathered,
    Problem,
    exit_code,
    find_problems,
    find_warnings,
)
from pretrain.ranks.environment import head_node, missing_nodes

CLOCK_ROUNDS = 5
SLACK_SECONDS = 15.0
"""At most this much between a limit that one rank keeps and the limit of the rank that waits for it."""
COLLECTIVE_SECONDS = 60.0


def run_doctor(request: Request) -> int:
    """Everything; returns the exit code, the same on every rank that rank 0 could speak to.

    Raises:
        UserError: a half-set launcher's environment, or an address at which rank 0 cannot listen.
    """
    place = Place.read()
    try:
        meeting = Meeting(place, request.timeout)
        return _first_rank(request, meeting) if place.rank == 0 else _other_rank(request, meeting)
    except NoAnswer as error:
        return _without_rank_0(request, place, error)


def _first_rank(request: Request, meeting: Meeting) -> int:
    place = meeting.place
    meeting.post("hello/0", place.node)
    came = meeting.collect("hello", range(place.world_size), request.timeout)
    absent = [rank for rank in range(place.world_size) if rank not in came]
    missing = missing_nodes(absent, came, place.world_size, os.environ)
    nodes = _group(came)
    meeting.post("roster", nodes)
    clocks = {place.node: (0.0, 0.0)}
    for node, ranks in nodes.items():
        if node != place.node and (measured := _measure_clock(meeting, ranks[0], _slack(request))):
            clocks[node] = measured
    last: dict[str, str] = {}
    meeting.post("facts/0", local_facts(request, place, True, lambda what: last.update(rank0=what)))
    facts = meeting.collect("facts", came, request.timeout + _slack(request))
    run_collectives = len(facts) == place.world_size and not any(
        {"gpus", "config"} & set(found["failures"]) for found in facts.values()
    )
    meeting.post("collectives", run_collectives)
    collectives: dict[int, Any] = {}
    if run_collectives:
        meeting.post("collectives/0", Collectives(meeting, nodes, _limit(request), _silent).run())
        collectives = meeting.collect("collectives", came, 2 * _limit(request) + _slack(request))
    done = collectives if run_collectives else facts
    gathered = Gathered(
        world_size=place.world_size,
        nodes=came,
        facts=facts,
        collectives=collectives,
        last={rank: meeting.read(f"doing/{rank}", 0.001) or "nothing" for rank in came if rank not in done},
        missing=missing,
        clocks=clocks,
        seconds=request.timeout,
        ran_collectives=run_collectives,
    )
    return _conclude(request, meeting, gathered)


def _conclude(request: Request, meeting: Meeting, gathered: Gathered) -> int:
    problems, warnings = find_problems(gathered), find_warnings(gathered)
    code = exit_code(problems)
    print_report(gathered, problems, warnings)
    if request.report is not None:
        try:
            write_report(request.report, gathered, problems, warnings)
        except OSError as error:
            print(f"error: --report {request.report} cannot be written ({error.strerror})", file=sys.stderr)
            code = max(code, SITE)
    _complain(problems)
    meeting.post("verdict", code)
    # The store goes with this process: let everybody read the verdict first.
    meeting.collect("bye", [rank for rank in gathered.nodes if rank != 0], _slack(request))
    return code


def _other_rank(request: Request, meeting: Meeting) -> int:
    place = meeting.place
    meeting.post(f"hello/{place.rank}", place.node)

    def say(what: str) -> None:
        meeting.post(f"doing/{place.rank}", what)

    nodes = _expect(meeting, "roster", request.timeout + _slack(request))
    if place.rank not in nodes.get(place.node, []):  # too late: counted among the missing
        return int(_expect(meeting, "verdict", 3 * request.timeout + 2 * _slack(request)))
    leader = nodes[place.node][0] == place.rank
    if leader and place.node != next(iter(nodes)):
        _show_clock(meeting, request.timeout)
    meeting.post(f"facts/{place.rank}", local_facts(request, place, leader, say))
    # Rank 0 first measured the clocks, then made its own checks, then waited for everybody's.
    if _expect(meeting, "collectives", 3 * request.timeout + 2 * _slack(request)):
        found = Collectives(meeting, nodes, _limit(request), say).run()
        meeting.post(f"collectives/{place.rank}", found)
    wait = (len(nodes) + 3) * (_limit(request) + _slack(request))
    code = int(_expect(meeting, "verdict", wait + request.timeout))
    meeting.post(f"bye/{place.rank}", True)
    return code


def _without_rank_0(request: Request, place: Place, error: NoAnswer) -> int:
    """Rank 0's node is the bad one, as far as this rank can see."""
    head = head_node()
    whom = f"rank {place.rank} on node {place.node}"
    text = f"rank 0 does not answer {whom} within {request.timeout:.0f} s ({error})"
    problem = Problem("answer", text, (head,) if head else ())
    if request.report is not None:
        write_head_node_report(request.report, problem)
    print(f"error: {problem.sentence}", file=sys.stderr, flush=True)
    return BAD_NODES if head else SITE


def _complain(problems: Sequence[Problem]) -> None:
    """The problems that no node has for itself, as every other user error is printed."""
    texts = [problem.text for problem in problems if not problem.nodes]
    for text in texts:
        print(f"error: {text}", file=sys.stderr, flush=True)
    bad = sorted({node for problem in problems for node in problem.nodes})
    if bad and not texts:
        print(f"bad-nodes: {','.join(bad)}", flush=True)


def _measure_clock(meeting: Meeting, rank: int, seconds: float) -> tuple[float, float] | None:
    """(seconds that rank's clock is ahead of mine, uncertainty): the best of a few questions and answers."""
    best: tuple[float, float] | None = None
    for number in range(CLOCK_ROUNDS):
        asked = time.time()
        meeting.post(f"clock/{rank}/{number}/ask", True)
        there = meeting.read(f"clock/{rank}/{number}/answer", seconds)
        answered = time.time()
        if there is None:
            return best
        half = (answered - asked) / 2
        if best is None or half < best[1]:
            best = (there - asked - half, half)
    return best


def _show_clock(meeting: Meeting, seconds: float) -> None:
    for number in range(CLOCK_ROUNDS):
        if meeting.read(f"clock/{meeting.place.rank}/{number}/ask", seconds) is None:
            return
        meeting.post(f"clock/{meeting.place.rank}/{number}/answer", time.time())


def _expect(meeting: Meeting, key: str, seconds: float) -> Any:
    value = meeting.read(key, seconds)
    if value is None:
        raise NoAnswer(f"no word of its {key}")
    return value


def _group(nodes: Mapping[int, str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank in sorted(nodes):
        found.setdefault(nodes[rank], []).append(rank)
    return found


def _limit(request: Request) -> float:
    return min(request.timeout, COLLECTIVE_SECONDS)


def _slack(request: Request) -> float:
    return min(request.timeout, SLACK_SECONDS)


def _silent(_: str) -> None:
    """Rank 0 needs to tell nobody what it is doing."""
