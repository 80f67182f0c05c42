"""What a rank finds out alone. Nothing here waits for another rank.

Each check is a function that returns plain facts (JSON) or raises an error whose text is the problem. The
first rank of a node also checks what the ranks of a node share: disk, /dev/shm, the data files.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from typing import Any

from data_pipeline.shards.manifest import expected_files, file_problem
from pretrain.config.load import load_config
from pretrain.config.tree import Config
from pretrain.data.inputs import check_inputs
from pretrain.doctor.bank import bank_facts
from pretrain.doctor.machine import Unfit, disk_facts, gpu_facts, shm_facts, version_facts
from pretrain.doctor.rendezvous import Place, bounded
from pretrain.doctor.request import Request
from pretrain.ranks.devices import ask_for


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

    def look_at_gpus() -> dict[str, Any]:
        if config:
            ask_for(config[0].run.device)
        return gpu_facts(place.local_rank, request.expected_gpus())

    checks: list[tuple[str, Callable[[], Any]]] = [
        ("versions", version_facts),
        ("config", read_config),
        ("gpus", look_at_gpus),
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


def _clause(error: Exception) -> str:
    ours = isinstance(error, (Unfit, ValueError, TimeoutError)) and str(error)
    return str(error) if ours else f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
