"""A configuration on a number of ranks, with what follows from both, computed once.

`resolve` is where a run learns whether its configuration fits its ranks. All later code takes
the parts that it needs: a section, the shape, the policy, the layout, the run's directory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_patches.bank.orthonormal import BankRecipe
from megatron_patches.recipe.parts import ModelShape
from megatron_patches.recipe.policy import QKPolicy
from megatron_patches.recipe.recipes import ScoreRecipe
from pretrain.config.deepspeed import deepspeed_settings, settings_digest, zero_stage
from pretrain.config.layout_refusals import check_ranks, check_stage
from pretrain.config.refusals import require_wandb
from pretrain.config.schedule import Phase
from pretrain.config.tree import Config
from pretrain.runs.directory import RunDirectory

FILE_FACTS = {
    "deepspeed.config": "deepspeed_config_sha256",
    "model.initial_weights": "initial_weights_sha256",
}
"""{section.key that names a file: key of environment.json with the SHA-256 of its content}"""


@dataclass(frozen=True)
class Layout:
    """The parallel layout of a run, which does not change the trained weights, up to rounding.

    Attributes:
        dtype: Compute type; only recorded, because a resume refuses another one.
    """

    world_size: int
    tensor_model_parallel_size: int
    data_parallel_size: int
    sequence_parallel: bool
    zero_stage: int
    micro_batch_size: int
    dtype: str

    def as_dict(self) -> dict[str, Any]:
        """Return the layout as checkpoints and environment.json hold it."""
        return asdict(self)


@dataclass(frozen=True)
class Resolved:
    """A configuration that fits its ranks.

    Attributes:
        config: The configuration, for functions that need most of its sections.
        recipe: Of the Query/Key bank, or of the score matrices in its place; None: of neither.
        phases: Phases of training, in order.
        directory: The run's directory.
        trunk: Directory of the run that this one branches from; None: it is no branch.
        layout: The spread over the ranks, with the ZeRO stage.
        deepspeed: Settings for DeepSpeed, with the keys that follow from `config` filled in.
        file_digests: SHA-256 of the files that keys name, of `file_digests`.
    """

    config: Config
    shape: ModelShape
    policy: QKPolicy
    recipe: BankRecipe | ScoreRecipe | None
    phases: tuple[Phase, ...]
    total_steps: int
    directory: RunDirectory = field(compare=False)  # follows from the configuration
    trunk: RunDirectory | None = field(compare=False)
    layout: Layout
    deepspeed: Mapping[str, Any]
    file_digests: Mapping[str, str | None]


def resolve(config: Config, world_size: int) -> Resolved:
    """Fit a configuration to a number of ranks.

    Args:
        config: A configuration from `load`, whose values do not contradict each other.
        world_size: Ranks of the run, over all nodes.

    Returns:
        The configuration with its layout and the settings for DeepSpeed.

    Raises:
        UserError: too few ranks, a batch that does not divide, DeepSpeed settings that are wrong
            or train wrong at this ZeRO stage, or a package that is not installed.
    """
    check_ranks(config, world_size)
    settings = deepspeed_settings(config, world_size)
    stage = zero_stage(settings)
    check_stage(config, stage)
    if config.telemetry.wandb:
        require_wandb()
    layout = Layout(
        world_size=world_size,
        tensor_model_parallel_size=config.parallel.tensor_model_parallel_size,
        data_parallel_size=config.data_parallel_size(world_size),
        sequence_parallel=config.parallel.sequence_parallel,
        zero_stage=stage,
        micro_batch_size=config.data.micro_batch_size,
        dtype=config.precision.dtype,
    )
    return Resolved(
        config=config,
        shape=config.shape,
        policy=config.policy,
        recipe=config.recipe,
        phases=config.phases,
        total_steps=config.total_steps,
        directory=config.run_directory,
        trunk=config.trunk,
        layout=layout,
        deepspeed=settings,
        file_digests=file_digests(config),
    )


def file_digests(config: Config) -> dict[str, str | None]:
    """Return {section.key: SHA-256 of the file that it names, or of its header}; None: no file."""
    weights = config.given_weights
    return {
        "deepspeed.config": settings_digest(config.deepspeed.config),
        "model.initial_weights": None if weights is None else weights.sha256,
    }
