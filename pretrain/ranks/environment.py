"""The launcher's environment: this process's rank, the number of ranks, and their meeting point.

Only this file reads the variables by which torchrun, DeepSpeed's launcher, srun or `--local-ranks`
tell a process about the ranks (`launch` writes them). This file imports no torch, because error and
signal handling need the rank before torch is imported.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pretrain.errors import UserError

REFUSAL = "ORA_REFUSAL"
"""Variable by which a job script names the file for what all ranks refuse alike."""


@dataclass(frozen=True)
class LaunchEnvironment:
    """This process's place among the ranks, as torchrun, DeepSpeed's launcher or srun set it."""

    rank: int
    local_rank: int
    world_size: int

    @staticmethod
    def read() -> LaunchEnvironment:
        """Read the launcher's environment; a process without a launcher is rank 0 of 1.

        Raises:
            UserError: some of the variables are missing or wrong.
        """
        if "RANK" in os.environ:
            names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        elif "SLURM_STEP_NUM_TASKS" in os.environ and "SLURM_PROCID" in os.environ:
            names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS")
        else:
            return LaunchEnvironment(rank=0, local_rank=0, world_size=1)
        launch = LaunchEnvironment(*(_whole_number(name, names[0]) for name in names))
        if not 0 <= launch.rank < launch.world_size:
            raise _launch_error(
                f"{names[0]}={launch.rank} is not among {names[2]}={launch.world_size} ranks"
            )
        if launch.world_size > 1:
            for name in ("MASTER_ADDR", "MASTER_PORT"):
                if name not in os.environ:
                    raise _launch_error(
                        f"{names[2]}={launch.world_size} but the environment does not set {name}"
                    )
            _whole_number("MASTER_PORT", "MASTER_ADDR")
        return launch


def speaks_for_all() -> bool:
    """Return whether this process is rank 0 or has no launcher; never raises."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


def meeting_point() -> tuple[str, int] | None:
    """Return host and port at which rank 0 listens; None without a launcher."""
    if "MASTER_ADDR" not in os.environ:
        return None
    return os.environ["MASTER_ADDR"], _whole_number("MASTER_PORT", "MASTER_ADDR")


def launcher_listens() -> bool:
    """Return whether the launcher holds the rendezvous store, not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def restarts() -> str:
    """Return how often torchrun has restarted the ranks.

    After a restart torchrun's store still holds the entries of the earlier ranks.
    """
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def one_environment_for_all() -> bool:
    """Return whether this node's ranks were started together on the same GPUs.

    srun starts every rank separately, and may show each only its own GPU.
    """
    return os.environ.get("LOCAL_WORLD_SIZE", "1") != "1"


def node_name() -> str:
    """Return this node's name, as `sbatch --exclude` knows it."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def head_node() -> str | None:
    """Return the node of rank 0, if srun says so."""
    hosts = expand_hosts(os.environ.get("SLURM_STEP_NODELIST", ""))
    return hosts[0] if hosts else None


def without_rank(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` for a child process that starts its own ranks."""
    return {
        name: value for name, value in environment.items() if name not in ("RANK", "SLURM_PROCID")
    }


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` for a child process that never meets these ranks."""
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {
        name: value
        for name, value in environment.items()
        if name not in (*ranks, REFUSAL) and not name.startswith(("TORCHELASTIC_", "SLURM_"))
    }


def missing_nodes(
    missing: Iterable[int],
    present: Mapping[int, str],
    world_size: int,
    environment: Mapping[str, str],
) -> dict[int, str | None]:
    """Return the node of each missing rank, from the environment and the ranks that came.

    Args:
        missing: Ranks that did not come.
        present: {rank: node} of the ranks that came.
        world_size: Number of ranks.
        environment: Environment of this process, as its launcher set it.
    """
    planned = _slurm_nodes(environment, world_size)
    if planned and any(planned[rank] != node for rank, node in present.items()):
        planned = []  # a distribution other than block
    if planned:
        return {rank: planned[rank] for rank in missing}
    local = int(environment.get("LOCAL_WORLD_SIZE") or 0)
    if not local:
        return dict.fromkeys(missing)
    node_of_group = {rank // local: node for rank, node in present.items()}
    return {rank: node_of_group.get(rank // local) for rank in missing}


def expand_hosts(text: str) -> list[str]:
    """Expand Slurm's `n[1-3,7],gpu-a[01-02]` into its host names."""
    names: list[str] = []
    for part in re.findall(r"(?:\[[^\]]*\]|[^,\[])+", text):
        bracket = re.search(r"\[([^\]]*)\]", part)
        if not bracket:
            names.append(part)
            continue
        head = part[: bracket.start()]
        tail = part[bracket.end() :]
        for item in bracket[1].split(","):
            first, _, last = item.partition("-")
            for number in range(int(first), int(last or first) + 1):
                names += expand_hosts(f"{head}{number:0{len(first)}d}{tail}")
    return names


def _slurm_nodes(environment: Mapping[str, str], world_size: int) -> list[str]:
    """Return the node of every rank under srun's block distribution; empty if unknown."""
    hosts = expand_hosts(environment.get("SLURM_STEP_NODELIST", ""))
    counts: list[int] = []
    for part in environment.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    if len(counts) != len(hosts) or sum(counts) != world_size:
        return []
    return [host for host, count in zip(hosts, counts, strict=True) for _ in range(count)]


def _whole_number(name: str, beside: str) -> int:
    """Read the environment variable `name`, which launchers set together with `beside`."""
    if name not in os.environ:
        raise _launch_error(f"the environment sets {beside} but not {name}")
    try:
        return int(os.environ[name])
    except ValueError:
        raise _launch_error(
            f"{name}={os.environ[name]!r} in the environment is not a whole number"
        ) from None


def _launch_error(problem: str) -> UserError:
    return UserError(
        f"{problem}; start ranks with torchrun, --local-ranks, or srun with MASTER_ADDR and "
        "MASTER_PORT of the first node",
        rank_specific=True,
    )
