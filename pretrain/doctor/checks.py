"""Checks that one rank makes on its own, without waiting for another rank.

Each check is a function that returns plain facts (JSON) or raises an error whose text is the problem. The
first rank of a node also checks the resources that a node's ranks share: disk, /dev/shm, the data files.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from data_pipeline.shards.manifest import expected_files, file_problem
from megatron_patches.bank.head_split import split_heads
from megatron_patches.bank.orthonormal import ROLES, BankRecipe, Role
from megatron_patches.bank.shards import head_digests, head_rows_in
from megatron_patches.recipe.policy import QKPolicy
from pretrain.config.load import load_config
from pretrain.config.tree import Config
from pretrain.data.open import check_inputs
from pretrain.doctor.machine import Unfit, disk_facts, gpu_facts, shm_facts, version_facts
from pretrain.doctor.rendezvous import bounded
from pretrain.doctor.request import Request
from pretrain.model.build import DTYPES
from pretrain.ranks.devices import ask_for
from pretrain.ranks.environment import LaunchEnvironment


def local_facts(
    request: Request, own: LaunchEnvironment, leader: bool, say: Callable[[str], None]
) -> dict[str, Any]:
    """Make every check of this rank within `request.timeout`.

    `say`: called with each check's name before the check begins. Returns {check: facts, "failures": {check:
    clause}}.
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

    checks: list[tuple[str, Callable[[], Any]]] = [
        ("versions", version_facts),
        ("config", read_config),
        ("gpus", check_gpus),
        ("data", lambda: data_facts(config[0], own.world_size, leader)),
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
        except (
            Exception
        ) as error:  # whatever it is, it is this node's problem and must reach the table
            facts["failures"][name] = _clause(error)
    return facts


def data_facts(config: Config, world_size: int, every_file: bool) -> dict[str, Any]:
    """Return the data's identity; with `every_file`, check every shard file's size and permissions.

    Raises UserError, DataError as `check_inputs`; Unfit: names the first file that differs from the manifest.
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
    """Return digests of the frozen heads, as many as the time allows: head 0 of every layer, then head 1, ...

    All ranks use the same order, so the lists of two ranks agree as far as the shorter one goes.
    """
    recipe = config.recipe
    if not isinstance(
        recipe, BankRecipe
    ):  # training itself compares a synthesizer's score matrices
        return {"digests": [], "heads": 0}
    deadline, digests = time.monotonic() + seconds, []
    units = frozen_units(recipe, config.policy, config.model.num_layers)
    for layer, role, heads in units:
        rows = head_rows_in(recipe, layer, role, heads, DTYPES[config.precision.dtype])
        made = head_digests(rows, recipe.head_dim)
        for head, sha256 in zip(heads, made, strict=True):
            digests.append([f"layer {layer} {role} head {head}", sha256[:16]])
        if time.monotonic() > deadline:
            break
    return {"digests": digests, "heads": sum(len(heads) for _, _, heads in units)}


def frozen_units(
    recipe: BankRecipe, policy: QKPolicy, num_layers: int
) -> list[tuple[int, Role, Sequence[int]]]:
    """Return (layer, role, frozen heads) drawn at once: one head, or all of a role with scope `layer`."""
    units: list[tuple[int, Role, Sequence[int]]] = []
    for layer, groups in enumerate(policy.frozen_groups(num_layers, recipe.num_query_groups)):
        counts, roles = (
            (recipe.num_attention_heads, recipe.num_query_groups),
            policy.frozen_row_roles,
        )
        heads = split_heads(*counts, groups, 0, 1, roles, policy.shared).frozen
        for role in ROLES:
            if recipe.scope == "layer" and heads[role]:
                units.append((layer, role, heads[role]))
            else:
                units += [(layer, role, [head]) for head in heads[role]]
    return sorted(units, key=lambda unit: unit[2][0])


def _clause(error: Exception) -> str:
    ours = isinstance(error, (Unfit, ValueError, TimeoutError)) and str(error)
    return str(error) if ours else f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
