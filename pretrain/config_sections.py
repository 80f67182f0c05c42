"""The sections of the configuration tree: names, types, ranges, meanings.

Checks that need one section only live here; those across sections live in `validation`. Every section is
frozen and rejects unknown keys. Values are strict (no text for a number), except that a whole number may be
written as 2e9.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


def _whole(value: Any) -> Any:
    """2e9 is how people write two billion tokens; 2.5 stays a float and is then refused."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _layers(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _text_keys(value: Any) -> Any:
    """In YAML a layer's number alone is not text."""
    return {str(key): item for key, item in value.items()} if isinstance(value, dict) else value


def _path(value: Any) -> Any:
    return Path(value) if isinstance(value, str) and value else value


def _betas(value: Any) -> Any:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise ValueError(f"optimizer.betas is {value!r}: it should be two numbers, such as [0.9, 0.98]")
    return tuple(value)


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


Int = Annotated[int, BeforeValidator(_whole)]
Number = Annotated[float, BeforeValidator(_number)]
Layers = Annotated[str, BeforeValidator(_layers)]
LayerShares = Annotated[dict[str, Number], BeforeValidator(_text_keys)]
Names = Annotated[tuple[str, ...], BeforeValidator(_tuple)]
PathLike = Annotated[Path, BeforeValidator(_path)]
Betas = Annotated[
    tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]], BeforeValidator(_betas)
]


class Section(BaseModel):
    """What all sections share: frozen, strict, no unknown keys, no NaN or infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class RunSection(Section):
    name: str = Field(
        pattern=r"^[^./\\\s][^/\\\s]*$", description="Name of the run: its directory's last part."
    )
    directory: PathLike = Field(default=Path("runs"), description="Directory that holds the runs.")
    seed: Int = Field(
        default=1234,
        ge=0,
        description="Seed of the initial weights and of dropout, and of what has no seed of its own.",
    )


class ModelSection(Section):
    num_layers: Int = Field(ge=1, description="Transformer layers.")
    hidden_size: Int = Field(ge=1, description="Width of the residual stream.")
    num_attention_heads: Int = Field(ge=1, description="Query heads of a layer.")
    num_query_groups: Int | None = Field(
        default=None,
        ge=1,
        description="Key/value heads of a layer (grouped-query attention); unset: num_attention_heads.",
    )
    head_dim: Int | None = Field(
        default=None, ge=1, description="Width of one head; unset: hidden_size / num_attention_heads."
    )
    ffn_hidden_size: Int | None = Field(
        default=None, ge=1, description="Inner width of the MLP; unset: 4 * hidden_size."
    )
    vocab_size: Int = Field(ge=2, description="Rows of the embedding; at least the tokenizer's vocabulary.")
    position_embedding: Literal["learned", "rope"] = Field(
        description="learned: a trained vector per position; rope: rotary embedding of queries and keys."
    )
    rotary_base: Int = Field(default=10000, ge=2, description="Base of the rotary frequencies (rope only).")
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


class UnfreezeEntry(Section):
    """One entry of attention.unfreeze."""

    at: Number = Field(gt=0, lt=1, description="Part of the run's steps after which it applies.")
    layers: Layers = Field(description="Layers that become trainable: 4, 4-7 or 50%-100%, counted from 0.")
    learning_rate_factor: Number = Field(
        default=1.0,
        gt=0,
        description="Of the learning-rate schedule from there on, in place of the last one.",
    )


class AttentionSection(Section):
    variant: str = Field(description="Query/Key policy: a name in megatron_patches.policy.VARIANTS.")
    seed: Int | None = Field(default=None, ge=0, description="Seed of the Query/Key bank; unset: run.seed.")
    scope: Literal["head", "layer"] | None = Field(
        default=None,
        description="Rows orthonormal within each head or across the layer; unset: the variant's own.",
    )
    construction: str | None = Field(
        default=None,
        description="How orthonormal rows are made: qr, svd, householder, cayley, hadamard, dct; unset: the "
        "variant's own.",
    )
    gaussian_std: float | None = Field(
        default=None,
        gt=0,
        description="Standard deviation of Gaussian Q/K; unset: the variant's own, or 1/sqrt(hidden_size).",
    )
    penalty: float | None = Field(
        default=None,
        gt=0,
        description="Factor of the orthogonality penalty, for the variant that has one; unset: its own.",
    )
    frozen_heads: LayerShares | None = Field(
        default=None,
        description="Layers (4, 4-7 or 0%-50%) and the fraction of their heads that is frozen; the other "
        "heads train, as vanilla's. Unset: the variant's own, mostly all.",
    )
    adapters: Names | None = Field(
        default=None,
        description="Small trainable corrections of frozen Q/K: logit_scale, qk_norm, core, low_rank.",
    )
    low_rank: Int | None = Field(default=None, ge=1, description="Rank of the adapter low_rank; unset: 8.")
    trainable: bool | None = Field(
        default=None,
        description="Whether a synthesizer's score matrices learn (synthesizers only); unset: they do.",
    )
    synthesizer_rank: Int | None = Field(
        default=None, ge=1, description="Rank of a factorized synthesizer's score matrices; unset: 8."
    )
    unfreeze: Annotated[tuple[UnfreezeEntry, ...], BeforeValidator(_tuple)] | None = Field(
        default=None,
        min_length=1,
        description="When which frozen layers become trainable: a list of {at, layers, "
        "learning_rate_factor}; unset: the variant's own.",
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
        default=None, ge=1, description="Optimizer steps of the whole run; give this or tokens."
    )
    tokens: Int | None = Field(
        default=None, ge=1, description="Training tokens of the whole run, rounded up to whole steps."
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
    blend: Annotated[tuple[BlendEntry, ...], BeforeValidator(_tuple)] | None = Field(
        default=None,
        min_length=1,
        description="Several shard directories, or weighted sources: [{directory, weight, sources}, ...].",
    )
    sequence_length: Int = Field(ge=1, description="Tokens of one training sample that the model predicts.")
    micro_batch_size: Int = Field(ge=1, description="Samples in one forward pass of one data-parallel rank.")
    global_batch_size: Int = Field(ge=1, description="Samples in one optimizer step, over all ranks.")
    validate_every: Int = Field(ge=0, description="Steps between validations; 0: only at the end.")
    validation_samples: Int = Field(ge=1, description="Validation samples per source, at most.")
    seed: Int | None = Field(default=None, ge=0, description="Seed of the sample order; unset: run.seed.")
    reset_at_document_end: bool = Field(
        default=False,
        description="Documents of a sample stand alone: attention and positions restart, no loss across.",
    )
    loader_workers: Int = Field(
        default=0, ge=0, description="Threads of a rank that read samples ahead; 0: read when needed."
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
        default=1, ge=1, description="Ranks that share one copy of the model."
    )
    sequence_parallel: bool = Field(
        default=False, description="Split norms and residuals over the tensor-parallel ranks too."
    )
    timeout_seconds: Int = Field(
        default=600, ge=1, description="Seconds after which a collective that hangs ends the run."
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


class TelemetrySection(Section):
    every: Int = Field(default=1, ge=1, description="Steps between records.")
    tensorboard: bool = Field(default=True, description="Write TensorBoard event files beside metrics.jsonl.")
    variance_window: Int = Field(
        default=100, ge=2, description="Records over which stability/loss_variance is taken."
    )


class DeepSpeedSection(Section):
    config: str = Field(
        default="zero1",
        min_length=1,
        description="DeepSpeed JSON: a name in ds_configs, or a path ending in .json.",
    )
    overrides: dict[str, Any] = Field(
        default_factory=dict, description="Keys merged into the DeepSpeed JSON."
    )
