"""The problems that follow from all ranks' facts, each with its nodes. Pure: no clock, files or ranks.

A problem that every node has is no problem of nodes: excluding them would not help, and the user or the site
has to solve it (exit code 2). A problem that only some nodes have is theirs (exit code 3). Where values
differ and none is in the majority, the head node's counts as right.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

FINE, SITE, BAD_NODES = 0, 2, 3

MAX_CLOCK_SKEW = 5.0
"""Seconds. Training works with any skew, but logs of different nodes cannot be read together, and credentials
fail at a skew of minutes."""
SLOW_SHARE = 0.5

SHARED = ("disk", "shm")
"""Checks that one rank makes for its node."""
HARDWARE = ("gpus", "all-reduce")
"""Checks whose failure is the node's own even in a run on a single node; any other is then the site's."""


@dataclass(frozen=True)
class Problem:
    """A problem and its nodes; none if the problem is of no node in particular."""

    check: str
    text: str
    nodes: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """Return the problem as one line, with its nodes."""
        if not self.nodes:
            return self.text
        return f"bad node {', '.join(self.nodes)}: {self.text}"


@dataclass(frozen=True)
class Gathered:
    """All facts that rank 0 has gathered.

    Attributes:
        nodes: rank -> node, of the ranks that came.
        missing: rank -> node (None: not known) of ranks that never came.
        clocks: node -> seconds ahead of the head node, and the uncertainty.
        seconds: seconds that rank 0 waited.
    """

    world_size: int
    nodes: Mapping[int, str]
    facts: Mapping[int, dict[str, Any]]
    collectives: Mapping[int, dict[str, Any]] = field(default_factory=dict)
    last: Mapping[int, str] = field(default_factory=dict)
    missing: Mapping[int, str | None] = field(default_factory=dict)
    clocks: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    seconds: float = 0
    ran_collectives: bool = False

    @property
    def ranks_of(self) -> dict[str, list[int]]:
        """Return {node: its ranks that came}, the head node first."""
        return ranks_by_node(self.nodes)

    @property
    def links(self) -> dict[str, float | None]:
        """Return {node: GB/s of all-reduce with the head node}."""
        links: dict[str, float | None] = self.collectives.get(0, {}).get("links", {})
        return links

    def where(self, ranks: Sequence[int]) -> str:
        """Return a prefix that names some ranks of one node; empty if they are all of its ranks."""
        node = self.nodes[ranks[0]]
        return "" if len(ranks) == len(self.ranks_of[node]) else f"{name_ranks(ranks)}: "


def ranks_by_node(nodes: Mapping[int, str]) -> dict[str, list[int]]:
    """Return {node: its ranks} in the order of the ranks, from {rank: node}."""
    ranks_of: dict[str, list[int]] = {}
    for rank in sorted(nodes):
        ranks_of.setdefault(nodes[rank], []).append(rank)
    return ranks_of


def exit_code(problems: Sequence[Problem]) -> int:
    """Return the exit code: SITE takes precedence over BAD_NODES, because other nodes would not help."""
    if any(not problem.nodes for problem in problems):
        return SITE
    return BAD_NODES if problems else FINE


def bad_nodes(problems: Sequence[Problem]) -> list[str]:
    """Return every node that has a problem of its own."""
    return sorted({node for problem in problems for node in problem.nodes})


def find_problems(gathered: Gathered) -> list[Problem]:
    """Return all problems, the most informative first."""
    return [
        *_absent(gathered),
        *_own_failures(gathered),
        *_differences(gathered),
        *_clock_skew(gathered),
        *_link_failures(gathered),
        *_collective_failures(gathered),
    ]


def find_warnings(gathered: Gathered) -> list[str]:
    """Return warnings about slow GPU nodes: at most half the median all-reduce speed."""
    if not any(facts.get("gpus", {}).get("names") for facts in gathered.facts.values()):
        return []  # CPU ranks share their cores with everything else: their speeds say little
    within = {
        node: results["node"]
        for node, ranks in gathered.ranks_of.items()
        if (results := gathered.collectives.get(ranks[0])) and results.get("node")
    }
    warnings = []
    for what, speeds in (("within the node", within), ("with the head node", gathered.links)):
        known = {node: speed for node, speed in speeds.items() if speed}
        median = statistics.median(known.values()) if len(known) > 2 else 0
        warnings += [
            f"slow node {node}: all-reduce {what} at {speed:.1f} GB/s, the median is {median:.1f}"
            for node, speed in known.items()
            if speed <= SLOW_SHARE * median
        ]
    return warnings


def _absent(gathered: Gathered) -> list[Problem]:
    """Return problems of ranks that never came, or came and did not finish their checks."""
    problems = []
    by_node: dict[str | None, list[int]] = {}
    for rank, node in gathered.missing.items():
        by_node.setdefault(node, []).append(rank)
    unknown = "; nothing says on which node: see the ranks' own logs, and `sacct` or `squeue` for the step"
    for node, ranks in by_node.items():
        text = f"{name_ranks(ranks)} did not answer within {gathered.seconds:.0f} s"
        problems.append(
            Problem("answer", text + ("" if node else unknown), (node,) if node else ())
        )
    silent: dict[tuple[str, str], list[int]] = {}
    done = gathered.collectives if gathered.ran_collectives else gathered.facts
    for rank, node in gathered.nodes.items():
        if rank not in done:
            silent.setdefault((node, gathered.last.get(rank, "nothing")), []).append(rank)
    for (node, doing), ranks in silent.items():
        text = f"{name_ranks(ranks)} came, but did not end; the last check begun was of {doing}"
        problems.append(Problem("answer", text, (node,)))
    return problems


def _own_failures(gathered: Gathered) -> list[Problem]:
    """Return problems of checks that failed on a rank."""
    problems = []
    for check in dict.fromkeys(
        check for facts in gathered.facts.values() for check in facts["failures"]
    ):
        failed = {
            r: f["failures"][check] for r, f in gathered.facts.items() if check in f["failures"]
        }
        passed = any(
            check in facts and rank not in failed for rank, facts in gathered.facts.items()
        )
        alone = len(gathered.ranks_of) == 1 and check in HARDWARE
        if not passed and not alone:
            problems.append(Problem(check, failed[min(failed)]))
            continue
        for node, ranks in gathered.ranks_of.items():
            if hit := [rank for rank in ranks if rank in failed]:
                who = "" if check in SHARED else gathered.where(hit)
                problems.append(Problem(check, who + failed[hit[0]], (node,)))
    return problems


def _differences(gathered: Gathered) -> list[Problem]:
    """Return problems of facts that must be equal on all ranks and are not."""
    problems = []
    names = sorted(
        {name for facts in gathered.facts.values() for name in facts.get("versions", {})}
    )
    for name in names:
        problems += _odd_ones(
            gathered, "versions", f"{name} is", _values(gathered, "versions", name)
        )
    for check, key, subject in (
        ("gpus", "names", "the GPUs are"),
        ("config", "sha256", "the config or its overrides differ: digest"),
        ("data", "fingerprint", "the data has the manifest fingerprint"),
    ):
        problems += _odd_ones(gathered, check, subject, _values(gathered, check, key))
    return problems + _bank_differences(gathered)


def _bank_differences(gathered: Gathered) -> list[Problem]:
    """Return a problem for each node whose bank differs, compared up to the slowest rank's last head."""
    digests = {
        rank: facts["bank"]["digests"] for rank, facts in gathered.facts.items() if "bank" in facts
    }
    common = min(map(len, digests.values()), default=0)
    problems: list[Problem] = []
    named: set[str] = set()
    for index in range(common):
        values = {rank: made[index] for rank, made in digests.items()}
        if (
            len({sha256 for _, sha256 in values.values()}) == 1
            and len({p for p, _ in values.values()}) == 1
        ):
            continue
        shown = {rank: f"{sha256} at {place}" for rank, (place, sha256) in values.items()}
        for problem in _odd_ones(gathered, "bank", "the frozen bank has the digest", shown):
            if problem.nodes[0] not in named:
                named.add(problem.nodes[0])
                problems.append(problem)
    return problems


def _odd_ones(
    gathered: Gathered, check: str, subject: str, values: Mapping[int, Any]
) -> list[Problem]:
    """Return a problem for every node with ranks whose value is not that of the majority."""
    texts = {
        rank: value if isinstance(value, str) else json.dumps(value)
        for rank, value in values.items()
    }
    if len(set(texts.values())) < 2:
        return []
    counts = Counter(texts[rank] for rank in sorted(texts))
    usual = max(
        counts, key=lambda text: counts[text]
    )  # the first of equals: that of the lowest rank
    problems = []
    for node, ranks in gathered.ranks_of.items():
        odd = [rank for rank in ranks if rank in texts and texts[rank] != usual]
        if odd:
            text = f"{gathered.where(odd)}{subject} {texts[odd[0]]}, elsewhere {usual}"
            problems.append(Problem(check, text, (node,)))
    return problems


def _values(gathered: Gathered, check: str, key: str) -> dict[int, Any]:
    return {rank: facts[check][key] for rank, facts in gathered.facts.items() if check in facts}


def _clock_skew(gathered: Gathered) -> list[Problem]:
    offsets = {node: offset for node, (offset, _) in gathered.clocks.items()}
    usual = statistics.median(offsets.values()) if len(offsets) > 2 else 0.0
    problems = []
    for node, offset in offsets.items():
        if abs(offset - usual) > MAX_CLOCK_SKEW + gathered.clocks[node][1]:
            way = "ahead of" if offset > usual else "behind"
            text = f"its clock is {abs(offset - usual):.1f} s {way} the others; its time service has stopped"
            problems.append(Problem("clock", text, (node,)))
    return problems


def _link_failures(gathered: Gathered) -> list[Problem]:
    """Return problems of nodes that the head node cannot reach; of the head node if it reaches none."""
    failures: dict[str, str] = gathered.collectives.get(0, {}).get("link_failures", {})
    head, *others = gathered.ranks_of
    if len(failures) == len(others) > 1:
        text = f"it cannot all-reduce with any other node: {next(iter(failures.values()))}"
        return [Problem("all-reduce", text, (head,))]
    return [Problem("all-reduce", text, (node,)) for node, text in failures.items()]


def _collective_failures(gathered: Gathered) -> list[Problem]:
    problems = []
    for step in ("node", "world"):
        failed = {
            r: f["failures"][step] for r, f in gathered.collectives.items() if step in f["failures"]
        }
        hit = [
            node
            for node, ranks in gathered.ranks_of.items()
            if any(rank in failed for rank in ranks)
        ]
        if not hit:
            continue
        everywhere = len(hit) == len(gathered.ranks_of)
        if everywhere and (step == "world" or len(hit) > 1):
            advice = "; look at NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME, NCCL_DEBUG=INFO says more"
            problems.append(Problem("all-reduce", failed[min(failed)] + advice))
            continue
        for node in hit:
            ranks = [rank for rank in gathered.ranks_of[node] if rank in failed]
            problems.append(
                Problem("all-reduce", gathered.where(ranks) + failed[ranks[0]], (node,))
            )
    return problems


def name_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text: `rank 3`, `ranks 3, 5`, `ranks 8-15`."""
    ordered = sorted(ranks)
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    if len(ordered) > 2 and ordered[-1] - ordered[0] == len(ordered) - 1:
        return f"ranks {ordered[0]}-{ordered[-1]}"
    return "ranks " + ", ".join(map(str, ordered))
