"""Refusals: combinations of configuration values that cannot work, before any process group exists.

Each message is one sentence that names the keys and their values. `load` calls `check_tree` on
every `Config` it makes; `layout_refusals` has what depends on ranks or DeepSpeed's settings.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from fnmatch import fnmatchcase
from importlib.util import find_spec

from data_pipeline.errors import how_to_install
from data_pipeline.io.forms import LARGEST
from megatron_patches.errors import MethodError
from megatron_patches.recipe.optimizers import Muon
from megatron_patches.recipe.phases import check_phases
from megatron_patches.recipe.tensors import is_patched
from pretrain.config.schedule import last_stable_step
from pretrain.config.sources import override_text
from pretrain.config.tree import Config
from pretrain.errors import UserError


def check_tree(config: Config) -> None:
    """Refuse contradictions between sections.

    Raises:
        UserError: shapes, parallel sizes, schedule or batch sizes do not go together.
        MethodError: the Query/Key policy is unknown or impossible at these sizes.
    """
    _check_names(config)
    _check_heads(config)
    _check_tensor_parallel(config)
    _check_schedule(config)
    batch, micro_batch = config.data.global_batch_size, config.data.micro_batch_size
    _check_divides("data.global_batch_size", batch, "data.micro_batch_size", micro_batch)
    _check_query_key(config)
    _check_qk_norm(config)
    _check_qk_clip(config)
    _check_z_loss(config)
    _check_factors(config)
    _check_muon(config)
    _check_recompute(config)
    _check_telemetry(config)
    _check_initial_weights(config)


def _check_divides(name: str, value: int, by_name: str, by: int) -> None:
    if value % by:
        raise UserError(f"{name}={value} is not divisible by {by_name}={by}; change one of them")


def _check_heads(config: Config) -> None:
    model = config.model
    heads = model.num_attention_heads
    if model.head_dim is None and model.hidden_size % heads:
        raise UserError(
            f"model.hidden_size={model.hidden_size} is not divisible by "
            f"model.num_attention_heads={heads}; change one of them or set model.head_dim"
        )
    _check_divides(
        "model.num_attention_heads", heads, "model.num_query_groups", config.num_query_groups
    )
    if model.position_embedding == "rope" and config.head_dim % 2:
        raise UserError(
            f"model.position_embedding=rope rotates pairs and needs an even model.head_dim, "
            f"not {config.head_dim}; change model.head_dim or use learned positions"
        )


def _check_tensor_parallel(config: Config) -> None:
    key, size = "parallel.tensor_model_parallel_size", config.parallel.tensor_model_parallel_size
    if config.num_query_groups < size:
        raise UserError(
            f"model.num_query_groups={config.num_query_groups} is smaller than {key}={size}: "
            "every tensor-parallel rank needs a key/value head of its own; use a smaller "
            "tensor-parallel size"
        )
    _check_divides("model.num_attention_heads", config.model.num_attention_heads, key, size)
    _check_divides("model.num_query_groups", config.num_query_groups, key, size)
    rows = config.embedding_rows
    padding = " up to a multiple of model.vocab_multiple" * (rows > config.model.vocab_size)
    _check_divides(f"model.vocab_size{padding}", rows, key, size)
    if (rows - config.model.vocab_size) * size >= rows:
        raise UserError(
            f"model.vocab_multiple={config.model.vocab_multiple} leaves a tensor-parallel rank "
            f"without any of the {config.model.vocab_size} tokens; use a smaller multiple"
        )
    _check_divides("model.ffn_hidden_size", config.ffn_hidden_size, key, size)
    if config.parallel.sequence_parallel:
        if size == 1:
            raise UserError(
                f"parallel.sequence_parallel=true has nothing to split at {key}=1; set it to false"
            )
        with_sequence = f"{key} (with parallel.sequence_parallel)"
        _check_divides("data.sequence_length", config.data.sequence_length, with_sequence, size)


def _check_names(config: Config) -> None:
    """Refuse a run directory whose name has no encoding in this system's file names."""
    try:
        os.fsencode(config.run_path)
    except UnicodeEncodeError as error:
        raise UserError(
            f"run.directory and run.name make '{config.run_path}', which has no name in this "
            f"system's encoding of files, {error.encoding}; use other letters, or set "
            "LC_ALL=C.UTF-8"
        ) from None


def _check_schedule(config: Config) -> None:
    schedule, total = config.schedule, config.total_steps
    length = f"the {total} steps of the run"
    for key, value in (("tokens", schedule.tokens), ("flops", schedule.flops)):
        if value is not None:
            length += f" (schedule.{key}={value} at {config.tokens_per_step} tokens a step)"
    if total >= LARGEST:
        raise UserError(f"{length}: more than 2^53, and no run has that many; give fewer")
    decay = total - last_stable_step(schedule, total) if schedule.kind == "wsd" else 0
    if schedule.warmup_steps + decay > total:
        also = f"and the {decay} steps of schedule.decay={schedule.decay} are" if decay else "is"
        raise UserError(
            f"schedule.warmup_steps={schedule.warmup_steps} {also} more than {length}; warm up for "
            "fewer"
        )
    decay = total - schedule.warmup_steps
    if schedule.kind == "cosine_restarts" and schedule.cycles > max(decay, 1):
        raise UserError(
            f"schedule.cycles={schedule.cycles} is more than the {decay} steps after warmup; use "
            "fewer cycles"
        )


def _check_query_key(config: Config) -> None:
    """Let the method judge its own policy; building the recipe draws nothing."""
    policy = config.policy
    frozen = policy.frozen_groups(config.model.num_layers, config.num_query_groups)
    if not policy.trainable and not policy.synthesizer and not any(frozen):
        raise UserError(
            "attention.frozen_heads freezes no head; use attention.variant=vanilla for that"
        )
    check_phases(
        policy.phases,
        begins=policy.trained_from(config.model.num_layers, config.num_query_groups),
        ends=policy.kept_from(config.model.num_layers, config.num_query_groups),
        total_steps=config.total_steps,
    )
    try:
        _ = config.recipe
    except MethodError as error:
        raise UserError(f"attention.variant={config.attention.variant}: {error}") from None


def _check_qk_norm(config: Config) -> None:
    if config.model.qk_norm and config.policy.synthesizer:
        raise UserError(
            "model.qk_norm=true normalises queries and keys, which attention.variant="
            f"{config.attention.variant} does not have; set it to false"
        )


def _check_qk_clip(config: Config) -> None:
    limit, policy, shape = config.optimizer.qk_clip, config.policy, config.shape
    if limit is None:
        return
    if shape.qk_norm:
        raise UserError(
            f"optimizer.qk_clip={limit:g} scales W_Q and W_K, which the norm of queries and keys "
            "undoes; leave qk_clip out"
        )
    frozen = policy.frozen_groups(shape.num_layers, shape.num_query_groups)
    if policy.synthesizer or any(is_patched(policy, groups) for groups in frozen):
        raise UserError(
            f"optimizer.qk_clip={limit:g} scales W_Q and W_K where both train as whole matrices "
            f"without adapters, unlike attention.variant={config.attention.variant} as it is set; "
            "use vanilla or orthogonal_trainable alone, or leave it out"
        )


def _check_z_loss(config: Config) -> None:
    if config.model.z_loss and config.performance.cross_entropy == "megatron":
        raise UserError(
            f"model.z_loss={config.model.z_loss:g} with performance.cross_entropy=megatron: that "
            "form has no z-loss; set performance.cross_entropy=in_place or chunked"
        )


def matching(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return the patterns that match a name beyond those matched by the patterns before them."""
    left = set(names)
    matching_patterns = []
    for pattern in patterns:
        newly_matched = {name for name in left if fnmatchcase(name, pattern)}
        matching_patterns += [pattern] * bool(newly_matched)
        left -= newly_matched
    return matching_patterns


def names_for_factors(config: Config) -> dict[str, list[str]]:
    """Return {key of the optimizer: names of the weights that its patterns may match}."""
    trained = config.ever_trained
    return {
        "learning_rate_factors": [tensor.name for tensor in trained],
        "weight_decay_factors": [tensor.name for tensor in trained if tensor.decays],
    }


def _check_factors(config: Config) -> None:
    """Refuse a pattern that matches no weight beyond those of the patterns before it."""
    kinds = {"learning_rate_factors": "trained", "weight_decay_factors": "decayed"}
    if not any(getattr(config.optimizer, key) for key in kinds):
        return  # collecting the names is a large part of all checks
    for key, names in names_for_factors(config).items():
        patterns = getattr(config.optimizer, key)
        matching_patterns = matching(patterns, names)
        for pattern in patterns:
            if pattern not in matching_patterns:
                raise UserError(
                    f"optimizer.{key}: '{pattern}' matches no {kinds[key]} weight beyond those of "
                    "the patterns before it; weights have names such as "
                    f"{config.ever_trained[0].name}"
                )


def _check_muon(config: Config) -> None:
    """Refuse a rate for a weight that does not exist, and a penalty that Muon would rescale."""
    optimizer = config.optimizer
    if optimizer.kind == "muon" and config.policy.penalty:
        raise UserError(
            f"attention.variant={config.attention.variant} with optimizer.kind=muon: the update "
            "of a matrix has the same size for any attention.penalty; use kind adamw, or another "
            "variant"
        )
    of_kind = optimizer.of_kind
    if not isinstance(of_kind, Muon) or not config.model.tied_embeddings:
        return
    if of_kind.output_learning_rate is not None:
        raise UserError(
            f"optimizer.muon.output_learning_rate={of_kind.output_learning_rate} but the output "
            "layer has the weight of the embeddings; set optimizer.muon.embedding_learning_rate, "
            "or model.tied_embeddings=false"
        )


def _check_recompute(config: Config) -> None:
    if config.performance.recompute != "query_key":
        return
    policy = config.policy
    if config.model.qk_norm or config.data.reset_at_document_end:
        key = "model.qk_norm" if config.model.qk_norm else "data.reset_at_document_end"
        raise UserError(
            f"performance.recompute=query_key saves no memory with {key}, whose backward pass "
            "keeps queries and keys; set performance.recompute=attention"
        )
    if not policy.only_frozen_factors:
        variant = config.attention.variant + " with adapters" * bool(policy.adapters)
        raise UserError(
            "performance.recompute=query_key makes queries and keys again from frozen factors "
            f"alone, which attention.variant={variant} does not have; use variant monarch without "
            "adapters, or performance.recompute=attention"
        )
    if config.performance.compile == "layers":
        raise UserError(
            "performance.recompute=query_key is not possible in compiled layers; set "
            "performance.compile=none, or performance.recompute=attention"
        )


def _check_telemetry(config: Config) -> None:
    """Check the profiled steps, and what can be checked of prompts without a tokenizer."""
    section, length = config.telemetry, config.data.sequence_length
    profile = section.profile
    if profile is not None and profile.at + profile.steps - 1 > config.total_steps:
        raise UserError(
            f"telemetry.profile: {profile.steps} steps from step {profile.at} on do not fit into "
            f"the {config.total_steps} steps of the run; set at or steps lower"
        )
    _check_spectral_norms(config)
    if not section.sample_prompts:
        return
    if not section.tensorboard:
        raise UserError(
            "telemetry.sample_prompts are continued for TensorBoard only, and "
            "telemetry.tensorboard=false; set it to true, or leave the prompts out"
        )
    if section.sample_tokens >= length:
        raise UserError(
            f"telemetry.sample_tokens={section.sample_tokens} leaves no room for a prompt in "
            f"data.sequence_length={length}; lower it"
        )
    for number, text in enumerate(section.sample_prompts):
        if not text:
            raise UserError(
                f"telemetry.sample_prompts.{number} is empty; give it some text, or leave it out"
            )


def _check_spectral_norms(config: Config) -> None:
    patterns = config.telemetry.spectral_norms
    if patterns and not config.telemetry.weights_every:
        raise UserError(
            "telemetry.spectral_norms are measured every telemetry.weights_every steps, which is "
            "0; set it, or leave the patterns out"
        )
    names = [tensor.name for tensor in config.ever_trained if len(tensor.shape) == 2]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UserError(
                f"telemetry.spectral_norms: '{pattern}' matches no trained matrix; matrices have "
                f"names such as {names[0]}"
            )


def _check_initial_weights(config: Config) -> None:
    """Refuse a file of initial weights for another model than the configuration describes."""
    weights = config.given_weights
    if weights is None:
        return
    described = config.values["model"]
    for key, value in weights.model.items():
        if key == "max_positions":
            if config.data.sequence_length > value:
                raise UserError(
                    f"data.sequence_length={config.data.sequence_length} but the model in "
                    f"{weights.path} has {value} learned positions; set "
                    f"data.sequence_length={value} or less"
                )
        elif key == "vocab_size" and described[key] <= value:
            continue  # a model may have rows to spare, above the ids of its tokenizer
        elif described.get(key) != value:
            raise UserError(
                f"model.{key}={described.get(key)} but the model in {weights.path} has {value}; "
                f"set {override_text(f'model.{key}', value)}"
            )


def require_wandb() -> None:
    """Refuse telemetry.wandb where wandb cannot be imported.

    Raises:
        UserError: wandb is not installed.
    """
    # A directory of that name, as wandb writes beside a run, is found too, but has no origin.
    spec = find_spec("wandb")
    if spec is None or spec.origin is None:
        raise UserError(
            "telemetry.wandb=true but the package wandb is not installed; "
            f"{how_to_install('wandb')}, or set telemetry.wandb=false"
        )
