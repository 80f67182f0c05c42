"""The problems that follow from all ranks' facts, each with its nodes.

Pure: no clock, files or ranks.

A problem that every node has is no problem of nodes: excluding them would not help, and the user or
the site has to solve it (exit code 2). A problem of some nodes only is theirs (exit code 3). Where
values differ and none is in the majority, the head node's counts as right.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pretrain.doctor.request import Difference

FINE, SITE, BAD_NODES = 0, 2, 3

MAX_CLOCK_SKEW = 5.0
"""Seconds. Training works with any skew, but logs of different nodes cannot be read together, and
credentials fail at a skew of minutes."""

HARDWARE = ("gpus", "node")
"""Checks whose failure is the node's own even in a run on a single node; any other failure is then
the site's."""
ALL_REDUCES = ("node", "world")
"""Checks that the ranks make together, within a node and over all ranks."""
NETWORK_ADVICE = "; look at NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME, NCCL_DEBUG=INFO says more"


@dataclass(frozen=True)
class Problem:
    """A problem and its nodes; it has none if no node in particular has the problem."""

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
        nodes: {rank: node} of the ranks that came.
        facts: {rank: what the rank found on its own}.
        sums: {rank: why its all-reduces failed}; None if no all-reduce was made.
        missing: {rank: node, None if unknown} of the ranks that never came.
        clocks: {node: (seconds ahead of the head node, uncertainty)}.
        seconds: Time that rank 0 waited.
    """

    nodes: Mapping[int, str]
    facts: Mapping[int, dict[str, Any]]
    sums: Mapping[int, dict[str, str]] | None = None
    missing: Mapping[int, str | None] = field(default_factory=dict)
    clocks: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    seconds: float = 0

    @property
    def ranks_of(self) -> dict[str, list[int]]:
        """Return {node: its ranks that came}, the head node first."""
        return ranks_by_node(self.nodes)

    def by_node(self, ranks: Sequence[int]) -> dict[str, tuple[list[int], str]]:
        """Return {node: (its ranks among these, a prefix naming them unless they are all)}."""
        ranks_and_prefix = {}
        for node, node_ranks in self.ranks_of.items():
            if hit := [rank for rank in node_ranks if rank in ranks]:
                prefix = "" if hit == node_ranks else f"{name_ranks(hit)}: "
                ranks_and_prefix[node] = (hit, prefix)
        return ranks_and_prefix


def ranks_by_node(nodes: Mapping[int, str]) -> dict[str, list[int]]:
    """Return {node: its ranks} in the order of the ranks, from {rank: node}."""
    ranks_of: dict[str, list[int]] = {}
    for rank in sorted(nodes):
        ranks_of.setdefault(nodes[rank], []).append(rank)
    return ranks_of


def exit_code(problems: Sequence[Problem]) -> int:
    """Return the exit code; SITE outranks BAD_NODES, because other nodes would not help."""
    if any(not problem.nodes for problem in problems):
        return SITE
    return BAD_NODES if problems else FINE


def bad_nodes(problems: Sequence[Problem]) -> list[str]:
    """Return every node that has a problem of its own."""
    return sorted({node for problem in problems for node in problem.nodes})


def find_problems(gathered: Gathered, allowed: Collection[Difference] = ()) -> list[Problem]:
    """Return all problems, the most informative first.

    allowed: Differences between nodes that are no problem.
    """
    alone = {rank: facts["failures"] for rank, facts in gathered.facts.items()}
    together = gathered.sums or {}
    if any("node" in failures for failures in together.values()):  # then all ranks fail with it
        together = {
            rank: {step: clause for step, clause in failures.items() if step == "node"}
            for rank, failures in together.items()
        }
    return [
        *_absent(gathered),
        *_failures(gathered, alone),
        *_differences(gathered, allowed),
        *(_clock_skew(gathered) if Difference.CLOCK not in allowed else ()),
        *_failures(gathered, together),
    ]


def _absent(gathered: Gathered) -> list[Problem]:
    """Return the problems of ranks that never came, or came and did not finish their checks."""
    problems = []
    for node in dict.fromkeys(gathered.missing.values()):
        ranks = [rank for rank, missing_node in gathered.missing.items() if missing_node == node]
        text = f"{name_ranks(ranks)} did not answer within {gathered.seconds:.0f} s"
        if node is None:
            text += "; nothing says on which node: see the ranks' own logs, and `sacct` or "
            text += "`squeue` for the step"
        problems.append(Problem("answer", text, () if node is None else (node,)))
    done = gathered.facts if gathered.sums is None else gathered.sums
    for node, all_ranks in gathered.ranks_of.items():
        if silent := [rank for rank in all_ranks if rank not in done]:
            text = f"{name_ranks(silent)} came, but did not end the checks"
            problems.append(Problem("answer", text, (node,)))
    return problems


def _failures(gathered: Gathered, failures: Mapping[int, Mapping[str, str]]) -> list[Problem]:
    """Return the problems of failed checks, from {rank: {check: clause}}."""
    problems = []
    asked = {gathered.nodes[rank] for rank in failures}
    for check in dict.fromkeys(check for clauses in failures.values() for check in clauses):
        clauses = {rank: failures[rank][check] for rank in failures if check in failures[rank]}
        label = "all-reduce" if check in ALL_REDUCES else check
        hit = gathered.by_node(list(clauses))
        nodes = set(gathered.ranks_of) if check in ALL_REDUCES else asked
        alone = len(gathered.ranks_of) == 1 and check in HARDWARE
        if set(hit) == nodes and not alone:
            advice = NETWORK_ADVICE if check in ALL_REDUCES else ""
            problems.append(Problem(label, clauses[min(clauses)] + advice))
            continue
        problems += [
            Problem(label, who + clauses[ranks[0]], (node,)) for node, (ranks, who) in hit.items()
        ]
    return problems


def _differences(gathered: Gathered, allowed: Collection[Difference]) -> list[Problem]:
    """Return the problems of facts that must be equal on all ranks and are not."""
    names = {name for facts in gathered.facts.values() for name in facts.get("versions", {})}
    names -= {difference.value for difference in allowed}
    compared = [("versions", name, f"{name} is") for name in sorted(names)]
    compared += [
        ("gpus", "names", "the GPUs are"),
        ("config", "sha256", "the config or its overrides differ: digest"),
        ("data", "fingerprint", "the data has the manifest fingerprint"),
    ]
    problems = []
    for check, key, subject in compared:
        values = {r: facts[check][key] for r, facts in gathered.facts.items() if check in facts}
        problems += _odd_ones(gathered, check, subject, values)
    return problems


def _odd_ones(
    gathered: Gathered, check: str, subject: str, values: Mapping[int, Any]
) -> list[Problem]:
    """Return a problem for every node with ranks whose value differs from the majority's."""
    texts = {
        rank: value if isinstance(value, str) else json.dumps(value)
        for rank, value in sorted(values.items())
    }
    if len(set(texts.values())) < 2:
        return []
    ((usual, _),) = Counter(texts.values()).most_common(1)  # of equal counts the lowest rank's
    odd = [rank for rank, text in texts.items() if text != usual]
    return [
        Problem(check, f"{who}{subject} {texts[ranks[0]]}, elsewhere {usual}", (node,))
        for node, (ranks, who) in gathered.by_node(odd).items()
    ]


def _clock_skew(gathered: Gathered) -> list[Problem]:
    offsets = {node: offset for node, (offset, _) in gathered.clocks.items()}
    usual = statistics.median(offsets.values()) if len(offsets) > 2 else 0.0
    problems = []
    for node, (offset, uncertainty) in gathered.clocks.items():
        if abs(offset - usual) > MAX_CLOCK_SKEW + uncertainty:
            way = "ahead of" if offset > usual else "behind"
            size = f"{abs(offset - usual):.1f} s {way}"
            text = f"its clock is {size} the others; its time service has stopped"
            problems.append(Problem("clock", text, (node,)))
    return problems


def name_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text: `rank 3`, `ranks 3, 5`, `ranks 8-15`."""
    ordered = sorted(ranks)
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    if len(ordered) > 2 and ordered[-1] - ordered[0] == len(ordered) - 1:
        return f"ranks {ordered[0]}-{ordered[-1]}"
    return "ranks " + ", ".join(map(str, ordered))
