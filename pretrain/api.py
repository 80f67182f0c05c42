"""The public Python interface: docs/api.md shows each name with an example.

    from pretrain.api import FrozenAttention, compare, load_run

These names stay as they are within a version 0.x; everything else in the packages may change.
Importing this module imports neither megatron-core nor DeepSpeed, and torch only for
`FrozenAttention` or `bank_rows`. A mistake of the caller raises one sentence, as a
`pretrain.errors.UserError` or a `megatron_patches.errors.MethodError`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from data_pipeline.io.home import expand_home
from megatron_patches.bank.orthonormal import BankRecipe
from megatron_patches.recipe.variants import ORDINARY

if TYPE_CHECKING:
    from laboratory.api import FinishedRun, compare, compare_losses, load_run, paired_gaps
    from megatron_patches.attention.module import FrozenAttention
    from megatron_patches.bank.shards import bank_rows
    from pretrain.plan.estimate import Plan

__all__ = [
    "BankRecipe",
    "FinishedRun",
    "FrozenAttention",
    "bank_rows",
    "compare",
    "compare_losses",
    "export",
    "load_run",
]
__all__ += ["paired_gaps", "plan", "sample"]

AnyPath = str | os.PathLike[str]
_LATER = {
    "FrozenAttention": "megatron_patches.attention.module",
    "bank_rows": "megatron_patches.bank.shards",
    "FinishedRun": "laboratory.api",
    "compare": "laboratory.api",
    "compare_losses": "laboratory.api",
    "load_run": "laboratory.api",
    "paired_gaps": "laboratory.api",
}
"""{name: its module, which is imported at the first use of the name}"""


def __getattr__(name: str) -> Any:
    """Import the names that need torch, or packages of an extra."""
    if name not in _LATER:
        raise AttributeError(f"module 'pretrain.api' has no attribute '{name}'")
    return getattr(import_module(_LATER[name]), name)


def plan(
    config: AnyPath,
    overrides: Sequence[str] = (),
    gpus: int = 8,
    gpu: str = "a100-80gb",
    baseline: str = ORDINARY,
    price: float | None = None,
) -> Plan:
    """Estimate memory, time, energy and cost of a run, as the verb `plan` does.

    Builds no model.

    Args:
        config: A shipped configuration, or a YAML file.
        overrides: section.key=value.
        gpus: GPUs in all, one rank each.
        gpu: Name of a card, or a file that describes one.
        baseline: Variant of the second estimate.
        price: Price of a GPU for an hour; None: no cost.
    """
    from pretrain.plan.estimate import Request, make_plan

    request = Request(
        config=os.fspath(config),
        overrides=tuple(overrides),
        gpus=gpus,
        gpu=gpu,
        baseline=baseline,
        price=price,
    )
    return make_plan(request)


def export(
    run: AnyPath, out: AnyPath, step: int | None = None, dtype: str | None = None
) -> dict[str, Any]:
    """Export a run's model for transformers to a new directory, in another process.

    Args:
        run: Directory of the run.
        out: The new directory.
        step: Step of the checkpoint; None: the newest complete one.
        dtype: fp32 or bf16; None: the run's own.

    Returns:
        The content of export.json.
    """
    from pretrain.export.models import FACTS
    from pretrain.export.run_exports import export_apart
    from pretrain.runs.facts import read_facts

    export_apart(expand_home(run), expand_home(out), step, dtype)
    return read_facts(expand_home(out) / FACTS)


def sample(
    path: AnyPath,
    prompt: str = "",
    tokens: int = 100,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    step: int | None = None,
) -> str:
    """Write text with a trained model.

    Args:
        path: A run, which is exported once per checkpoint, or an export without code of its own.
        prompt: Text to continue.
        tokens: Number of tokens to add.
        temperature: Divisor of the logits; 0 always takes the likeliest token.
        top_p: Total probability of the tokens that are drawn from.
        seed: Seed of the draws.
        step: Step of the checkpoint; None: the newest complete one.

    Returns:
        The text after the prompt.
    """
    from pretrain.export.run_exports import exported
    from pretrain.export.sampling import Sampler, Sampling

    directory = exported(expand_home(path), step)
    sampler = Sampler(directory, trust_code=directory != expand_home(path))
    return sampler.text(prompt, Sampling(tokens, temperature, top_p, seed))
