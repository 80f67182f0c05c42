"""The workload of a rank: what memory and time depend on, taken out of a configuration once."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_patches.bank.head_split import split_heads
from megatron_patches.bank.orthonormal import ROLES
from megatron_patches.recipe.optimizers import Muon, Rule
from megatron_patches.recipe.parts import ModelShape, Tensor
from megatron_patches.recipe.policy import QKPolicy
from megatron_patches.recipe.tensors import is_patched, tensors
from pretrain.config.optimizer import OptimizerSection
from pretrain.config.resolved import Resolved
from pretrain.config.sections import PerformanceSection

BYTES = {"fp32": 4, "bf16": 2}
FP32 = 4
BUCKET = 500_000_000
"""Elements that DeepSpeed's BF16 optimizer copies together for a reduction."""


@dataclass(frozen=True)
class Layout:
    """The spread of a run over ranks, its types, and what memory depends on of DeepSpeed.

    Attributes:
        immediate_grad_update: the BF16 optimizer takes each gradient away as soon as backward has
            made it.
        reduce_bucket, live_parameters: elements that DeepSpeed reduces, or at stage 3 gathers, at a
            time.
        overlap_comm: at stage 2, one bucket fills while the other is reduced.
    """

    world_size: int
    tensor_parallel_size: int
    sequence_parallel: bool
    zero_stage: int
    dtype: str
    grad_accum_dtype: str
    immediate_grad_update: bool
    overlap_reduction: bool
    reduce_bucket: int
    live_parameters: int
    overlap_comm: bool

    @property
    def data_parallel_size(self) -> int:
        """Return the copies of the model."""
        return self.world_size // self.tensor_parallel_size

    @property
    def element(self) -> int:
        """Return the bytes of the compute type."""
        return BYTES[self.dtype]

    @property
    def bf16_optimizer(self) -> bool:
        """Return whether DeepSpeed takes its BF16 optimizer, with a flat fp32 copy of gradients."""
        return self.zero_stage == 1 and self.dtype == "bf16" and self.grad_accum_dtype == "fp32"

    @property
    def reduces_in_backward(self) -> bool:
        """Return True if `training.reduction` sums gradients over ranks while backward runs."""
        whole = self.zero_stage == 0 and self.dtype == "fp32"
        return self.overlap_reduction and (
            whole or (self.bf16_optimizer and self.immediate_grad_update)
        )


@dataclass(frozen=True)
class LayerHeads:
    """Heads of one layer on one rank, by what becomes of their W_Q and W_K.

    Attributes:
        patched: the layer has W_V apart from W_Q and W_K; else megatron-core's own fused W_QKV.
        frozen, trained: heads that have frozen and trained rows of their own, of both roles
            together.
        adapted: groups of key heads that adapters correct.
        mixed: heads of the same role come from both, and are put together in their order.
    """

    patched: bool
    frozen: int
    trained: int
    adapted: int
    mixed: bool


@dataclass(frozen=True)
class Workload:
    """A model, the layout of its training, and one micro batch of it; sizes are those of one rank.

    Attributes:
        optimizer: its rules, and the rate of each tensor.
        phase: the training phase.
        masked: documents of a sample must not see each other.
        softcap: logits are capped.
        z_loss: the square of their log-sum-exp is trained on.
        heads, groups, ffn, vocabulary: query heads, key heads, inner width of the MLP and
            vocabulary.
    """

    shape: ModelShape
    policy: QKPolicy
    optimizer: OptimizerSection
    phase: int
    layout: Layout
    batch: int
    dropout: bool
    masked: bool
    softcap: bool
    z_loss: bool
    performance: PerformanceSection
    on_cuda: bool
    heads: int
    groups: int
    ffn: int
    vocabulary: int

    @property
    def rules(self) -> tuple[Rule, ...]:
        """Return the optimizer's rules, in the order in which they choose their tensors."""
        return self.optimizer.rules

    @property
    def newton_schulz(self) -> str:
        """Return the type of Muon's products."""
        of_kind = self.optimizer.of_kind
        chosen = of_kind.newton_schulz_dtype if isinstance(of_kind, Muon) else "auto"
        return chosen if chosen != "auto" else "bf16" if self.on_cuda else "fp32"

    @property
    def tokens(self) -> int:
        """Return the tokens of a micro batch."""
        return self.batch * self.shape.sequence_length

    @property
    def between(self) -> int:
        """Return the tokens of which the rank keeps norms, residuals and dropout masks."""
        size = self.layout.tensor_parallel_size
        return self.tokens // size if self.layout.sequence_parallel else self.tokens

    @property
    def mask(self) -> int:
        """Return the bytes of an element of a dropout mask."""
        return 1 if self.on_cuda else self.layout.element

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the inventory of the whole model."""
        return tensors(self.shape, self.policy, self.phase)

    def layer_heads(self, rank: int) -> tuple[LayerHeads, ...]:
        """Return each layer's heads on a tensor-parallel rank; none for a synthesizer."""
        if self.policy.synthesizer:
            return ()
        shape, policy, first = self.shape, self.policy, rank * self.groups
        layers = []
        sizes = shape.num_layers, shape.num_query_groups
        keeps = policy.keeps(*sizes)
        for layer, groups in enumerate(policy.frozen_groups(*sizes, self.phase)):
            keep = keeps[layer]
            parted = keep is not None and not keep.whole
            split = split_heads(
                shape.num_attention_heads,
                shape.num_query_groups,
                groups,
                rank,
                tensor_parallel_size=self.layout.tensor_parallel_size,
                roles=policy.frozen_row_roles,
                shared=policy.shared,
            )
            adapted = policy.adapted_groups(groups, shape.num_query_groups)
            layers.append(
                LayerHeads(
                    patched=is_patched(policy, groups),
                    frozen=sum(map(len, split.frozen.values())),
                    trained=sum(map(len, split.trainable.values())) if policy.has_rows else 0,
                    adapted=sum(first <= group < first + self.groups for group in adapted),
                    mixed=parted
                    or any(split.frozen[role] and split.trainable[role] for role in ROLES),
                )
            )
        return tuple(layers)


def workload_of(resolved: Resolved, on_cuda: bool = True, phase: int | None = None) -> Workload:
    """Return the workload of each rank.

    Args:
        resolved: a configuration that fits its ranks.
        on_cuda: whether the ranks are GPUs.
        phase: number of the training phase; None: that in which most weights train.
    """
    config, settings = resolved.config, resolved.deepspeed
    zero = settings.get("zero_optimization", {})
    layout = Layout(
        world_size=resolved.layout.world_size,
        tensor_parallel_size=config.parallel.tensor_model_parallel_size,
        sequence_parallel=config.parallel.sequence_parallel,
        zero_stage=resolved.layout.zero_stage,
        dtype=config.precision.dtype,
        grad_accum_dtype=config.precision.grad_accum_dtype,
        immediate_grad_update=bool(settings.get("bf16", {}).get("immediate_grad_update")),
        overlap_reduction=config.performance.overlap_reduction,
        reduce_bucket=int(zero.get("reduce_bucket_size", BUCKET)),
        live_parameters=int(zero.get("stage3_max_live_parameters", 10**9)),
        overlap_comm=bool(zero.get("overlap_comm")),
    )
    shape, size = config.shape, layout.tensor_parallel_size
    return Workload(
        shape=shape,
        policy=config.policy,
        optimizer=config.optimizer,
        phase=config.fullest_phase if phase is None else phase,
        layout=layout,
        batch=config.data.micro_batch_size,
        dropout=config.model.dropout > 0,
        masked=config.data.reset_at_document_end,
        softcap=config.model.logit_softcap is not None,
        z_loss=config.model.z_loss > 0,
        performance=config.performance,
        on_cuda=on_cuda,
        heads=shape.num_attention_heads // size,
        groups=shape.num_query_groups // size,
        ffn=shape.ffn_hidden_size // size,
        vocabulary=shape.vocab_size // size,
    )
