"""Checks of a rank: on its own, and all-reduces with the others.

Each check of a rank on its own is a function that returns plain facts (JSON) or raises an error
whose text is the problem. The first rank of a node also checks what its ranks share: disk,
/dev/shm, the data files.

Ranks all-reduce within each node, then over all ranks. This order finds the faulty node, because
ranks of one node depend on that node alone. Every step runs in a thread with a time limit, on a
process group of its own.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from data_pipeline.shards.manifest import expected_files, file_problem
from megatron_patches.recipe.optimizers import checkpoint_bytes
from pretrain.config.load import load_config
from pretrain.config.tree import Config
from pretrain.data.open import check_inputs
from pretrain.doctor.rendezvous import Rendezvous, bounded, first_line
from pretrain.doctor.request import Request
from pretrain.errors import UserError
from pretrain.ranks.devices import MACHINE, ask_for, is_shown_its_own, own_device, why_no_cuda
from pretrain.ranks.environment import LaunchEnvironment
from pretrain.runs.environment import package_versions
from pretrain.runs.storage import size_text

SHM_FOR_NCCL = 1 << 30
"""NVIDIA's advice for containers (Docker gives 64 MiB): NCCL uses /dev/shm within a node."""
SHM_WITHOUT_GPU = 16 << 20
FREE_GPU_SHARE = 0.9
"""A GPU with less of its memory free before the run starts is in use by another process."""
ELEMENTS = {"cuda": 1 << 26, "cpu": 1 << 20}
"""float32: 256 MiB, which NCCL splits into many pieces; 4 MiB."""
PERIOD = 1021
"""A prime: no two ranks, and no two slices of a ring, have the same numbers in the same place."""


def local_facts(request: Request, launch: LaunchEnvironment, leader: bool) -> dict[str, Any]:
    """Make every check of this rank within `request.timeout` seconds.

    Args:
        request: The arguments of the command line.
        launch: This rank.
        leader: Whether this is the first rank of its node, which checks what the node's ranks
            share.

    Returns:
        {check: facts, "failures": {check: clause}}.
    """
    facts: dict[str, Any] = {"failures": {}}
    deadline = time.monotonic() + request.timeout
    config: list[Config] = []

    def read_config() -> dict[str, Any]:
        config.append(load_config(request.config, request.overrides))
        return {"sha256": hashlib.sha256(config[0].to_yaml().encode()).hexdigest()[:16]}

    def check_gpus() -> dict[str, Any]:
        if config:
            ask_for(config[0].run.device)
        return gpu_facts(launch.local_rank, request.expected_gpus())

    checks: dict[str, Callable[[], Any]] = {
        "versions": version_facts,
        "config": read_config,
        "gpus": check_gpus,
        "data": lambda: data_facts(config[0], launch.world_size, leader),
    }
    if leader:
        checks |= {"disk": lambda: disk_facts(config[0]), "shm": shm_facts}
    for name, action in checks.items():
        if name in ("data", "disk") and not config:
            continue
        try:
            facts[name] = bounded(action, deadline - time.monotonic(), f"the check of {name}")
        except Exception as error:
            # Every error is a problem of this node and must reach the table.
            facts["failures"][name] = _clause(error)
    return facts


def data_facts(config: Config, world_size: int, every_file: bool) -> dict[str, Any]:
    """Return the identity of the data.

    Args:
        every_file: Whether to check every shard file's size and permissions too.

    Raises:
        UserError: as `check_inputs`, or a file differs from the manifest; the first is named.
        DataError: as `check_inputs`.
    """
    blend = check_inputs(config, world_size).blend
    files = 0
    for manifest in blend.manifests if every_file else ():
        for path, size, _ in expected_files(manifest):
            problem = file_problem(path, size, None)
            if problem is None and not os.access(path, os.R_OK):
                problem = f"{path} may not be read"
            if problem:
                raise UserError(problem)
            files += 1
    return {"fingerprint": blend.fingerprint, "files": files}


def version_facts() -> dict[str, str | None]:
    """Return the versions that must be equal everywhere.

    `program` is a digest of this program's files.
    """
    on_gpu = torch.cuda.is_available()
    return {
        **package_versions(),
        "torch": torch.__version__,  # with its build, as +cu126
        "CUDA": torch.version.cuda,
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else None,
        "driver": _driver_version(),
        "program": _program_digest(),
    }


def gpu_facts(local_rank: int, expected: int | None, machine: Path = MACHINE) -> dict[str, Any]:
    """Return names and free memory of the node's GPUs as this rank sees them.

    Args:
        expected: Number of GPUs that the node should have; None: any.
        machine: Root of the file system with NVIDIA's device files.

    Raises:
        UserError: another number of GPUs than expected, this rank's is in use, or as `own_device`.
    """
    count = torch.cuda.device_count()
    require_gpus(count, expected)
    device = own_device(local_rank, machine)
    if device.type == "cpu":
        return {"names": [], "free": None}
    gpus = [torch.cuda.get_device_properties(index) for index in range(count)]
    free, total = torch.cuda.mem_get_info(device)
    if free < FREE_GPU_SHARE * total:
        raise UserError(
            f"GPU {device.index} has {(total - free) / 2**30:.1f} GiB in use before the run "
            "starts: another process is on it"
        )
    names = [f"{gpu.name} {gpu.total_memory / 2**30:.0f} GiB" for gpu in gpus]
    return {"names": names, "free": free}


def require_gpus(count: int, expected: int | None) -> None:
    """Refuse another number of GPUs than expected, unless the rank is shown only its own.

    Args:
        count: GPUs that this rank sees.
        expected: Number of GPUs that the node should have; None: any.

    Raises:
        UserError: there are more or fewer.
    """
    if expected not in (None, count) and not is_shown_its_own(count):
        why = why_no_cuda()
        raise UserError(f"torch sees {count} GPUs of {expected}" + (f" ({why})" if why else ""))


def disk_facts(config: Config) -> dict[str, Any]:
    """Return the free bytes of the checkpoints' directory, after a trial write.

    Raises:
        UserError: the space is too small for the kept checkpoints and the one being written, or the
            directory is a file or cannot be written to.
    """
    directory = config.run_directory.checkpoints
    places = (directory.absolute(), *directory.absolute().parents)
    existing_parent = next(path for path in places if os.path.lexists(path))
    if not existing_parent.is_dir():
        raise UserError(
            f"{existing_parent} is not a directory, and checkpoints are written below it; set "
            "another run.directory"
        )
    size = max(checkpoint_bytes(every, config.optimizer.rules) for every in config.inventories)
    # What the run keeps within checkpoint.keep_last, or removes; everything else there stays.
    kept_checkpoints = [
        path for path in config.run_directory.complete_checkpoints() if not path.is_symlink()
    ]
    have = sum(file.stat().st_size for path in kept_checkpoints for file in path.iterdir())
    needed = max(size, (config.checkpoint.keep_last + 1) * size - have)
    free = shutil.disk_usage(existing_parent).free
    if free < needed:
        raise UserError(
            f"{existing_parent} has {size_text(free)} free, and this run's checkpoints need "
            f"{size_text(needed)} ({size_text(size)} each, "
            f"checkpoint.keep_last={config.checkpoint.keep_last} and one being written)"
        )
    try:
        tempfile.TemporaryFile(dir=existing_parent).close()
    except OSError as error:
        raise UserError(f"{existing_parent} cannot be written to ({error.strerror})") from error
    return {"directory": str(existing_parent), "checkpoint": size, "needed": needed, "free": free}


def shm_facts() -> dict[str, Any]:
    """Return the size of /dev/shm in bytes.

    Raises:
        UserError: less is free than the ranks of a node need.
    """
    usage = shutil.disk_usage("/dev/shm")
    needed = SHM_FOR_NCCL if torch.cuda.device_count() > 1 else SHM_WITHOUT_GPU
    if usage.free < needed:
        raise UserError(
            f"/dev/shm has {size_text(usage.free)} of {size_text(usage.total)} free, "
            f"{size_text(needed)} are needed: remove what earlier jobs left there, or give the "
            "container more"
        )
    return {"total": usage.total, "free": usage.free}


def _driver_version() -> str | None:
    """Return the version of NVIDIA's kernel module; None on a machine without one."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    match = re.search(r"Kernel Module\D*\s(\d+(?:\.\d+)+)", text)
    return match[1] if match else text.splitlines()[0]


def _program_digest() -> str:
    """Return a digest of this program's files, which shows a checkout that was not updated."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for package in ("pretrain", "megatron_patches", "data_pipeline", "ds_configs"):
        for path in sorted((root / package).rglob("*")):
            if path.suffix in (".py", ".json", ".yaml"):
                digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _clause(error: Exception) -> str:
    ours = isinstance(error, (ValueError, TimeoutError)) and str(error)
    return str(error) if ours else f"{type(error).__name__}: {first_line(error)}"


def all_reduce_failures(
    rendezvous: Rendezvous, nodes: Mapping[str, Sequence[int]], seconds: float
) -> dict[str, str]:
    """All-reduce within this rank's node, then over all ranks; collective over all of them.

    Args:
        nodes: {node: its ranks, in rank order}.
        seconds: Time limit of each step.

    Returns:
        {"node", "world": reason of the failure}; a step that succeeded is missing.
    """
    # The watchdog of torch's NCCL group would end the whole process when a collective hangs,
    # before the failure is reported. The time limit here is our own.
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    groups: list[Any] = []  # kept to the end: closing one early fails the peer that still reads

    def all_reduce(name: str, members: Sequence[int]) -> None:
        device = own_device(rendezvous.launch.local_rank)
        store = rendezvous.connection(name, seconds)
        group_rank = members.index(rendezvous.launch.rank)
        groups.append(_group(store, group_rank, len(members), device, seconds=seconds))
        check_all_reduce(groups[-1], group_rank, len(members), device)

    steps = {"node": ("all-reduce within the node", nodes[rendezvous.node])}
    if len(nodes) > 1:
        ranks_of_all = [rank for ranks in nodes.values() for rank in ranks]
        steps["world"] = ("all-reduce over all ranks", sorted(ranks_of_all))
    failures = {}
    for step, (description, members) in steps.items():
        name = f"{step}/{members[0]}"
        try:
            bounded(partial(all_reduce, name, members), seconds + 5, description)
        except TimeoutError as error:
            failures[step] = str(error)
        except Exception as error:  # gloo's and NCCL's errors have no type of their own
            failures[step] = f"{description} failed: {first_line(error)}"
    return failures


def check_all_reduce(group: Any, rank: int, size: int, device: torch.device) -> None:
    """Compare the result of an all-reduce with the sum of the ranks' values, computed locally.

    Raises:
        RuntimeError: the sums differ.
    """
    places = torch.arange(ELEMENTS[device.type], device=device)
    # Whole numbers below 2^24: every order of summation gives the same float32.
    table = torch.zeros(PERIOD, device=device)
    for member in range(size):
        table += (torch.arange(PERIOD, device=device) + 7 * member) % PERIOD
    values = ((places + 7 * rank) % PERIOD).float()
    group.allreduce([values]).wait()
    wrong = int((values != table[places % PERIOD]).sum())
    if wrong:
        raise RuntimeError(f"{wrong:,} of {len(values):,} sums are wrong")


def _group(store: dist.Store, rank: int, size: int, device: torch.device, *, seconds: float) -> Any:
    timeout = timedelta(seconds=seconds)
    if device.type == "cpu":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    torch.cuda.set_device(device)  # of this thread
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)
