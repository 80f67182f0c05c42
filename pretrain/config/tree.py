"""The configuration of a run: one typed, validated, frozen tree, from YAML and dotted overrides.

    config = load_config("demo", ["attention.variant=vanilla", "optimizer.learning_rate=5e-4"])

Paths in it are taken from the working directory. What is refused, and where: `sections` (ranges),
`refusals` (combinations), `deepspeed` (DeepSpeed's own keys).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError, model_validator

from megatron_patches.policy import QKPolicy, policy_for
from megatron_patches.unfreeze import Unfreeze
from pretrain.config.attention import AttentionSection
from pretrain.config.counting import ModelShape
from pretrain.config.refusals import check_layout, check_tree
from pretrain.config.sections import (
    CheckpointSection,
    DataSection,
    DeepSpeedSection,
    ModelSection,
    OptimizerSection,
    ParallelSection,
    PrecisionSection,
    RunSection,
    ScheduleSection,
    TelemetrySection,
)
from pretrain.config.text import (
    Draft,
    apply_overrides,
    dump_yaml,
    locate,
    read_yaml,
    refuse_unknown_keys,
    validation_sentence,
)
from pretrain.config.types import Section
from pretrain.errors import UserError

POLICY_AXES = (
    "scope",
    "construction",
    "gaussian_std",
    "frozen_heads",
    "adapters",
    "low_rank",
    "trainable",
    "synthesizer_rank",
    "penalty",
    "unfreeze",
)
"""Keys of the attention section that replace an axis of the variant's policy."""

__all__ = [
    "Config",
    "LoadedConfig",
    "check_layout",
    "config_from_draft",
    "load_config",
    "load_config_with_origins",
    "parse_config",
]


class Config(Section):
    """A run, fully described. Where a section holds None, the property of the same name has the value."""

    run: RunSection
    model: ModelSection
    attention: AttentionSection
    optimizer: OptimizerSection
    schedule: ScheduleSection
    data: DataSection
    parallel: ParallelSection = ParallelSection()
    precision: PrecisionSection
    checkpoint: CheckpointSection
    telemetry: TelemetrySection = TelemetrySection()
    deepspeed: DeepSpeedSection = DeepSpeedSection()

    @model_validator(mode="after")
    def _possible(self) -> Config:
        check_tree(self)
        return self

    @property
    def num_query_groups(self) -> int:
        """Key/value heads of a layer."""
        groups = self.model.num_query_groups
        return self.model.num_attention_heads if groups is None else groups

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        given = self.model.head_dim
        return self.model.hidden_size // self.model.num_attention_heads if given is None else given

    @property
    def ffn_hidden_size(self) -> int:
        """Inner width of the MLP."""
        given = self.model.ffn_hidden_size
        return 4 * self.model.hidden_size if given is None else given

    @property
    def tokens_per_step(self) -> int:
        """Training tokens of one optimizer step, over all ranks."""
        return self.data.global_batch_size * self.data.sequence_length

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run: schedule.steps, or the fewest that reach schedule.tokens."""
        if self.schedule.steps is not None:
            return self.schedule.steps
        tokens = self.schedule.tokens or 0
        return -(-tokens // self.tokens_per_step)

    @property
    def bank_seed(self) -> int:
        """Seed of the Query/Key bank."""
        return self.run.seed if self.attention.seed is None else self.attention.seed

    @property
    def data_seed(self) -> int:
        """Seed of the sample order."""
        return self.run.seed if self.data.seed is None else self.data.seed

    @property
    def sample_cache(self) -> Path:
        """Where sample orders are kept, for all runs on the same data."""
        given = self.data.cache_directory
        return self.run.directory / "sample_order" if given is None else given

    @property
    def run_path(self) -> Path:
        """The run directory."""
        return self.run.directory / self.run.name

    def data_parallel_size(self, world_size: int) -> int:
        """Copies of the model among `world_size` ranks."""
        return world_size // self.parallel.tensor_model_parallel_size

    def gradient_accumulation_steps(self, world_size: int) -> int:
        """Forward passes of a rank in one optimizer step."""
        return self.data.global_batch_size // (
            self.data.micro_batch_size * self.data_parallel_size(world_size)
        )

    def policy(self, phase: int = 0) -> QKPolicy:
        """The Query/Key policy: the variant with the axes given in `attention` replaced.

        Args:
            phase: of a run in which layers become trainable on the way (see `config.phases`).

        Raises:
            MethodError: unknown variant, or axes that do not go together (never from a Config that exists).
        """
        given = self.attention
        axes = {axis: getattr(given, axis) for axis in POLICY_AXES}
        if given.frozen_heads is not None:
            axes["frozen_heads"] = tuple(given.frozen_heads.items())
        if given.unfreeze is not None:
            axes["unfreeze"] = tuple(Unfreeze(**entry.model_dump()) for entry in given.unfreeze)
        return replace(policy_for(given.variant, axes), phase=phase)

    def shape(self) -> ModelShape:
        """The sizes that parameter and FLOP counts depend on."""
        return ModelShape(
            num_layers=self.model.num_layers,
            hidden_size=self.model.hidden_size,
            num_attention_heads=self.model.num_attention_heads,
            num_query_groups=self.num_query_groups,
            head_dim=self.head_dim,
            ffn_hidden_size=self.ffn_hidden_size,
            vocab_size=self.model.vocab_size,
            sequence_length=self.data.sequence_length,
            learned_positions=self.model.position_embedding == "learned",
            tied_embeddings=self.model.tied_embeddings,
        )

    def resolved(self) -> dict[str, dict[str, Any]]:
        """The tree as plain values, None replaced by what it stands for; parsing it gives the same run."""
        values: dict[str, dict[str, Any]] = self.model_dump(mode="json")
        policy = self.policy()
        values["model"].update(
            num_query_groups=self.num_query_groups,
            head_dim=self.head_dim,
            ffn_hidden_size=self.ffn_hidden_size,
        )
        values["attention"].update(
            seed=self.bank_seed,
            gaussian_std=policy.gaussian_std,
            adapters=list(policy.adapters),
            low_rank=policy.low_rank if "low_rank" in policy.adapters else None,
            frozen_heads=dict(policy.frozen_heads) or None,
            trainable=policy.trainable if policy.synthesizer else None,
            synthesizer_rank=policy.score_rank,
            penalty=policy.penalty or None,
            unfreeze=[asdict(entry) for entry in policy.unfreeze] or None,
        )
        if policy.init == "orthogonal":
            values["attention"].update(scope=policy.scope, construction=policy.construction)
        values["data"]["seed"] = self.data_seed
        return values

    def to_yaml(self) -> str:
        """`resolved` as YAML that `load_config` reads back."""
        return dump_yaml(self.resolved())


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration, and where each `section.key` was given (`FILE:LINE` or `override`; else a default)."""

    config: Config
    origins: Mapping[str, str]


def load_config(name_or_path: str, overrides: Sequence[str] = ()) -> Config:
    """Read a shipped configuration by name, or a YAML file by path, and apply overrides in order.

    Raises:
        UserError: no such file, unknown keys, wrong types, values that do not go together.
    """
    return load_config_with_origins(name_or_path, overrides).config


def load_config_with_origins(name_or_path: str, overrides: Sequence[str] = ()) -> LoadedConfig:
    """As `load_config`, and with where each value came from.

    Raises:
        UserError: as `load_config`.
    """
    draft = read_yaml(*locate(name_or_path))
    apply_overrides(draft, overrides)
    config = config_from_draft(draft)
    return LoadedConfig(
        config, {".".join(path): origin for path, origin in draft.origins.items() if len(path) > 1}
    )


def parse_config(values: Mapping[str, Any]) -> Config:
    """A configuration from plain values (section -> key -> value).

    Raises:
        UserError: as `load_config`.
    """
    return config_from_draft(Draft("(given as values)", dict(values)))


def config_from_draft(draft: Draft) -> Config:
    """A configuration from values that remember where they came from.

    Raises:
        UserError: as `load_config`.
    """
    refuse_unknown_keys(draft, Config)
    try:
        return Config.model_validate(draft.values)
    except ValidationError as error:
        raise UserError(validation_sentence(error, draft)) from None
