"""The configuration of a run: one frozen tree of sections, and the values that follow from it.

Each section refuses mistakes within itself, `refusals` contradictions between sections. `load`
applies both, and is the only way to get a configuration.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from copy import deepcopy
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from data_pipeline.io.files import open_regular
from data_pipeline.io.forms import LARGEST
from megatron_patches.bank.initial_weights_file import GivenWeights
from megatron_patches.bank.orthonormal import BankRecipe
from megatron_patches.recipe.block import MLPS
from megatron_patches.recipe.counting import executed_flops_of_phases, executed_flops_of_steps
from megatron_patches.recipe.parts import ModelShape, Tensor
from megatron_patches.recipe.policy import QKPolicy
from megatron_patches.recipe.recipes import ScoreRecipe, bank_recipe, score_recipe
from megatron_patches.recipe.tensors import tensors
from megatron_patches.recipe.variants import policy_for
from pretrain.config import sections
from pretrain.config.attention import AttentionSection, written_axes
from pretrain.config.model import ModelSection
from pretrain.config.optimizer import OptimizerSection
from pretrain.config.schedule import Phase, phases_of
from pretrain.config.sources import dump_yaml
from pretrain.config.types import Section
from pretrain.errors import UserError
from pretrain.runs.directory import RunDirectory


class Config(Section):
    """The configuration of a run.

    Where a section holds None, the property of the same name has the value. Values that follow
    from several sections are computed once.
    """

    run: sections.RunSection
    model: ModelSection
    attention: AttentionSection
    optimizer: OptimizerSection
    schedule: sections.ScheduleSection
    data: sections.DataSection
    parallel: sections.ParallelSection = sections.ParallelSection()
    precision: sections.PrecisionSection
    performance: sections.PerformanceSection = sections.PerformanceSection()
    checkpoint: sections.CheckpointSection
    stability: sections.StabilitySection = sections.StabilitySection()
    telemetry: sections.TelemetrySection = sections.TelemetrySection()
    deepspeed: sections.DeepSpeedSection = sections.DeepSpeedSection()

    @property
    def num_query_groups(self) -> int:
        """Return the key/value heads of a layer."""
        return self.model.num_query_groups or self.model.num_attention_heads

    @property
    def head_dim(self) -> int:
        """Return the width of one head."""
        return self.model.head_dim or self.model.hidden_size // self.model.num_attention_heads

    @property
    def ffn_hidden_size(self) -> int:
        """Return the inner width of the MLP."""
        return self.model.ffn_hidden_size or MLPS[self.model.mlp].width(self.model.hidden_size)

    @property
    def tokens_per_step(self) -> int:
        """Return the training tokens of one optimizer step, over all ranks."""
        return self.data.global_batch_size * self.data.sequence_length

    @property
    def total_steps(self) -> int:
        """Return the optimizer steps of the run.

        They are schedule.steps, or the fewest that reach schedule.tokens or schedule.flops.
        """
        if self.schedule.steps is not None:
            return self.schedule.steps
        if self.schedule.flops is not None:
            return self._steps_of_flops
        tokens = self.schedule.tokens or 0
        return -(-tokens // self.tokens_per_step)

    @cached_property
    def _steps_of_flops(self) -> int:
        """Return the fewest steps that execute schedule.flops, found by bisection."""
        # Bisection holds because FLOPs rise with the steps: one more step can move another into a
        # cheaper phase at most once for each layer, which saves a small part of a step.
        target = -(-(self.schedule.flops or 0) // self.tokens_per_step)
        costs = self._flops_of_phases
        lengths = range(1, min(LARGEST, -(-target // min(costs))) + 1)
        flops = partial(executed_flops_of_steps, costs, self.policy)
        index = bisect_left(lengths, target, key=flops)
        return lengths[min(index, len(lengths) - 1)]  # of a length that is refused later

    @property
    def total_flops(self) -> int:
        """Return the FLOPs that the whole run executes, without recomputation."""
        return self.tokens_per_step * executed_flops_of_steps(
            self._flops_of_phases, self.policy, self.total_steps
        )

    @cached_property
    def _flops_of_phases(self) -> list[int]:
        """Return the FLOPs that a token costs in each phase."""
        return executed_flops_of_phases(self.shape, self.policy)

    @cached_property
    def given_weights(self) -> GivenWeights | None:
        """Return the file that the weights start from; None: they are drawn.

        Raises:
            UserError: there is no such file.
        """
        path = self.model.initial_weights
        if path is None:
            return None
        try:
            open_regular(path).close()
        except OSError as error:
            raise UserError(
                f"model.initial_weights={path} cannot be used: {error.strerror}; restore the file, "
                "or make it again with `python -m pretrain import`"
            ) from error
        return GivenWeights(path)

    @property
    def bank_seed(self) -> int:
        """Return the seed of the Query/Key bank."""
        return self.run.seed if self.attention.seed is None else self.attention.seed

    @property
    def data_seed(self) -> int:
        """Return the seed of the sample order."""
        return self.run.seed if self.data.seed is None else self.data.seed

    @property
    def sample_cache(self) -> Path:
        """Return the directory of sample orders, shared by all runs on the same data."""
        return self.data.cache_directory or self.run.directory / "sample_order"

    @property
    def run_path(self) -> Path:
        """Return the path of the run directory."""
        return self.run.directory / self.run.name

    @cached_property
    def run_directory(self) -> RunDirectory:
        """Return the run directory, with the names of its files."""
        return RunDirectory(self.run_path)

    @cached_property
    def trunk(self) -> RunDirectory | None:
        """Return the directory of the run that this one branches from."""
        source = self.schedule.branch_from
        return None if source is None else RunDirectory(source)

    def data_parallel_size(self, world_size: int) -> int:
        """Return the number of copies of the model among `world_size` ranks."""
        return world_size // self.parallel.tensor_model_parallel_size

    def gradient_accumulation_steps(self, world_size: int) -> int:
        """Return the forward passes of a rank in one optimizer step."""
        return self.data.global_batch_size // (
            self.data.micro_batch_size * self.data_parallel_size(world_size)
        )

    @cached_property
    def policy(self) -> QKPolicy:
        """Return the Query/Key policy: the variant with the axes given in `attention` replaced.

        Raises:
            MethodError: unknown variant, or axes that do not go together (never once `load` has
                judged them).
        """
        return policy_for(self.attention.variant, self.attention.given_axes())

    @cached_property
    def recipe(self) -> BankRecipe | ScoreRecipe | None:
        """Return the recipe of the Query/Key bank, or of the score matrices in its place.

        Nothing is drawn. None for variants whose queries and keys start like every other weight.

        Raises:
            MethodError: the policy is impossible at these sizes (never once `load` has judged
                them).
        """
        policy = self.policy
        if policy.synthesizer:
            return score_recipe(
                policy,
                seed=self.bank_seed,
                num_attention_heads=self.model.num_attention_heads,
                sequence_length=self.data.sequence_length,
            )
        return bank_recipe(
            policy,
            seed=self.bank_seed,
            hidden_size=self.model.hidden_size,
            head_dim=self.head_dim,
            num_attention_heads=self.model.num_attention_heads,
            num_query_groups=self.num_query_groups,
            given=self.given_weights,
        )

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """Return the training phases in order: one, unless attention.phases adds more."""
        sizes = self.model.num_layers, self.num_query_groups
        return phases_of(self.policy, sizes, self.total_steps)

    def phase_at(self, step: int) -> Phase:
        """Return the phase of optimizer step `step` (from 1); step 0 is the start of phase 0."""
        return next(phase for phase in reversed(self.phases) if phase.first_step <= max(1, step))

    @cached_property
    def inventories(self) -> tuple[tuple[Tensor, ...], ...]:
        """Return the tensors of the whole model, by the number of the training phase."""
        return tuple(tensors(self.shape, self.policy, phase.number) for phase in self.phases)

    @property
    def fullest_phase(self) -> int:
        """Return the number of the phase in which most weights train, the last of equal ones."""
        trained = [sum(t.elements for t in inventory if t.trains) for inventory in self.inventories]
        return max(range(len(trained)), key=lambda number: (trained[number], number))

    @property
    def ever_trained(self) -> tuple[Tensor, ...]:
        """Return the tensors that train in some phase of the run, each once, in their order."""
        trained = (
            tensor for inventory in self.inventories for tensor in inventory if tensor.trains
        )
        return tuple({tensor.name: tensor for tensor in trained}.values())

    @property
    def embedding_rows(self) -> int:
        """Return the rows of the embedding: a multiple of model.vocab_multiple."""
        return self.model.vocab_size + -self.model.vocab_size % self.model.vocab_multiple

    @cached_property
    def shape(self) -> ModelShape:
        """Return the sizes that parameter and FLOP counts depend on."""
        return ModelShape(
            num_layers=self.model.num_layers,
            hidden_size=self.model.hidden_size,
            num_attention_heads=self.model.num_attention_heads,
            num_query_groups=self.num_query_groups,
            head_dim=self.head_dim,
            ffn_hidden_size=self.ffn_hidden_size,
            vocab_size=self.embedding_rows,
            sequence_length=self.data.sequence_length,
            learned_positions=self.model.position_embedding == "learned",
            tied_embeddings=self.model.tied_embeddings,
            norm=self.model.norm,
            mlp=self.model.mlp,
            qk_norm=self.model.qk_norm,
        )

    @cached_property
    def values(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the tree as plain values, with unset keys filled in.

        Parsing them gives the same run. Not to be changed: `as_dict` returns a copy for that.
        """
        values: dict[str, dict[str, Any]] = self.model_dump(mode="json")
        values["model"].update(
            num_query_groups=self.num_query_groups,
            head_dim=self.head_dim,
            ffn_hidden_size=self.ffn_hidden_size,
        )
        values["attention"].update(seed=self.bank_seed, **written_axes(self.policy))
        values["data"]["seed"] = self.data_seed
        return values

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Return a copy of `values`, to change and to parse again."""
        return {section: deepcopy(dict(keys)) for section, keys in self.values.items()}

    def to_yaml(self) -> str:
        """Return `values` as YAML that `load_config` reads back."""
        return dump_yaml(self.values)
