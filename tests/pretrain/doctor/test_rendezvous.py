"""Ranks that do not come: nothing waits for ever, and the missing node has a name."""

from __future__ import annotations

import time

import pytest

from pretrain.doctor.rendezvous import bounded
from pretrain.doctor.verdict import name_ranks
from pretrain.ranks.environment import expand_hosts, missing_nodes


def test_what_hangs_is_left_behind() -> None:
    with pytest.raises(TimeoutError, match="the check of data did not end within 0 s"):
        bounded(lambda: time.sleep(60), 0.1, "the check of data")
    with pytest.raises(ZeroDivisionError):
        bounded(lambda: 1 / 0, 60, "division")


def test_nodes_of_missing_ranks() -> None:
    hosts = ["n1", "n2", "n3", "n07", "gpu-a", "r1c8", "r1c9", "r2c8", "r2c9"]
    assert expand_hosts("n[1-3,07],gpu-a,r[1-2]c[8-9]") == hosts
    slurm = {"SLURM_STEP_NODELIST": "n[1-3]", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}
    assert missing_nodes([3, 4], {0: "n1", 1: "n1", 2: "n2"}, 5, slurm) == {3: "n2", 4: "n3"}
    assert missing_nodes([3], {0: "n1", 1: "n2", 2: "n3", 4: "n2"}, 5, slurm) == {3: None}  # cyclic
    local = {"LOCAL_WORLD_SIZE": "2"}
    assert missing_nodes([3, 4], {0: "a", 2: "b"}, 6, local) == {3: "b", 4: None}
    assert name_ranks([3]) == "rank 3" and name_ranks([8, 9, 10]) == "ranks 8-10"
    assert name_ranks([1, 5]) == "ranks 1, 5"
