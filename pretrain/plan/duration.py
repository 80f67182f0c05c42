"""Time of a step on a card, in three terms: compute, memory traffic, communication.

An estimate. Matrix products and attention run at the rates that the card reaches; what is large in
memory (activations, logits, gradients, weights, the optimizer's states) moves at the rate of its
memory; collectives move at that of the network. Only the reductions that DeepSpeed and
`optimizer.reduction` make in backward overlap with compute. The estimate leaves out gaps between
kernels, waits for the host, and the traffic of single elementwise kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_patches.recipe.counting import score_products
from megatron_patches.recipe.optimizers import rule_of
from pretrain.plan.activations import activations_of
from pretrain.plan.cards import Gpu
from pretrain.plan.memory import States
from pretrain.plan.products import ATTENTION_ONCE, Products
from pretrain.plan.workload import BYTES, FP32, Workload

FLASH_BACKWARD = 2.5
"""Flash attention's backward pass makes five products where the forward pass makes two."""

BYTES_A_LOGIT = {"megatron": 52, "in_place": 20, "chunked": 50}
COMPILED_BYTES_A_LOGIT = 6
"""Traffic of cross entropy, forward and backward, by `performance.cross_entropy`. `in_place`,
compiled: logits read twice and written once."""

ACTIVATION_PASSES = 4
"""Reads and writes of a kept activation and of its gradient: forward writes and reads it, backward
reads it and writes its gradient. What backward makes again moves twice more."""


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of one optimizer step.

    Attributes:
        compute: Matrix products and attention, and the products of an update.
        memory: Traffic of activations, logits, gradients and the update.
        communication: Collectives that nothing hides.
    """

    compute: float
    memory: float
    communication: float

    @property
    def total(self) -> float:
        """Return the whole step."""
        return self.compute + self.memory + self.communication


def step_seconds(
    work: Workload, gpu: Gpu, passes: int, states: States, trainable: int
) -> StepSeconds:
    """Return the seconds of a step; all ranks work alike.

    Args:
        passes: Micro batches of a step.
        states: States of the rank, for the traffic of the update.
        trainable: Elements that train on the rank.
    """
    layout, memory_rate = work.layout, gpu.bandwidth_tb_s * 1e12
    compute = _products(work, gpu) + _attention(work, gpu)
    memory = _pass_bytes(work, trainable) / memory_rate
    parallel = _tensor_parallel(work, gpu)
    collectives = _data_parallel(work, gpu, trainable, passes, one_pass=compute + memory + parallel)
    matrices_rate = gpu.fp32_tflops if work.newton_schulz == "fp32" else gpu.gemm_tflops
    update = update_flops(work) / layout.world_size / (matrices_rate * 1e12)
    return StepSeconds(
        compute=passes * compute + update,
        memory=passes * memory + _update_bytes(work, states, trainable) / memory_rate,
        communication=passes * parallel + collectives + _exchange(work, gpu),
    )


def _products(work: Workload, gpu: Gpu) -> float:
    """Return the seconds of products: forward, input gradients, weight gradients."""
    products = Products(work.shape, work.policy, work.phase)
    forward = products.forward
    weight_gradient = forward - products.frozen
    forward_again = products.again(work.config.performance)
    tokens = work.tokens / work.tensor_parallel_size
    if work.layout.dtype == "fp32":
        return tokens * (2 * forward + forward_again + weight_gradient) / (gpu.fp32_tflops * 1e12)
    seconds = (2 * forward + forward_again) / gpu.gemm_tflops
    seconds += weight_gradient / gpu.weight_gradient_tflops
    return tokens * seconds / 1e12


def _attention(work: Workload, gpu: Gpu) -> float:
    forward_again = work.config.performance.recompute not in ATTENTION_ONCE
    tokens = work.tokens * work.shape.num_layers / work.tensor_parallel_size
    if work.policy.synthesizer:  # one product with probabilities, over the full square
        rate = gpu.fp32_tflops if work.layout.dtype == "fp32" else gpu.gemm_tflops
        products = (3 if work.policy.trainable else 2) + forward_again
        return tokens * score_products(work.shape, 1.0) * products / (rate * 1e12)
    length = work.shape.sequence_length
    rate = gpu.attention_tflops * length / (length + gpu.attention_half_length)
    if work.layout.dtype == "fp32":  # flash attention has no fp32 kernel
        rate = min(rate, gpu.fp32_tflops / 2)
    # A dense mask skips nothing. Documents attended one by one skip more than the causal half:
    # their lengths decide how much.
    share = 1.0 if work.dense_mask else 0.5
    passes = 1 + FLASH_BACKWARD + forward_again
    return tokens * 2 * score_products(work.shape, share) * passes / (rate * 1e12)


def _pass_bytes(work: Workload, trainable: int) -> int:
    """Return the bytes that a forward and backward pass moves: activations, logits, gradients."""
    recompute = work.config.performance.recompute
    activations = activations_of(work, rank=0)
    moved = ACTIVATION_PASSES * activations.kept("none") + 2 * activations.made_again(recompute)
    logits = work.tokens * work.vocabulary * bytes_a_logit(work)
    return moved + logits + trainable * (10 if work.bf16_optimizer else 12)


def bytes_a_logit(work: Workload) -> int:
    """Return the traffic of cross entropy, in bytes per logit."""
    way = work.config.performance.cross_entropy
    compiled = work.config.performance.compiles(True, work.layout.zero_stage)
    return COMPILED_BYTES_A_LOGIT if compiled and way == "in_place" else BYTES_A_LOGIT[way]


def _tensor_parallel(work: Workload, gpu: Gpu) -> float:
    """Return the seconds of the layers' all-reduces, or of their halves and gathers."""
    size = work.tensor_parallel_size
    if size == 1:
        return 0.0
    rate = (gpu.node_gb_s if size <= gpu.gpus_per_node else gpu.network_gb_s) * 1e9
    collective_seconds = (
        2 * (size - 1) / size * work.tokens * work.shape.hidden_size * work.element / rate
    )
    # Four all-reduces a layer, and two around the layers. With sequence parallelism backward
    # gathers two inputs of a layer again, each worth half an all-reduce. Recomputation repeats the
    # one of attention, or both.
    of_a_layer = 5 if work.layout.sequence_parallel else 4
    of_a_layer += {"attention": 1, "full": 2}.get(work.config.performance.recompute, 0)
    return collective_seconds * (work.shape.num_layers * of_a_layer + 2)


def _data_parallel(work: Workload, gpu: Gpu, trainable: int, passes: int, one_pass: float) -> float:
    """Return the seconds of reduced gradients and gathered weights that nothing hides."""
    layout, ranks = work.layout, work.layout.data_parallel_size
    if ranks == 1:
        return 0.0
    rate = gpu.node_gb_s * 1e9
    if layout.world_size > gpu.gpus_per_node:  # groups that stride over a node share its network
        rate = gpu.network_gb_s * 1e9 / min(work.tensor_parallel_size, gpu.gpus_per_node)
    elements_seconds = (ranks - 1) / ranks * trainable / rate
    weights = elements_seconds * work.element
    gradients = elements_seconds * work.reduced_element
    if layout.zero_stage <= 1:
        # The backward pass of the last micro batch hides the reduction.
        hidden = one_pass * 2 / 3 if work.reduces_in_backward else 0.0
        return max(0.0, 2 * gradients - hidden) + (weights if layout.zero_stage else 0.0)
    if layout.zero_stage == 2:  # at every micro batch, while backward runs: two thirds of a pass
        return passes * max(0.0, gradients - one_pass * 2 / 3) + weights
    return passes * max(0.0, gradients + 2 * weights - one_pass)


def _update_bytes(work: Workload, states: States, trainable: int) -> float:
    """Return the bytes that norm, clipping, staging copies and the optimizer move."""
    rank_elements, optimizer = states.own_elements, states.update_traffic
    if work.layout.zero_stage == 0:
        return FP32 * trainable + optimizer  # the norm reads every gradient
    # Gradients that are reduced in place need no staging, which takes three copies of 8 bytes.
    if work.bf16_optimizer:
        return (22 if work.reduces_in_backward else 46) * trainable + 2 * rank_elements + optimizer
    return 40 * rank_elements + optimizer + (16 * trainable if work.layout.zero_stage == 1 else 0)


def update_flops(work: Workload) -> int:
    """Return the FLOPs of the matrix products in one update, over all ranks."""
    trained = [tensor for tensor in work.tensors() if tensor.trains]
    return sum(rule_of(tensor, work.config.optimizer.rules).products(tensor) for tensor in trained)


def _exchange(work: Workload, gpu: Gpu) -> float:
    """Return the seconds in which ranks exchange matrices and their updates for Muon."""
    layout, rules = work.layout, work.config.optimizer.rules
    trained = (tensor for tensor in work.tensors() if tensor.trains)
    whole = (tensor for tensor in trained if rule_of(tensor, rules).whole_matrices)
    sent = 2 * sum(tensor.elements for tensor in whole) * BYTES[work.newton_schulz]
    inside = layout.world_size <= gpu.gpus_per_node
    rate = (gpu.node_gb_s if inside else gpu.network_gb_s / gpu.gpus_per_node) * 1e9
    return sent / layout.world_size / rate if layout.world_size > 1 else 0.0
