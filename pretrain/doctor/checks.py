"""What a rank finds out alone. Nothing here waits for another rank.

Each check is a function that returns plain facts (JSON) or raises an error whose text is the problem. The
first rank of a node also checks what the ranks of a node share: disk, /dev/shm, the data files.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from data_pipeline.manifest import expected_files, file_problem
from megatron_patches.orthonormal import ROLES, BankRecipe, Role, rows_of_heads
from megatron_patches.policy import QKPolicy
from megatron_patches.shards import head_digests, split_heads
from pretrain.config.counting import checkpoint_bytes, count_attention, count_parameters
from pretrain.config.load import load_config
from pretrain.config.tree import Config
from pretrain.data.inputs import check_inputs
from pretrain.doctor.meeting import Place, bounded
from pretrain.model.build import DTYPES
from pretrain.runs.directory import RunDirectory
from pretrain.runs.environment import package_versions

SHM_FOR_NCCL = 1 << 30
"""NVIDIA's advice for containers (Docker gives 64 MiB): NCCL exchanges through it within a node."""
SHM_WITHOUT_GPU = 16 << 20
PROBE_BYTES = 256 << 20
FREE_GPU_SHARE = 0.9
"""A GPU with less of its memory free before the run starts has somebody else's process on it."""


class Unfit(Exception):
    """Something is not as a run needs it; the text is one clause."""


@dataclass(frozen=True)
class Request:
    """What to check.

    Attributes:
        config, overrides: as `load_config`.
        timeout: seconds to wait for a rank, and for a check.
        gpus: that each node should have; None: as many as Slurm says it gave, or no expectation.
        digest_seconds: how long each rank regenerates frozen heads at most.
        report: where the JSON goes.
    """

    config: str
    overrides: tuple[str, ...] = ()
    timeout: float = 180
    gpus: int | None = None
    digest_seconds: float = 30
    report: Path | None = None


def local_facts(request: Request, place: Place, leader: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Every check of this rank, within `request.timeout`: {check: facts, "failures": {check: clause}}.

    Args:
        leader: this rank checks for its node.
        say: told each check's name before it begins.
    """
    facts: dict[str, Any] = {"failures": {}}
    deadline = time.monotonic() + request.timeout
    config: list[Config] = []

    def read_config() -> dict[str, Any]:
        config.append(load_config(request.config, request.overrides))
        return config_facts(config[0])

    checks: list[tuple[str, Callable[[], Any]]] = [
        ("versions", version_facts),
        ("gpus", lambda: gpu_facts(place.local_rank, expected_gpus(request))),
        ("config", read_config),
        ("data", lambda: data_facts(config[0], place.world_size, leader)),
        ("bank", lambda: bank_facts(config[0], request.digest_seconds)),
    ]
    if leader:
        checks += [("disk", lambda: disk_facts(config[0])), ("shm", shm_facts)]
    for name, action in checks:
        if name in ("data", "bank", "disk") and not config:
            continue
        say(name)
        try:
            facts[name] = bounded(action, deadline - time.monotonic(), f"the check of {name}")
        except Exception as error:  # whatever it is, it is this node's problem and must reach the table
            facts["failures"][name] = _clause(error)
    return facts


def expected_gpus(request: Request) -> int | None:
    """GPUs that the node should show, or None if nobody says."""
    given = os.environ.get("SLURM_GPUS_ON_NODE", "")
    return request.gpus if request.gpus is not None else int(given) if given.isdecimal() else None


def version_facts() -> dict[str, str | None]:
    """Versions of what must be equal everywhere; `program` is a digest of this program's own files."""
    on_gpu = torch.cuda.is_available()
    return {
        **package_versions(),
        "torch": torch.__version__,  # with its build, as +cu126
        "CUDA": torch.version.cuda,
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else None,
        "driver": _driver_version(),
        "program": _program_digest(),
    }


def gpu_facts(local_rank: int, expected: int | None) -> dict[str, Any]:
    """The node's GPUs as this rank sees them.

    Raises:
        Unfit: another number than expected, none for this rank, or its own is in use.
    """
    count = torch.cuda.device_count()
    if expected is not None and count != expected:
        build = "" if torch.version.cuda else f" (torch {torch.__version__} is built without CUDA)"
        raise Unfit(f"torch sees {count} GPUs of {expected}{build}")
    if count == 0:
        return {"names": [], "free": None}
    if local_rank >= count:
        raise Unfit(f"local rank {local_rank} has no GPU: {count} visible")
    names = []
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        names.append(f"{properties.name} {properties.total_memory / 2**30:.0f} GiB")
    torch.cuda.set_device(local_rank)
    free, total = torch.cuda.mem_get_info(local_rank)
    if free < FREE_GPU_SHARE * total:
        raise Unfit(
            f"GPU {local_rank} has {(total - free) / 2**30:.1f} GiB in use before the run starts: "
            "another process is on it"
        )
    return {"names": names, "free": free}


def config_facts(config: Config) -> dict[str, Any]:
    """A digest of the whole configuration."""
    return {"sha256": hashlib.sha256(config.to_yaml().encode()).hexdigest()[:16]}


def data_facts(config: Config, world_size: int, every_file: bool) -> dict[str, Any]:
    """The data's identity; with `every_file` also that every shard is there with its size and can be read.

    Raises:
        UserError, DataError: as `check_inputs`.
        Unfit: the first file that is not as the manifest says.
    """
    blend = check_inputs(config, world_size)
    files = 0
    for manifest in blend.manifests if every_file else ():
        for path, size, _ in expected_files(manifest):
            problem = file_problem(path, size, None)
            if problem is None and not os.access(path, os.R_OK):
                problem = f"{path} may not be read"
            if problem:
                raise Unfit(problem)
            files += 1
    return {"fingerprint": blend.fingerprint, "files": files}


def bank_facts(config: Config, seconds: float) -> dict[str, Any]:
    """Digests of the frozen heads, as many as the time allows: head 0 of every layer first, then head 1 ...

    All ranks make them in the same order, so what two ranks have made is a beginning of the same list.
    """
    recipe = config.recipe()
    if not isinstance(recipe, BankRecipe):  # a synthesizer's score matrices training compares itself
        return {"digests": [], "heads": 0}
    deadline, digests = time.monotonic() + seconds, []
    units = frozen_units(recipe, config.policy(), config.model.num_layers)
    for layer, role, heads in units:
        rows = torch.from_numpy(rows_of_heads(recipe, layer, role, heads)).to(DTYPES[config.precision.dtype])
        made = head_digests(rows, recipe.head_dim)
        digests += [
            [f"layer {layer} {role} head {head}", sha256[:16]]
            for head, sha256 in zip(heads, made, strict=True)
        ]
        if time.monotonic() > deadline:
            break
    return {"digests": digests, "heads": sum(len(heads) for _, _, heads in units)}


def frozen_units(
    recipe: BankRecipe, policy: QKPolicy, num_layers: int
) -> list[tuple[int, Role, Sequence[int]]]:
    """(layer, role, frozen heads) that are made at once: a head, or with scope `layer` all of a role."""
    units: list[tuple[int, Role, Sequence[int]]] = []
    for layer, groups in enumerate(policy.frozen_groups(num_layers, recipe.num_query_groups)):
        heads = split_heads(recipe.num_attention_heads, recipe.num_query_groups, groups, 0, 1).frozen
        for role in ROLES:
            if recipe.scope == "layer" and heads[role]:
                units.append((layer, role, heads[role]))
            else:
                units += [(layer, role, [head]) for head in heads[role]]
    return sorted(units, key=lambda unit: unit[2][0])


def disk_facts(config: Config) -> dict[str, Any]:
    """Room and write speed where the checkpoints go. Leaves nothing behind.

    Raises:
        Unfit: not enough room for the checkpoints that are kept and the one being written, or no writing.
    """
    directory = RunDirectory(config.run_path).checkpoints
    there = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.is_dir())
    shape = config.shape()
    count = count_parameters(shape, count_attention(shape, config.policy()))
    size = checkpoint_bytes(count, config.precision.dtype)
    have = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
    needed = max(size, (max(1, config.checkpoint.keep_last) + 1) * size - have)
    free = shutil.disk_usage(there).free
    if free < needed:
        raise Unfit(
            f"{there} has {_size(free)} free, and this run's checkpoints need {_size(needed)} "
            f"({_size(size)} each, checkpoint.keep_last={config.checkpoint.keep_last} and one being written)"
        )
    try:
        speed = _write_speed(there, min(PROBE_BYTES, max(1 << 20, size)))
    except OSError as error:
        raise Unfit(f"{there} cannot be written to ({error.strerror})") from error
    return {
        "directory": str(there),
        "checkpoint": size,
        "needed": needed,
        "free": free,
        "bytes_per_second": speed,
    }


def shm_facts() -> dict[str, Any]:
    """Size of /dev/shm.

    Raises:
        Unfit: less free than the ranks of a node need.
    """
    usage = shutil.disk_usage("/dev/shm")
    needed = SHM_FOR_NCCL if torch.cuda.device_count() > 1 else SHM_WITHOUT_GPU
    if usage.free < needed:
        raise Unfit(
            f"/dev/shm has {_size(usage.free)} of {_size(usage.total)} free, {_size(needed)} are needed: "
            "remove what earlier jobs left there, or give the container more"
        )
    return {"total": usage.total, "free": usage.free}


def _write_speed(directory: Path, size: int) -> float:
    """Bytes per second of writing a file through to the disk and reading it back unchanged."""
    block = os.urandom(1 << 20)  # not zeros: file systems that compress would not write them
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=directory) as probe:
        path = Path(probe) / "probe"
        started = time.monotonic()
        with path.open("wb") as file:
            for _ in range(-(-size // len(block))):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        seconds = time.monotonic() - started
        with path.open("rb") as file:
            while chunk := file.read(len(block)):
                if chunk != block:
                    raise Unfit(f"a file written to {directory} reads back differently")
    return size / max(seconds, 1e-9)


def _driver_version() -> str | None:
    """Of NVIDIA's kernel module; None on a machine without it."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    match = re.search(r"Kernel Module\D*\s(\d+(?:\.\d+)+)", text)
    return match[1] if match else text.splitlines()[0]


def _program_digest() -> str:
    """A node-local checkout that was not updated is found by this."""
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for package in ("pretrain", "megatron_patches", "data_pipeline", "ds_configs"):
        for path in sorted((root / package).rglob("*")):
            if path.suffix in (".py", ".json", ".yaml"):
                digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _clause(error: Exception) -> str:
    ours = isinstance(error, (Unfit, ValueError, TimeoutError)) and str(error)
    return str(error) if ours else f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _size(number: float) -> str:
    for unit in ("bytes", "KB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "bytes" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"
