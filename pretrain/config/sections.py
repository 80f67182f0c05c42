"""The sections of the configuration tree: names, types, ranges, meanings.

Checks that need one section only live here; those across sections live in `refusals`. Every section is
frozen and rejects unknown keys. The attention section is in `attention`, the values' types are in `types`.

Sizes have upper bounds (`le`) far above anything that was ever trained: 2,048 layers, 4,096 heads, 2^20 wide,
2^24 tokens of context, of vocabulary and samples of a step, 10^9 steps, 10^16 tokens. They are there so that
a digit too many is refused at once; without them the program would compute for ever with it, or ask for more
memory than there is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from pretrain.config.types import SEED_MAX, Betas, FileName, Int, Names, PathLike, Section, as_tuple
from pretrain.ranks.devices import Device


class RunSection(Section):
    name: FileName = Field(
        pattern=r"^[^./\\\s][^/\\\s]*$", description="Name of the run: its directory's last part."
    )
    directory: PathLike = Field(default=Path("runs"), description="Directory that holds the runs.")
    seed: Int = Field(
        default=1234,
        ge=0,
        le=SEED_MAX,
        description="Seed of the initial weights and of dropout, and of what has no seed of its own.",
    )
    device: Device = Field(
        default="auto",
        description="auto: the GPUs; the CPU where the machine has none, or CUDA_VISIBLE_DEVICES is empty. "
        "A machine whose GPUs torch cannot use is refused unless this says cpu.",
    )
    deterministic: bool = Field(
        default=False,
        description="On GPUs: only operations that give the same bits in every run; slower. On the CPU "
        "all do.",
    )


class ModelSection(Section):
    num_layers: Int = Field(ge=1, le=2048, description="Transformer layers.")
    hidden_size: Int = Field(ge=1, le=2**20, description="Width of the residual stream.")
    num_attention_heads: Int = Field(ge=1, le=4096, description="Query heads of a layer.")
    num_query_groups: Int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="Key/value heads of a layer (grouped-query attention); unset: num_attention_heads.",
    )
    head_dim: Int | None = Field(
        default=None,
        ge=1,
        le=2**16,
        description="Width of one head; unset: hidden_size / num_attention_heads.",
    )
    ffn_hidden_size: Int | None = Field(
        default=None, ge=1, le=2**24, description="Inner width of the MLP; unset: 4 * hidden_size."
    )
    vocab_size: Int = Field(
        ge=2, le=2**24, description="Rows of the embedding; at least the tokenizer's vocabulary."
    )
    position_embedding: Literal["learned", "rope"] = Field(
        description="learned: a trained vector per position; rope: rotary embedding of queries and keys."
    )
    rotary_base: Int = Field(
        default=10000, ge=2, le=10**12, description="Base of the rotary frequencies (rope only)."
    )
    dropout: float = Field(
        default=0.1, ge=0, lt=1, description="Dropout of hidden states and of attention probabilities."
    )
    layernorm_epsilon: float = Field(default=1e-5, gt=0, description="Added to the variance in LayerNorm.")
    init_std: float = Field(
        default=0.02,
        gt=0,
        description="Standard deviation of initial weights (output projections: / sqrt(2 * num_layers)).",
    )
    tied_embeddings: bool = Field(default=True, description="The output layer shares the embedding matrix.")
    initial_weights: PathLike | None = Field(
        default=None,
        description="File of `python -m pretrain import` that the weights start from; unset: drawn.",
    )


class OptimizerSection(Section):
    learning_rate: float = Field(
        gt=0, description="Peak learning rate of AdamW, reached at the end of warmup."
    )
    betas: Betas = Field(
        default=(0.9, 0.98), description="AdamW's decay rates of the first and second moment."
    )
    eps: float = Field(default=1e-8, gt=0, description="AdamW's epsilon.")
    weight_decay: float = Field(
        default=0.01, ge=0, description="Decoupled weight decay of matrices and embeddings (never of norms)."
    )
    gradient_clip: float = Field(
        default=1.0, ge=0, description="Largest global gradient norm; 0 switches clipping off."
    )


class ScheduleSection(Section):
    steps: Int | None = Field(
        default=None, ge=1, le=10**9, description="Optimizer steps of the whole run; give this or tokens."
    )
    tokens: Int | None = Field(
        default=None,
        ge=1,
        le=10**16,
        description="Training tokens of the whole run, rounded up to whole steps.",
    )
    kind: Literal["cosine", "cosine_restarts", "polynomial", "constant"] = Field(
        description="Shape of the learning rate after warmup."
    )
    warmup_steps: Int = Field(ge=0, description="Steps of linear warmup.")
    min_ratio: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Final learning rate as a fraction of the peak (not for constant).",
    )
    cycles: Int = Field(default=1, ge=1, description="Cosine cycles after warmup (cosine_restarts only).")
    power: float = Field(
        default=1.0, gt=0, description="Exponent of the decay (polynomial only); 1 is linear."
    )

    @model_validator(mode="after")
    def _consistent(self) -> ScheduleSection:
        if (self.steps is None) == (self.tokens is None):
            given = (
                "neither is set" if self.steps is None else f"both are set ({self.steps} and {self.tokens})"
            )
            raise ValueError(f"schedule.steps and schedule.tokens: {given}; give exactly one")
        if self.cycles != 1 and self.kind != "cosine_restarts":
            raise ValueError(
                f"schedule.cycles={self.cycles} has no effect with schedule.kind={self.kind}; "
                "use kind cosine_restarts"
            )
        if self.power != 1.0 and self.kind != "polynomial":
            raise ValueError(
                f"schedule.power={self.power} has no effect with schedule.kind={self.kind}; "
                "use kind polynomial"
            )
        return self


class BlendEntry(Section):
    """One shard directory of a blend."""

    directory: PathLike = Field(description="Shard directory with a manifest.json.")
    weight: float = Field(gt=0, description="Its part of the samples, in any unit.")
    sources: dict[str, Annotated[float, Field(gt=0)]] | None = Field(
        default=None,
        min_length=1,
        description="Weights of its sources; unset: all of them, in proportion to their tokens.",
    )


class DataSection(Section):
    directory: PathLike | None = Field(
        default=None,
        description="Shard directory with a manifest.json, from `python -m data_pipeline tokenize`, all of "
        "its sources in proportion to their tokens; give this or blend.",
    )
    blend: Annotated[tuple[BlendEntry, ...], BeforeValidator(as_tuple)] | None = Field(
        default=None,
        min_length=1,
        description="Several shard directories, or weighted sources: [{directory, weight, sources}, ...].",
    )
    sequence_length: Int = Field(
        ge=1, le=2**24, description="Tokens of one training sample that the model predicts."
    )
    micro_batch_size: Int = Field(
        ge=1, le=2**24, description="Samples in one forward pass of one data-parallel rank."
    )
    global_batch_size: Int = Field(
        ge=1, le=2**24, description="Samples in one optimizer step, over all ranks."
    )
    validate_every: Int = Field(ge=0, description="Steps between validations; 0: only at the end.")
    validation_samples: Int = Field(ge=1, le=10**9, description="Validation samples per source, at most.")
    seed: Int | None = Field(
        default=None, ge=0, le=SEED_MAX, description="Seed of the sample order; unset: run.seed."
    )
    reset_at_document_end: bool = Field(
        default=False,
        description="Documents of a sample stand alone: attention and positions restart, no loss across.",
    )
    loader_workers: Int = Field(
        default=0,
        ge=0,
        le=1024,
        description="Threads of a rank that read samples ahead; 0: read when needed.",
    )
    cache_directory: PathLike | None = Field(
        default=None, description="Where sample orders are kept; unset: sample_order in run.directory."
    )
    allow_change: bool = Field(
        default=False,
        description="Resume although data, blend, data.seed or sequence length are not the checkpoint's.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> DataSection:
        if (self.directory is None) == (self.blend is None):
            given = "neither is set" if self.directory is None else "both are set"
            raise ValueError(f"data.directory and data.blend: {given}; give exactly one (the other null)")
        return self


class ParallelSection(Section):
    tensor_model_parallel_size: Int = Field(
        default=1, ge=1, le=4096, description="Ranks that share one copy of the model."
    )
    sequence_parallel: bool = Field(
        default=False, description="Split norms and residuals over the tensor-parallel ranks too."
    )
    timeout_seconds: Int = Field(
        default=600,
        ge=1,
        le=30 * 24 * 3600,
        description="Seconds after which a collective that hangs ends the run.",
    )


class PrecisionSection(Section):
    dtype: Literal["fp32", "bf16"] = Field(
        description="Compute type; with bf16 the optimizer keeps fp32 master weights."
    )
    grad_accum_dtype: Literal["fp32", "bf16"] = Field(
        default="fp32", description="Type in which gradients are summed over micro batches and over ranks."
    )

    @model_validator(mode="after")
    def _consistent(self) -> PrecisionSection:
        if self.dtype == "fp32" and self.grad_accum_dtype == "bf16":
            raise ValueError(
                "precision.grad_accum_dtype=bf16 would round the gradients of precision.dtype=fp32; use fp32"
            )
        return self


class CheckpointSection(Section):
    every: Int = Field(ge=0, description="Steps between checkpoints; 0: only at the end.")
    keep_last: Int = Field(default=2, ge=1, description="Complete checkpoints to keep.")
    asynchronous: bool = Field(
        default=True,
        description="Copy what is to be saved, and write it behind the training; else training waits.",
    )
    verify: Literal["full", "size"] = Field(
        default="full",
        description="What of a checkpoint's files is checked at a resume: size and SHA-256, or size only.",
    )
    fall_back: bool = Field(
        default=False,
        description="Resume from the checkpoint before where the newest one is damaged, and keep that aside "
        "as step_X.damaged; else stop.",
    )
    export_at_end: bool = Field(
        default=False,
        description="Export the finished run's model for transformers, into RUN/exports.",
    )


class StabilitySection(Section):
    max_skipped: Int = Field(
        default=3,
        ge=1,
        le=10**9,
        description="Steps in a row without an update, for numbers that are not finite or far too large, "
        "after which the run stops.",
    )
    spike_factor: float | None = Field(
        default=None,
        gt=0,
        description="Leave out an update whose loss or gradient norm is more than so many standard "
        "deviations above its running mean; unset: none is left out for its size.",
    )


class ProfileSection(Section):
    """A few steps to look into."""

    at: Int = Field(default=20, ge=1, le=10**9, description="The first step that is profiled.")
    steps: Int = Field(default=3, ge=1, le=1000, description="How many.")
    ranks: Literal["first", "all"] = Field(default="first", description="Of rank 0, or of every rank.")


class TelemetrySection(Section):
    every: Int = Field(default=1, ge=1, description="Steps between records.")
    tensorboard: bool = Field(default=True, description="Write TensorBoard event files beside metrics.jsonl.")
    wandb: bool = Field(
        default=False,
        description="Send the same numbers to Weights & Biases (pip install 'ora-pretrain[wandb]').",
    )
    variance_window: Int = Field(
        default=100, ge=2, description="Records over which stability/loss_variance is taken."
    )
    sample_prompts: Names = Field(
        default=(),
        max_length=8,
        description="Texts that the model continues at every validation, for TensorBoard's page TEXT.",
    )
    sample_tokens: Int = Field(
        default=48, ge=1, le=2**24, description="Tokens by which each is; each token is a forward pass."
    )
    profile: ProfileSection | None = Field(
        default=None,
        description="Steps to profile into RUN/profile: {at: 20, steps: 3, ranks: first}; null: none.",
    )


class DeepSpeedSection(Section):
    config: str = Field(
        default="auto",
        min_length=1,
        description="DeepSpeed JSON: a name in ds_configs, or a path ending in .json; auto: zero0 with one "
        "data-parallel rank in fp32, where ZeRO has nothing to split, else zero1.",
    )
    overrides: dict[str, Any] = Field(
        default_factory=dict, description="Keys merged into the DeepSpeed JSON."
    )
