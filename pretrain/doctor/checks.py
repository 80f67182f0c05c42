"""Checks that one rank makes on its own, without waiting for another rank.

Each check is a function that returns plain facts (JSON) or raises an error whose text is the
problem. The first rank of a node also checks the resources that its ranks share: disk, /dev/shm,
the data files.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from typing import Any

from data_pipeline.shards.manifest import expected_files, file_problem
from megatron_patches.bank.head_split import split_heads
from megatron_patches.bank.orthonormal import ROLES, BankRecipe
from megatron_patches.bank.shards import head_digests, head_rows_in
from pretrain.config.load import load_config
from pretrain.config.tree import Config
from pretrain.data.open import check_inputs
from pretrain.doctor.machine import Unfit, disk_facts, gpu_facts, shm_facts, version_facts
from pretrain.doctor.rendezvous import bounded
from pretrain.doctor.request import Request
from pretrain.model.build import DTYPES
from pretrain.ranks.devices import ask_for
from pretrain.ranks.environment import LaunchEnvironment


def local_facts(request: Request, own: LaunchEnvironment, leader: bool) -> dict[str, Any]:
    """Make every check of this rank within `request.timeout` seconds.

    Args:
        request: what the command line asks for.
        own: this rank.
        leader: this is the first rank of its node, which checks what the node's ranks share.

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
        return gpu_facts(own.local_rank, request.expected_gpus())

    checks: dict[str, Callable[[], Any]] = {
        "versions": version_facts,
        "config": read_config,
        "gpus": check_gpus,
        "data": lambda: data_facts(config[0], own.world_size, leader),
        "bank": lambda: bank_facts(config[0]),
    }
    if leader:
        checks |= {"disk": lambda: disk_facts(config[0]), "shm": shm_facts}
    for name, action in checks.items():
        if name in ("data", "bank", "disk") and not config:
            continue
        try:
            facts[name] = bounded(action, deadline - time.monotonic(), f"the check of {name}")
        except Exception as error:
            # Whatever it is, it is this node's problem and must reach the table.
            facts["failures"][name] = _clause(error)
    return facts


def data_facts(config: Config, world_size: int, every_file: bool) -> dict[str, Any]:
    """Return the data's identity.

    Args:
        config: configuration of the run.
        world_size: number of ranks.
        every_file: check every shard file's size and permissions too.

    Raises:
        UserError: as `check_inputs`.
        DataError: as `check_inputs`.
        Unfit: names the first file that differs from the manifest.
    """
    blend = check_inputs(config, world_size).blend
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


def bank_facts(config: Config) -> dict[str, str]:
    """Return the digest of one frozen head, the first of the model; training compares all.

    Args:
        config: configuration of the run.
    """
    recipe, policy = config.recipe, config.policy
    if not isinstance(recipe, BankRecipe):
        # Training itself compares the score matrices of a synthesizer.
        return {"digest": "none"}
    groups = policy.frozen_groups(config.model.num_layers, recipe.num_query_groups)
    for layer, frozen in enumerate(groups):
        heads = split_heads(
            recipe.num_attention_heads,
            recipe.num_query_groups,
            frozen,
            rank=0,
            tensor_parallel_size=1,
            roles=policy.frozen_row_roles,
            shared=policy.shared,
        ).frozen
        for role in ROLES:
            if heads[role]:
                dtype = DTYPES[config.precision.dtype]
                first = heads[role][:1]
                (made,) = head_digests(
                    head_rows_in(recipe, layer, role, first, dtype=dtype), recipe.head_dim
                )
                return {"digest": f"{made[:16]} at layer {layer} {role} head {first[0]}"}
    return {"digest": "none"}


def _clause(error: Exception) -> str:
    ours = isinstance(error, (Unfit, ValueError, TimeoutError)) and str(error)
    return str(error) if ours else f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
