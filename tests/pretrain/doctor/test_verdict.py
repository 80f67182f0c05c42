"""What the doctor concludes from what the ranks found."""

from __future__ import annotations

from typing import Any

from pretrain.doctor.request import Difference
from pretrain.doctor.verdict import (
    BAD_NODES,
    FINE,
    SITE,
    Gathered,
    bad_nodes,
    exit_code,
    find_problems,
)


def gathered(nodes: int, per_node: int = 2, **changes: Any) -> Gathered:
    """Ranks that all found the same and nothing wrong."""
    world = range(nodes * per_node)
    versions = {"torch": "2.13.0+cu126", "driver": "550.54"}
    gpus = {"names": ["NVIDIA A100-SXM4-80GB 79 GiB"] * per_node, "free": 84e9}
    facts = {r: {"failures": {}, "versions": dict(versions), "gpus": dict(gpus)} for r in world}
    content: dict[str, Any] = {
        "nodes": {r: f"n{r // per_node + 1}" for r in world},
        "facts": facts,
        "sums": {rank: {} for rank in world},
        **changes,
    }
    return Gathered(**content)


def judged(state: Gathered) -> tuple[int, list[str], list[str]]:
    problems = find_problems(state)
    return exit_code(problems), bad_nodes(problems), [problem.sentence for problem in problems]


def test_the_majority_is_right_and_the_head_node_where_there_is_none() -> None:
    assert judged(gathered(3)) == (FINE, [], [])
    for nodes, wrong, expected in ((3, 0, "n1"), (3, 2, "n2"), (2, 0, "n2")):
        state = gathered(nodes)
        for rank in (wrong, wrong + 1):
            state.facts[rank]["versions"]["driver"] = "535.104"
        code, bad, (sentence,) = judged(state)
        assert (code, bad) == (BAD_NODES, [expected])
        here, elsewhere = ("550.54", "535.104") if nodes == 2 else ("535.104", "550.54")
        assert sentence == f"bad node {expected}: driver is {here}, elsewhere {elsewhere}"


def test_a_failure_of_some_nodes_is_theirs_and_of_all_the_sites() -> None:
    state = gathered(2)
    state.facts[3]["failures"]["gpus"] = "local rank 1 has no GPU: 1 visible"
    said = "bad node n2: rank 3: local rank 1 has no GPU: 1 visible"
    assert judged(state) == (BAD_NODES, ["n2"], [said])
    for rank in range(4):
        state.facts[rank]["failures"]["gpus"] = "torch sees 0 GPUs of 8"
    assert judged(state) == (SITE, [], ["torch sees 0 GPUs of 8"])
    # A third node that never came is no reason to blame the others.
    absent = gathered(2, missing={4: "n3"})
    for rank in range(4):
        absent.facts[rank]["failures"]["data"] = "data directory data/x does not exist"
    assert judged(absent)[:2] == (SITE, ["n3"])
    alone = gathered(1)
    for rank in range(2):
        alone.facts[rank]["failures"]["gpus"] = "torch sees 7 GPUs of 8"
    assert judged(alone)[:2] == (BAD_NODES, ["n1"])


def test_a_failing_all_reduce_names_the_node_that_can_be_named() -> None:
    everywhere = {"world": "all-reduce over all ranks did not end within 65 s"}
    sums: dict[int, dict[str, str]] = {rank: dict(everywhere) for rank in range(6)}
    code, bad, (sentence,) = judged(gathered(3, sums=sums))
    assert (code, bad) == (SITE, []) and "NCCL_SOCKET_IFNAME" in sentence
    # A node that fails within itself takes all others along.
    sums[4]["node"] = "all-reduce within the node failed: 12 of 99 sums are wrong"
    _, bad, (sentence,) = judged(gathered(3, sums=sums))
    assert bad == ["n3"] and sentence.startswith("bad node n3: rank 4: all-reduce within the node")


def test_clocks() -> None:
    clocks = {"n1": (0.0, 0.0), "n2": (7.5, 0.001), "n3": (0.2, 0.001)}
    _, bad, (sentence,) = judged(gathered(3, clocks=clocks))
    assert bad == ["n2"] and "its clock is 7.3 s ahead of the others" in sentence
    clocks = {"n1": (0.0, 0.0), "n2": (7.5, 0.001), "n3": (7.6, 0.001)}
    assert judged(gathered(3, clocks=clocks))[1] == ["n1"]


def test_what_may_differ_is_no_reason_to_leave_a_node_out() -> None:
    state = gathered(3, clocks={"n1": (0.0, 0.0), "n2": (7.5, 0.001), "n3": (0.2, 0.001)})
    state.facts[4]["versions"]["driver"] = "535.104"
    assert bad_nodes(find_problems(state)) == ["n2", "n3"]
    assert bad_nodes(find_problems(state, {Difference.CLOCK})) == ["n3"]
    assert find_problems(state, {Difference.CLOCK, Difference.DRIVER}) == []
    state.facts[4]["versions"]["torch"] = "2.12.0"
    assert bad_nodes(find_problems(state, set(Difference))) == ["n3"]
