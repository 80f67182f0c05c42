"""The memory of one rank, by kind, and its peak."""

from __future__ import annotations

from dataclasses import dataclass

from pretrain.config.deepspeed import deepspeed_settings, zero_stage
from pretrain.config.tree import Config
from pretrain.plan.activations import activation_bytes, recomputed_bytes
from pretrain.plan.sizes import Sizes, rank_sizes
from pretrain.plan.states import BYTES, FP32, Layout, States, rank_states
from pretrain.plan.tensors import LayerHeads, RankTensors, rank_tensors

CONTEXT_BYTES = 1_500_000_000
"""Assumed for the CUDA context, NCCL's own buffers, workspaces and what the allocator cannot fill."""

LOGITS_AT_A_TIME = 2**23
"""Of `megatron_patches.model.output`, which imports torch."""

BUCKET = 500_000_000
"""Elements that DeepSpeed's BF16 optimizer copies together for a reduction."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, of those tensor-parallel ranks that need most.

    Attributes:
        states: exact; all else is an estimate.
        activations: kept between forward and backward.
        logits: at the moment of a pass when they need most.
        layer_gradients: what the backward pass of one layer has at once, when the logits are gone: gradients,
            and the activations that it makes again.
        communication: buffers of collectives while backward runs.
        update: copies that reduction and update make, when activations are gone.
    """

    states: States
    activations: int
    logits: int
    layer_gradients: int
    communication: int
    update: int
    context: int

    @property
    def peak(self) -> int:
        """Of the two moments that can need most, the end of a forward pass and the update, the larger."""
        passing = self.activations + max(self.logits, self.layer_gradients) + self.communication
        return self.states.total + self.context + max(passing, self.update)


def layout_of(config: Config, world_size: int) -> Layout:
    """How `world_size` ranks share the run."""
    return Layout(
        zero_stage(config, world_size),
        config.precision.dtype,
        config.precision.grad_accum_dtype,
        config.data_parallel_size(world_size),
        bool(deepspeed_settings(config, world_size).get("bf16", {}).get("immediate_grad_update")),
        config.performance.overlap_reduction,
    )


def memory_of(config: Config, world_size: int, on_cuda: bool = True) -> Memory:
    """The memory of the rank that needs most."""
    size = config.parallel.tensor_model_parallel_size
    # Frozen heads are spread over the layer, so ranks may hold unequal shares; else all are equal.
    ranks = range(size if config.policy().frozen_heads else 1)
    return max((_of_rank(config, world_size, rank, on_cuda) for rank in ranks), key=lambda found: found.peak)


def _of_rank(config: Config, world_size: int, rank: int, on_cuda: bool) -> Memory:
    tensors, sizes = rank_tensors(config, rank), rank_sizes(config, on_cuda)
    layout = layout_of(config, world_size)
    states = rank_states(tensors, layout)
    return Memory(
        states=states,
        activations=activation_bytes(config, sizes, tensors.layers),
        logits=logit_bytes(config, sizes),
        layer_gradients=layer_gradient_bytes(config, sizes, tensors.layers),
        communication=_communication(config, sizes, tensors, layout, world_size) if world_size > 1 else 0,
        update=_update(tensors, states, layout),
        context=CONTEXT_BYTES if on_cuda else 0,
    )


def logit_bytes(config: Config, sizes: Sizes) -> int:
    """The most that logits need at once, in cross entropy.

    By megatron's own in bf16 the fp32 gradient beside its bf16 copy; in fp32 the gradient beside a new weight
    gradient of the output layer, which is then added to the one that is there. The others have no more than
    `LOGITS_AT_A_TIME` in fp32.
    """
    logits, weight = sizes.tokens * sizes.vocabulary, sizes.vocabulary * sizes.hidden
    at_a_time = min(logits, LOGITS_AT_A_TIME)
    if config.performance.cross_entropy == "in_place":
        in_fp32 = 4 if sizes.element == FP32 else 8
        return logits * sizes.element + max(at_a_time * in_fp32, weight * sizes.element)
    if config.performance.cross_entropy == "chunked":
        return at_a_time * 22 + weight * sizes.element
    if config.precision.dtype == "bf16":
        return logits * (FP32 + BYTES["bf16"])
    return (logits + weight) * FP32


def layer_gradient_bytes(config: Config, sizes: Sizes, layers: tuple[LayerHeads, ...]) -> int:
    """In the MLP: before and after GELU, of the residual stream twice, and a new weight gradient.

    What is recomputed of a whole layer is there then too. Of the attention alone it is made later, when the
    gradients inside the MLP are gone.
    """
    inner = 2 * sizes.tokens * sizes.ffn + sizes.hidden * sizes.ffn
    in_mlp = (inner + 2 * sizes.tokens * sizes.hidden) * sizes.element
    again = recomputed_bytes(config, sizes, layers)
    return in_mlp + again if config.performance.recompute == "full" else max(in_mlp, again)


def _communication(
    config: Config, sizes: Sizes, tensors: RankTensors, layout: Layout, world_size: int
) -> int:
    """Buckets of DeepSpeed that are there while backward runs, and a gathered sequence."""
    zero = deepspeed_settings(config, world_size).get("zero_optimization", {})
    element = BYTES[layout.dtype]
    bucket = min(int(zero.get("reduce_bucket_size", BUCKET)), tensors.trainable) * element
    gathered = sizes.tokens * sizes.hidden * element if config.parallel.sequence_parallel else 0
    if layout.zero_stage == 2:  # one bucket fills while the other is reduced
        return gathered + bucket * (2 if zero.get("overlap_comm") else 1)
    if layout.zero_stage == 3:
        live = min(int(zero.get("stage3_max_live_parameters", 10**9)), tensors.trainable) * element
        return gathered + bucket + live
    return gathered + (bucket if layout.zero_stage == 1 and not layout.bf16_optimizer else 0)


def _update(tensors: RankTensors, states: States, layout: Layout) -> int:
    if layout.reduces_in_backward:
        return 0
    if layout.bf16_optimizer:
        return min(tensors.trainable, BUCKET) * FP32 if layout.data_parallel_size > 1 else 0
    return states.own_elements * FP32 if layout.zero_stage > 0 else 0
