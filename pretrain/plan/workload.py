"""The workload of a rank: one micro batch of a configuration, in one of its training phases."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_patches.recipe.optimizers import Muon
from megatron_patches.recipe.parts import ModelShape, Tensor
from megatron_patches.recipe.policy import QKPolicy
from megatron_patches.recipe.tensors import tensors
from pretrain.config.resolved import Layout, Resolved
from pretrain.config.tree import Config

BYTES = {"fp32": 4, "bf16": 2}
FP32 = 4


@dataclass(frozen=True)
class Workload:
    """The work of a GPU for one micro batch.

    Attributes:
        resolved: A configuration that fits its ranks.
        phase: Number of the training phase.
        batch: Samples of the micro batch.
    """

    resolved: Resolved
    phase: int
    batch: int

    @property
    def config(self) -> Config:
        """Return the configuration."""
        return self.resolved.config

    @property
    def layout(self) -> Layout:
        """Return the spread over the ranks."""
        return self.resolved.layout

    @property
    def shape(self) -> ModelShape:
        """Return the sizes of the model."""
        return self.config.shape

    @property
    def policy(self) -> QKPolicy:
        """Return the kind of attention."""
        return self.config.policy

    @property
    def tensor_parallel_size(self) -> int:
        """Return the ranks that share one copy of the model."""
        return self.layout.tensor_model_parallel_size

    @property
    def tokens(self) -> int:
        """Return the tokens of a micro batch."""
        return self.batch * self.shape.sequence_length

    @property
    def tokens_between(self) -> int:
        """Return the tokens whose norms, residuals and dropout masks the rank keeps."""
        split = self.layout.sequence_parallel
        return self.tokens // self.tensor_parallel_size if split else self.tokens

    @property
    def vocabulary(self) -> int:
        """Return the rank's rows of the output layer."""
        return self.shape.vocab_size // self.tensor_parallel_size

    @property
    def dropout(self) -> bool:
        """Return whether dropout is on."""
        return self.config.model.dropout > 0

    @property
    def masked(self) -> bool:
        """Return whether documents of a sample must not see each other."""
        return self.config.data.reset_at_document_end

    @property
    def dense_mask(self) -> bool:
        """Return whether attention takes a mask over all pairs of tokens of a sample."""
        flash = self.config.performance.document_attention == "flash"
        without_mask = flash and self.layout.dtype == "bf16" and not self.policy.synthesizer
        return self.masked and not without_mask

    @property
    def element(self) -> int:
        """Return the bytes of the compute type."""
        return BYTES[self.layout.dtype]

    @property
    def newton_schulz(self) -> str:
        """Return the type of Muon's products."""
        kind = self.config.optimizer.of_kind
        chosen = kind.newton_schulz_dtype if isinstance(kind, Muon) else "auto"
        return "bf16" if chosen == "auto" else chosen

    @property
    def bf16_optimizer(self) -> bool:
        """Return whether DeepSpeed uses its BF16 optimizer, with a flat fp32 copy of gradients."""
        sums = self.config.precision.grad_accum_dtype
        return self.layout.zero_stage == 1 and self.layout.dtype == "bf16" and sums == "fp32"

    @property
    def immediate_grad_update(self) -> bool:
        """Return whether the BF16 optimizer takes each gradient right after backward wrote it."""
        return bool(self.resolved.deepspeed.get("bf16", {}).get("immediate_grad_update"))

    @property
    def reduced_element(self) -> int:
        """Return the bytes of the type in which gradients are reduced over ranks."""
        return BYTES.get(str(self.resolved.deepspeed["communication_data_type"]).lower(), 2)

    @property
    def reduces_in_backward(self) -> bool:
        """Return whether `optimizer.reduction` sums gradients over ranks while backward runs."""
        settings = self.resolved.deepspeed
        whole = self.layout.zero_stage == 0 and self.layout.dtype == "fp32"
        immediate = self.bf16_optimizer and self.immediate_grad_update
        prescaled = settings.get("prescale_gradients", False)
        factor = settings.get("gradient_predivide_factor", 1)
        plain = self.reduced_element == FP32 and factor == 1 and not prescaled
        return self.config.performance.overlap_reduction and plain and (whole or immediate)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the inventory of the whole model."""
        return tensors(self.shape, self.policy, self.phase)


def workload_of(resolved: Resolved, phase: int | None = None) -> Workload:
    """Return the workload of each rank.

    Args:
        phase: Number of the training phase; None: the one in which most weights train.
    """
    config = resolved.config
    number = config.fullest_phase if phase is None else phase
    return Workload(resolved, number, config.data.micro_batch_size)
