"""The sections of the configuration tree: names, types, ranges, meanings, records of the keys.

Checks of one section stand here; checks across sections stand in `refusals`. Every section is
frozen and rejects unknown keys. The sections of attention, model and optimizer are in files of
these names, the types of values are in `types`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from pretrain.config.types import (
    SEED_MAX,
    Int,
    LargeInt,
    NameOrPath,
    Names,
    OnResume,
    PathLike,
    Section,
    Setting,
    as_tuple,
    setting,
)
from pretrain.ranks.devices import Device

NO_EFFECT = Setting(OnResume.NO_EFFECT)
EFFECTIVE = Setting(OnResume.EFFECTIVE)
ROUNDING = Setting(OnResume.EFFECTIVE, note="the same numbers up to rounding")
ANOTHER_LAYOUT = Setting(OnResume.EFFECTIVE, note="another ZeRO stage is another layout too")
LAYOUT = Setting(OnResume.LAYOUT)
MODEL = Setting(OnResume.REFUSED, identity=True, method=True, hparam=True)
SHAPE = replace(MODEL, shape=True)
TRAINING = Setting(OnResume.EFFECTIVE, method=True, hparam=True)
EVERY_STEP = replace(TRAINING, trunk=True)
SAMPLES = replace(MODEL, data_change=True)
SHARDS = Setting(
    OnResume.REFUSED,
    note="compared by what the shards hold",
    data_change=True,
    hparam=True,
)
LOADING = Setting(OnResume.NO_EFFECT, noted=False, hparam=True)
UNNOTED = Setting(OnResume.EFFECTIVE, noted=False)
CURVES = Setting(OnResume.EFFECTIVE, only_records=True)
RECORDS = replace(CURVES, noted=False)
UNNOTED_NO_EFFECT = Setting(OnResume.NO_EFFECT, noted=False)


class RunSection(Section):
    """Name, place, seed and device of the run."""

    name: str = setting(
        ...,
        "Name of the run; its files are in run.directory/run.name.",
        UNNOTED_NO_EFFECT,
        pattern=r"^[^./\\\s\p{Cc}\p{Cf}][^/\\\s\p{Cc}\p{Cf}]*$",
    )
    directory: PathLike = setting(Path("runs"), "Directory that holds the runs.", UNNOTED_NO_EFFECT)
    seed: LargeInt = setting(
        1234,
        "Seed of initial weights and dropout; default of attention.seed and data.seed.",
        Setting(OnResume.REFUSED, noted=False, identity=True, hparam=True),
        ge=0,
        le=SEED_MAX,
    )
    device: Device = setting(
        "auto",
        "auto: GPUs where the machine has any and CUDA_VISIBLE_DEVICES is not empty, else the "
        "CPU; an error if torch cannot use the machine's GPUs.",
        UNNOTED,
    )
    deterministic: bool = setting(
        False,
        "On GPUs, use deterministic operations only (slower); the CPU is always deterministic.",
        UNNOTED,
    )


class ScheduleSection(Section):
    """Length of the run and shape of its learning rate."""

    steps: Int | None = setting(
        None,
        "Optimizer steps of the whole run; give this, tokens or flops.",
        replace(TRAINING, excludes=("tokens", "flops")),
        ge=1,
    )
    tokens: Int | None = setting(
        None,
        "Training tokens of the whole run, rounded up to whole steps.",
        replace(TRAINING, excludes=("steps", "flops")),
        ge=1,
    )
    flops: LargeInt | None = setting(
        None,
        "Executed FLOPs of the whole run, without recomputation, rounded up to whole steps.",
        replace(TRAINING, excludes=("steps", "tokens")),
        ge=1,
    )
    kind: Literal["cosine", "cosine_restarts", "polynomial", "constant", "wsd"] = setting(
        ...,
        "Shape of the learning rate after warmup; wsd: constant, then schedule.decay.",
        EVERY_STEP,
    )
    warmup_steps: Int = setting(..., "Steps of linear warmup.", EVERY_STEP, ge=0)
    min_ratio: float = setting(
        0.1,
        "Final learning rate as a fraction of the peak (not for constant).",
        TRAINING,
        ge=0,
        le=1,
    )
    cycles: Int = setting(1, "Cosine cycles after warmup (cosine_restarts only).", TRAINING, ge=1)
    power: float = setting(
        1.0, "Exponent of the decay (polynomial only); 1 is linear.", TRAINING, gt=0
    )
    decay: float = setting(
        0.2,
        "Fraction of the run in which the learning rate decays linearly (wsd only).",
        TRAINING,
        ge=0,
        le=1,
    )
    branch_from: PathLike | None = setting(
        None,
        "Run directory to branch from, at its newest checkpoint before this run's decay (wsd "
        "only); ignored once the run has a checkpoint of its own.",
        Setting(OnResume.NO_EFFECT, noted=False, hparam=True),
    )

    @model_validator(mode="after")
    def _consistent(self) -> ScheduleSection:
        lengths = {"steps": self.steps, "tokens": self.tokens, "flops": self.flops}
        set_lengths = [f"{key} ({value})" for key, value in lengths.items() if value is not None]
        if len(set_lengths) != 1:
            problem = f"{' and '.join(set_lengths)} are set" if set_lengths else "none is set"
            raise ValueError(
                f"schedule.steps, schedule.tokens, schedule.flops: {problem}; give exactly one"
            )
        needed = {
            "cycles": "cosine_restarts",
            "power": "polynomial",
            "decay": "wsd",
            "branch_from": "wsd",
        }
        for key, kind in needed.items():
            value = getattr(self, key)
            if self.kind != kind and value != type(self).model_fields[key].default:
                raise ValueError(
                    f"schedule.{key}={value} has no effect with schedule.kind={self.kind}; use "
                    f"kind {kind}"
                )
        return self


class BlendEntry(Section):
    """A shard directory of a blend."""

    directory: PathLike = Field(description="Shard directory.")
    weight: float = Field(gt=0, description="Its share of the samples, in any unit.")
    sources: dict[str, Annotated[float, Field(gt=0)]] | None = Field(
        default=None,
        min_length=1,
        description="Weights of its sources; unset: all of them, in proportion to their tokens.",
    )


class DataSection(Section):
    """Training and held-out samples."""

    directory: PathLike | None = setting(
        None,
        "Shard directory, from `python -m data_pipeline tokenize`; its sources are sampled in "
        "proportion to their tokens. Give this or blend.",
        replace(SHARDS, noted=False, excludes=("blend",)),
    )
    blend: Annotated[tuple[BlendEntry, ...], BeforeValidator(as_tuple)] | None = setting(
        None,
        "Several shard directories, or weighted sources: [{directory, weight, sources}, ...].",
        replace(SHARDS, method=True, excludes=("directory",)),
        min_length=1,
    )
    sequence_length: Int = setting(
        ..., "Context length: tokens per sample that the model predicts.", SAMPLES, ge=1
    )
    micro_batch_size: Int = setting(
        ...,
        "Samples per forward pass of one data-parallel rank.",
        Setting(OnResume.LAYOUT, hparam=True),
        ge=1,
    )
    global_batch_size: Int = setting(
        ..., "Samples per optimizer step, over all ranks.", MODEL, ge=1
    )
    validate_every: Int = setting(
        ...,
        "Steps between validations; 0: only at the end.",
        replace(CURVES, hparam=True),
        ge=0,
    )
    validation_samples: Int = setting(
        ..., "Validation samples per source (at most).", TRAINING, ge=1
    )
    seed: LargeInt | None = setting(
        None,
        "Seed of the sample order; unset: run.seed.",
        Setting(OnResume.REFUSED, hparam=True, identity=True, data_change=True, noted=False),
        ge=0,
        le=SEED_MAX,
    )
    reset_at_document_end: bool = setting(
        False,
        "Mask attention across document boundaries (intra-document masking): positions restart at "
        "each document, and no loss is counted across.",
        SAMPLES,
    )
    loader_workers: Int = setting(
        0, "Prefetching threads per rank; 0: no prefetching.", LOADING, ge=0
    )
    cache_directory: PathLike | None = setting(
        None, "Cache of sample orders; unset: sample_order in run.directory.", LOADING
    )
    allow_change: bool = setting(
        False,
        "Allow a resume to change the data, its blend, data.seed or the sequence length.",
        LOADING,
    )

    @model_validator(mode="after")
    def _consistent(self) -> DataSection:
        if (self.directory is None) == (self.blend is None):
            problem = "neither is set" if self.directory is None else "both are set"
            raise ValueError(
                f"data.directory and data.blend: {problem}; give exactly one (the other null)"
            )
        return self


class ParallelSection(Section):
    """Layout over ranks."""

    tensor_model_parallel_size: Int = setting(
        1, "Tensor-parallel ranks that share one copy of the model.", LAYOUT, ge=1
    )
    sequence_parallel: bool = setting(
        False,
        "Sequence parallelism: also split norms and residuals over tensor-parallel ranks.",
        LAYOUT,
    )
    timeout_seconds: Int = setting(
        600,
        "Seconds after which a collective that hangs ends the run.",
        NO_EFFECT,
        ge=1,
    )


class PrecisionSection(Section):
    """Types of numbers."""

    dtype: Literal["fp32", "bf16"] = setting(
        ..., "Compute type; with bf16 the optimizer keeps fp32 master weights.", MODEL
    )
    grad_accum_dtype: Literal["fp32", "bf16"] = setting(
        "fp32",
        "Type of gradients accumulated over micro batches and reduced over ranks.",
        MODEL,
    )

    @model_validator(mode="after")
    def _consistent(self) -> PrecisionSection:
        if self.dtype == "fp32" and self.grad_accum_dtype == "bf16":
            raise ValueError(
                "precision.grad_accum_dtype=bf16 would round the gradients of "
                "precision.dtype=fp32; use fp32"
            )
        return self


class PerformanceSection(Section):
    """Ways to compute a step that give the same result up to rounding."""

    overlap_reduction: bool = setting(
        True,
        "Overlap the gradient reduction with the backward pass where DeepSpeed does not: ZeRO "
        "stage 0 in fp32, stage 1 in bf16.",
        Setting(
            OnResume.EFFECTIVE, note="the same sums; over three ranks and more in another order"
        ),
    )
    reduced_precision_reduction: bool = setting(
        False,
        "On GPUs, allow reduced-precision (bf16) reductions inside split bf16 matmuls.",
        EFFECTIVE,
    )
    cross_entropy: Literal["in_place", "chunked", "megatron"] = setting(
        "in_place",
        "Logits of the loss. in_place: kept in precision.dtype; chunked: computed in chunks, "
        "twice; megatron: materialized in fp32.",
        ROUNDING,
    )
    compile: Literal["auto", "layers", "none"] = setting(
        "auto",
        "torch.compile of each layer and the loss. auto: on GPUs, but not under ZeRO stage 3 nor "
        "with recompute=query_key.",
        Setting(
            OnResume.EFFECTIVE, note="the same numbers up to rounding, but for the masks of dropout"
        ),
    )
    document_attention: Literal["flash", "mask"] = setting(
        "flash",
        "How data.reset_at_document_end computes attention. flash: within each document, if a "
        "kernel can (on GPUs in bf16); mask: over all pairs of a sample.",
        ROUNDING,
    )
    recompute: Literal["none", "query_key", "attention", "full"] = setting(
        "none",
        "Activation checkpointing. query_key: queries and keys of a structured bank; attention: "
        "attention with its norm; full: whole layers.",
        NO_EFFECT,
    )

    def compiles(self, on_cuda: bool, zero_stage: int) -> bool:
        """Return whether layers run compiled, with `auto` resolved for a device and ZeRO stage."""
        possible = on_cuda and zero_stage < 3 and self.recompute != "query_key"
        return possible if self.compile == "auto" else self.compile == "layers"


class CheckpointSection(Section):
    """Saving, and reading at a resume."""

    every: Int = setting(..., "Steps between checkpoints; 0: only at the end.", RECORDS, ge=0)
    keep_last: Int = setting(
        2,
        "Complete checkpoints to keep; those at a multiple of `every` are kept before others.",
        RECORDS,
        ge=1,
    )
    asynchronous: bool = setting(
        True,
        "Copy to host memory, and write in the background.",
        UNNOTED_NO_EFFECT,
    )
    verify: Literal["full", "size"] = setting(
        "full",
        "Checks of a checkpoint's files at a resume. full: sizes and SHA-256; size: sizes only.",
        UNNOTED_NO_EFFECT,
    )
    fall_back: bool = setting(
        False,
        "Rename a damaged or incomplete newest checkpoint and resume from the one before; else "
        "stop.",
        UNNOTED_NO_EFFECT,
    )
    export_at_end: bool = setting(
        False,
        "Export the finished run's model for transformers, into RUN/exports.",
        UNNOTED_NO_EFFECT,
    )


class StabilitySection(Section):
    """Reaction to non-finite and spiking losses."""

    max_skipped: Int = setting(
        3,
        "Stop after this many consecutive skipped updates (non-finite or spiking numbers).",
        EFFECTIVE,
        ge=1,
    )
    spike_factor: float | None = setting(
        None,
        "Skip an update whose loss or gradient norm is more than this many standard deviations "
        "above its running mean; unset: only non-finite ones are skipped.",
        replace(EFFECTIVE, trunk=True),
        gt=0,
    )


class ProfileSection(Section):
    """Steps that are profiled."""

    at: Int = Field(default=20, ge=1, description="First step to profile.")
    steps: Int = Field(default=3, ge=1, description="Steps to profile.")
    ranks: Literal["first", "all"] = Field(
        default="first", description="Profile rank 0, or every rank."
    )


class TelemetrySection(Section):
    """Records of the run."""

    every: Int = setting(1, "Steps between records.", CURVES, ge=1)
    tensorboard: bool = setting(
        True, "Write TensorBoard event files beside metrics.jsonl.", RECORDS
    )
    wandb: bool = setting(False, "Also log to Weights & Biases (extra `wandb`).", RECORDS)
    variance_window: Int = setting(
        100, "Steps over whose records stability/loss_variance is taken.", CURVES, ge=2
    )
    attention_every: Int = setting(
        0,
        "Steps between measurements of each layer's attention (entropy, scale, largest score) on "
        "one held-out sample; 0: none.",
        RECORDS,
        ge=0,
    )
    weights_every: Int = setting(
        0,
        "Steps between measurements of the norms of weights and their updates; 0: none.",
        RECORDS,
        ge=0,
    )
    spectral_norms: Names = setting(
        (),
        "Name patterns of the matrices whose largest singular value is measured too; * stands "
        "for any text, as in '*.linear_proj.weight'.",
        RECORDS,
    )
    sample_prompts: Names = setting(
        (),
        "Prompts that the model continues at every validation, on TensorBoard's page TEXT.",
        RECORDS,
        max_length=8,
    )
    sample_tokens: Int = setting(
        48, "Tokens to generate per prompt, each by a forward pass.", RECORDS, ge=1
    )
    profile: ProfileSection | None = setting(
        None,
        "Steps to profile into RUN/profile: {at: 20, steps: 3, ranks: first}; null: none.",
        UNNOTED_NO_EFFECT,
    )


class DeepSpeedSection(Section):
    """DeepSpeed's own settings."""

    config: NameOrPath = setting(
        "auto",
        "DeepSpeed JSON: a name in ds_configs, or a path ending in .json; auto: zero0 in fp32 "
        "where splitting the optimizer state would save a rank at most 1 GiB, else zero1.",
        ANOTHER_LAYOUT,
        min_length=1,
    )
    overrides: dict[str, Any] = setting({}, "Keys merged into the DeepSpeed JSON.", ANOTHER_LAYOUT)
