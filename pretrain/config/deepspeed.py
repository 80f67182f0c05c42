"""The settings for DeepSpeed: a JSON file, the user's overrides, and this program's own keys.

Relies on DeepSpeed 0.19: its key names, and its data types at each ZeRO stage (see
`ds_configs/README.md`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from data_pipeline.io.files import hash_file, read_regular
from data_pipeline.io.forms import parse_json
from megatron_patches.recipe.optimizers import checkpoint_bytes, state_bytes
from pretrain.config.sources import did_you_mean, is_file, shipped_files
from pretrain.config.tree import Config
from pretrain.errors import UserError

STAGES = range(4)
"""Stages of ZeRO."""
AUTO = "auto"
"""The value of `deepspeed.config` that leaves the choice to `settings_name`."""
WHOLE_STATE_BYTES = 2**30
"""`auto` takes a rank's whole fp32 optimizer state where splitting saves at most this: 1 GiB."""

# Top-level keys that DeepSpeed reads and this program leaves to the user.
PASSED_ON = frozenset({
    "aio", "bf16", "checkpoint", "comet", "comms_logger", "communication_data_type",
    "csv_monitor", "data_types", "disable_allgather", "dump_state", "flops_profiler",
    "gradient_accumulation_steps", "gradient_clipping", "gradient_predivide_factor", "log_level",
    "memory_breakdown", "prescale_gradients", "steps_per_print", "tensorboard", "timers",
    "train_batch_size", "train_micro_batch_size_per_gpu", "wall_clock_breakdown", "wandb",
    "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "zero_optimization",
})  # fmt: skip

# Keys of DeepSpeed's ZeRO section; it takes those of stage 3 with and without "stage3_".
_STAGE3 = (
    "allgather_sequential", "gather_16bit_weights_on_model_save", "max_live_parameters",
    "max_reuse_distance", "model_persistence_threshold", "module_granularity_threshold",
    "param_persistence_threshold", "prefetch_bucket_size", "use_all_reduce_for_fetch_params",
)  # fmt: skip
ZERO_KEYS = frozenset({
    "allgather_bucket_size", "allgather_partitions", "compute_grad_norm", "contiguous_gradients",
    "cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory", "elastic_checkpoint",
    "enable_sanity_checks", "ignore_unused_parameters", "leaf_module", "legacy_stage1",
    "load_from_fp32_weights", "log_trace_cache_warnings", "memory_efficient_linear",
    "offload_optimizer", "offload_param", "overlap_comm", "override_module_apply",
    "parameter_alignment", "pipeline_loading_checkpoint", "reduce_bucket_size", "reduce_scatter",
    "round_robin_gradients", "save_muon_momentum_buffer_in_memory", "stage",
    "stage3_gather_fp16_weights_on_model_save", "sub_group_size", "use_multi_rank_bucket_allreduce",
    "zenflow", "zero_hpz_partition_size", "zero_quantized_gradients",
    "zero_quantized_nontrainable_weights", "zero_quantized_weights",
    *_STAGE3, *(f"stage3_{key}" for key in _STAGE3),
})  # fmt: skip

# Those of the top level that decide the numbers of a step; the others log, measure or write.
_NUMERIC = frozenset({
    "bf16", "communication_data_type", "data_types", "disable_allgather",
    "gradient_accumulation_steps", "gradient_clipping", "gradient_predivide_factor",
    "prescale_gradients", "train_batch_size", "train_micro_batch_size_per_gpu",
    "zero_allow_untested_optimizer", "zero_optimization",
})  # fmt: skip
_NO_EFFECT = (
    "seq_parallel_communication_data_type", "activation_checkpointing", "autotuning", "compile",
    "data_efficiency", "dataloader_drop_last", "datastates_ckpt", "expert_parallel",
    "hybrid_engine", "pipeline", "sequence_parallel_size", "use_data_before_expert_parallelism",
    "weight_quantization",
)  # fmt: skip
# Top-level keys that DeepSpeed reads and this program cannot honour, with the reason.
REFUSED = {
    "optimizer": "the optimizer is built from this program's section 'optimizer'; remove it",
    "scheduler": "the learning rate is set from this program's section 'schedule'; remove it",
    "fp16": "set precision.dtype, which knows fp32 and bf16; remove it",
    "bfloat16": "write it as 'bf16', or set precision.dtype; remove it",
    "torch_autocast": "precision.dtype sets the compute type; remove it",
    "tensor_parallel": "set parallel.tensor_model_parallel_size; remove it",
    "managed_gradient_accumulation": "the loop relies on DeepSpeed's own gradient accumulation; "
    "remove it",
    "gradient_allreduce_op": "gradients must be averaged over ranks, not summed; remove it",
    **dict.fromkeys(_NO_EFFECT, "this program's own loop and model would not use it; remove it"),
}

_OFFLOAD = (
    "offloading needs DeepSpeed's own CPU Adam and this program builds torch's AdamW; remove it"
)
_FP32_STATES = "the optimizer keeps fp32 weights and states; remove it"
_OWN_CHECKPOINTS = (
    "checkpoints are this program's own, and a run resumes at any layout from them; remove it"
)
# The same for keys inside a section: the one harmless value, and the reason for refusing any other.
REFUSED_INSIDE: dict[tuple[str, str], tuple[bool, str]] = {
    ("zero_optimization", "offload_optimizer"): (False, _OFFLOAD),
    ("zero_optimization", "offload_param"): (False, _OFFLOAD),
    ("zero_optimization", "cpu_offload"): (False, _OFFLOAD),
    ("zero_optimization", "cpu_offload_param"): (False, _OFFLOAD),
    ("zero_optimization", "zenflow"): (False, _OFFLOAD),
    ("zero_optimization", "compute_grad_norm"): (
        True,
        "the gradient norm is recorded at every step; remove it",
    ),
    ("zero_optimization", "elastic_checkpoint"): (False, _OWN_CHECKPOINTS),
    ("zero_optimization", "round_robin_gradients"): (
        False,
        "checkpoints and Muon need DeepSpeed's own order of the parameters; remove it",
    ),
    ("bf16", "bf16_master_weights_and_grads"): (False, _FP32_STATES),
    ("bf16", "bf16_optimizer_states"): (False, _FP32_STATES),
    ("checkpoint", "load_universal"): (False, _OWN_CHECKPOINTS),
}


def zero_stage(settings: Mapping[str, Any]) -> int:
    """Return the ZeRO stage (0 to 3) of settings for DeepSpeed.

    Raises:
        UserError: they name another stage.
    """
    stage = settings.get("zero_optimization", {}).get("stage", 0)
    if type(stage) is not int or stage not in STAGES:
        raise UserError(f"deepspeed: zero_optimization.stage is {stage!r}; it must be 0, 1, 2 or 3")
    return stage


def settings_name(config: Config, world_size: int) -> str:
    """Return the JSON of `ds_configs`, or the path, that `deepspeed.config` names; never `auto`.

    `auto` is the fastest that memory allows. In fp32 ZeRO-1 copies weights and gradients in every
    step, and saves AdamW's state beyond a rank's share; up to `WHOLE_STATE_BYTES` of that, it is
    left out. bf16 needs it for the fp32 master weights. A run that trains other weights on the way
    moves ZeRO's partitions, and a user who tunes ZeRO over several ranks wants ZeRO.

    Args:
        world_size: Ranks of the run, over all nodes.
    """
    section = config.deepspeed
    if section.config != AUTO:
        return section.config
    zero_overrides = section.overrides.get("zero_optimization", {})
    stage = zero_overrides.get("stage") if isinstance(zero_overrides, Mapping) else None
    if type(stage) is int and stage in STAGES:
        return f"zero{stage}"  # the file made for the stage that the user asks for
    tuned = bool(zero_overrides) and config.data_parallel_size(world_size) > 1
    whole = config.precision.dtype == "fp32" and not config.policy.phases and not tuned
    if whole and bytes_that_zero_saves(config, world_size) <= WHOLE_STATE_BYTES:
        return "zero0"
    return "zero1"


def bytes_that_zero_saves(config: Config, world_size: int) -> float:
    """Return the bytes of optimizer state that ZeRO stage 1 saves a rank in fp32.

    The value is below 0 where splitting costs more. Whole, the optimizer has the states of each
    parameter; split, a rank has its share of the states and of a master copy.
    """
    inventory, rules = config.inventories[0], config.optimizer.rules
    ranks = max(1, config.data_parallel_size(world_size))
    saved = state_bytes(inventory, rules) - checkpoint_bytes(inventory, rules) / ranks
    return saved / config.parallel.tensor_model_parallel_size


def deepspeed_settings(config: Config, world_size: int) -> dict[str, Any]:
    """Return the settings for DeepSpeed: the JSON with the overrides, and this program's own keys.

    DeepSpeed is not imported; `check_sections` lets it judge the values.

    Returns:
        The argument of `deepspeed.initialize(config=...)`.

    Raises:
        UserError: there is no such JSON, it is not JSON, a key is unknown to DeepSpeed, cannot be
            honoured by this program, or contradicts the rest of the configuration.
    """
    settings = _merge(_read(settings_name(config, world_size)), config.deepspeed.overrides)
    _check_keys(settings)
    for path, (value, ours) in _owned_keys(config, world_size).items():
        parent = settings
        for part in path[:-1]:
            parent = parent.setdefault(part, {})
        if parent.get(path[-1], value) != value:
            raise UserError(
                f"deepspeed key '{'.'.join(path)}' is {parent[path[-1]]!r} but {ours} gives "
                f"{value!r}; remove the key from the DeepSpeed settings"
            )
        parent[path[-1]] = value
    # Otherwise DeepSpeed rounds fp32 sums to bf16 for the reduction over data-parallel ranks.
    settings.setdefault("communication_data_type", config.precision.grad_accum_dtype)
    return settings


def _check_keys(settings: Mapping[str, Any]) -> None:
    """Refuse keys that DeepSpeed does not know, and those that this program cannot honour."""
    for key in settings:
        if key in REFUSED:
            raise UserError(f"deepspeed key '{key}': {REFUSED[key]}")
        if key not in PASSED_ON:
            hint = did_you_mean(key, sorted(PASSED_ON))
            raise UserError(f"deepspeed key '{key}' is not one that DeepSpeed knows{hint}")
    for section in ("zero_optimization", "bf16", "data_types", "checkpoint"):
        if not isinstance(settings.get(section, {}), Mapping):
            raise UserError(
                f"deepspeed key '{section}' is {settings[section]!r}; it must hold keys of its own"
            )
    zero = settings.get("zero_optimization", {})
    for key in zero:
        if key not in ZERO_KEYS:
            hint = did_you_mean(str(key), sorted(ZERO_KEYS), cutoff=0.6)
            raise UserError(
                f"deepspeed key 'zero_optimization.{key}' is not one that DeepSpeed knows{hint}"
            )
    for key in settings.get("data_types", {}).keys() - {"grad_accum_dtype"}:
        raise UserError(
            f"deepspeed key 'data_types.{key}' is not one that DeepSpeed knows; it knows "
            "grad_accum_dtype"
        )
    for key in ("reduce_bucket_size", "stage3_max_live_parameters"):  # which `plan` reads too
        value = zero.get(key, 0)
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise UserError(
                f"deepspeed key 'zero_optimization.{key}' is {value!r}; it must be a number, at "
                "least 0"
            )
    for (section, key), (harmless, reason) in REFUSED_INSIDE.items():
        if settings.get(section, {}).get(key) not in (None, harmless):
            raise UserError(f"deepspeed key '{section}.{key}': {reason}")


def check_sections(settings: Mapping[str, Any], mpu: Any) -> None:
    """Let DeepSpeed judge all sections, which would otherwise end as a traceback in every rank.

    Args:
        mpu: The parallel state, of which DeepSpeed reads the sizes.

    Raises:
        UserError: DeepSpeed rejects a key or a value.
    """
    from deepspeed.runtime.config import DeepSpeedConfig
    from pydantic import ValidationError

    try:
        DeepSpeedConfig(deepcopy(dict(settings)), mpu)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        reason = f"{error.title}: '{key}' is {first['input']!r}: {first['msg'].lower()}"
        raise UserError(f"deepspeed settings: {reason}; correct it") from None
    except Exception as error:  # an assertion or a KeyError, by section
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"deepspeed settings: DeepSpeed cannot read them ({reason:.300}); correct them"
        ) from error


def _owned_keys(config: Config, world_size: int) -> dict[tuple[str, ...], tuple[Any, str]]:
    """Return the keys that follow from the configuration: path -> (value, key that gives it)."""
    data = config.data
    return {
        ("train_batch_size",): (data.global_batch_size, "data.global_batch_size"),
        ("train_micro_batch_size_per_gpu",): (data.micro_batch_size, "data.micro_batch_size"),
        ("gradient_accumulation_steps",): (
            config.gradient_accumulation_steps(world_size),
            "data.global_batch_size with data.micro_batch_size and the number of data-parallel "
            "ranks",
        ),
        ("gradient_clipping",): (config.optimizer.gradient_clip, "optimizer.gradient_clip"),
        ("bf16", "enabled"): (
            config.precision.dtype == "bf16",
            f"precision.dtype={config.precision.dtype}",
        ),
        ("data_types", "grad_accum_dtype"): (
            config.precision.grad_accum_dtype,
            "precision.grad_accum_dtype",
        ),
    }


def without_side_effects(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings for DeepSpeed that neither write files nor send anything."""
    return {key: value for key, value in settings.items() if key in _NUMERIC}


def given_settings(name_or_path: str) -> dict[str, Any] | None:
    """Return the content of the file that `deepspeed.config` names; None for a shipped name.

    Raises:
        UserError: there is no such file, or it is not a JSON object.
    """
    shipped_names = (AUTO, *shipped_files("ds_configs", "*.json"))
    return None if name_or_path in shipped_names else _read(name_or_path)


def settings_digest(name_or_path: str) -> str | None:
    """Return the SHA-256 of the file that `deepspeed.config` names; None for a shipped name."""
    path = Path(name_or_path)
    return hash_file(path) if is_file(path) else None


def _read(name_or_path: str) -> dict[str, Any]:
    shipped = shipped_files("ds_configs", "*.json")
    path = shipped.get(name_or_path, Path(name_or_path))
    if not is_file(path):
        names = ", ".join([AUTO, *shipped])
        raise UserError(f"deepspeed.config '{name_or_path}' is neither a file nor one of: {names}")
    try:
        settings = parse_json(read_regular(path))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"deepspeed.config '{name_or_path}' is not readable JSON: {reason}"
        ) from None
    if not isinstance(settings, dict):
        raise UserError(f"deepspeed.config '{name_or_path}' must be a JSON object")
    return settings


def _merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `changes` laid over it, section by section, in a new dict."""
    merged = dict(base)
    for key, value in changes.items():
        if isinstance(value, Mapping):
            under = base.get(key)
            value = _merge(under if isinstance(under, Mapping) else {}, value)
        merged[key] = value
    return merged
