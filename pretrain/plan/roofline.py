"""How long a step takes, part by part: each kernel at the rate its card is assumed to reach. An estimate.

What layers move was counted by reading the kernels. The traffic of the update, the curve of attention and the
rates of collectives were solved from an earlier estimate's totals; nothing was fitted to a measurement.
Products run at the rate of products, all else at the rate of memory. Nothing overlaps but what DeepSpeed
and `training.reduction` reduce during backward.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from pretrain.config.counting import (
    AttentionCount,
    ModelShape,
    count_attention,
    executed_forward_flops_per_token,
    score_products,
)
from pretrain.config.phases import phases_of
from pretrain.config.tree import Config
from pretrain.plan.devices import Gpu
from pretrain.plan.memory import layout_of
from pretrain.plan.sizes import Sizes, rank_sizes
from pretrain.plan.states import BYTES, FP32, Layout, States

FLASH_BACKWARD = 2.5
"""Flash attention's backward pass makes five products where forward makes two."""

BYTES_A_LOGIT = {"megatron": 52, "in_place": 6, "chunked": 6}
"""Traffic of cross entropy, forward and backward, by `performance.cross_entropy`; what is done in fp32 a part
at a time stays in the second-level cache.
"""

COMPILED, REMADE_LAYER, REMADE_ATTENTION = 42 / 63, 23 / 63, 8 / 63
"""Shares of the elementwise traffic: of kernels that torch.compile has joined, and of a layer's or its
attention's forward pass, which `performance.recompute` takes twice.
"""

ATTENTION_ONCE = ("none", "query_key")
"""Of `performance.recompute`, what does not attend again in backward."""

LAUNCHES_A_LAYER = 60
SECONDS_A_LAUNCH = 6e-6
HOST_SECONDS = 1e-3
"""A step's waits for the host that are left: the gradient norm and the agreement of the ranks."""


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of one optimizer step by part; the attributes are what takes them.

    Attributes:
        accumulation: adding a micro batch's gradients to the sum.
        tensor_parallel: collectives inside the layers.
        reduction, gathering: data-parallel collectives that nothing hides.
        launches: what the GPU waits for the host to launch kernels, where they are too short.
    """

    products: float
    attention: float
    elementwise: float
    cross_entropy: float
    accumulation: float
    tensor_parallel: float
    reduction: float
    gathering: float
    update: float
    launches: float
    host: float

    @property
    def total(self) -> float:
        return float(sum(getattr(self, part.name) for part in fields(self)))


def step_seconds(config: Config, world_size: int, gpu: Gpu, states: States, trainable: int) -> StepSeconds:
    """The step of one rank; all ranks work alike.

    Args:
        states, trainable: of that rank, for what the update moves.
    """
    sizes, layout = rank_sizes(config, on_cuda=True), layout_of(config, world_size)
    passes = config.gradient_accumulation_steps(world_size)
    products, attention = _products(config, sizes, gpu), _attention(config, sizes, gpu)
    elementwise = _elementwise(config, sizes, layout.zero_stage) / _memory_rate(gpu)
    entropy = (
        sizes.tokens * sizes.vocabulary * BYTES_A_LOGIT[config.performance.cross_entropy] / _memory_rate(gpu)
    )
    accumulation = trainable * (18 if layout.bf16_optimizer else 12) / _memory_rate(gpu)
    parallel = _tensor_parallel(config, sizes, gpu)
    one_pass = products + attention + elementwise + entropy + accumulation + parallel
    launches = max(0.0, config.model.num_layers * LAUNCHES_A_LAYER * SECONDS_A_LAUNCH - one_pass)
    reduction, gathering = _data_parallel(config, world_size, gpu, layout, trainable, passes, one_pass)
    return StepSeconds(
        products=passes * products,
        attention=passes * attention,
        elementwise=passes * elementwise,
        cross_entropy=passes * entropy,
        accumulation=passes * accumulation,
        tensor_parallel=passes * parallel,
        reduction=reduction,
        gathering=gathering,
        update=_update_bytes(layout, states, trainable) / _memory_rate(gpu),
        launches=passes * launches,
        host=HOST_SECONDS,
    )


def counted_attention(config: Config) -> tuple[ModelShape, AttentionCount]:
    """Shape and attention in the phase of the run in which most trains."""
    shape = config.shape()
    return shape, count_attention(shape, config.policy(), len(phases_of(config)) - 1)


def _memory_rate(gpu: Gpu) -> float:
    return gpu.bandwidth_tb_s * 1e12


def _products(config: Config, sizes: Sizes, gpu: Gpu) -> float:
    """Forward, input gradients, and the weight gradients of what trains."""
    shape, attention = counted_attention(config)
    forward = executed_forward_flops_per_token(shape, attention, causal_share=0)
    weight_gradient = forward - (0 if attention.scores else 2 * attention.frozen)
    forward_again = products_again(config, forward)
    tokens = sizes.tokens / config.parallel.tensor_model_parallel_size
    if config.precision.dtype == "fp32":
        return tokens * (2 * forward + forward_again + weight_gradient) / (gpu.fp32_tflops * 1e12)
    seconds = (2 * forward + forward_again) / gpu.gemm_tflops + weight_gradient / gpu.weight_gradient_tflops
    return tokens * seconds / 1e12


def products_again(config: Config, forward: float) -> float:
    """FLOPs a token of the products that backward makes once more, of `forward` in all; without scores.

    Those of the logits by `chunked` cross entropy; those of a layer or its attention by recomputation.
    """
    shape, recompute = config.shape(), config.performance.recompute
    logits = 2.0 * shape.hidden_size * shape.vocab_size
    mlp = shape.num_layers * 4.0 * shape.hidden_size * shape.ffn_hidden_size
    columns = config.policy().stored_columns(shape.hidden_size, shape.head_dim)
    query_key = 2.0 * shape.num_layers * (shape.query_size + shape.key_size) * columns
    attention = forward - logits - mlp
    layers = {"none": 0.0, "query_key": query_key, "attention": attention, "full": forward - logits}[
        recompute
    ]
    return layers + (logits if config.performance.cross_entropy == "chunked" else 0.0)


def flops_again_per_token(config: Config) -> float:
    """Executed beyond one forward and one backward pass; attention by its causal half."""
    shape, attention = counted_attention(config)
    forward = executed_forward_flops_per_token(shape, attention, causal_share=0)
    products = products_again(config, forward)
    if config.performance.recompute in ATTENTION_ONCE:
        return products
    return products + shape.num_layers * 2 * score_products(shape, 1.0 if attention.scores else 0.5)


def _attention(config: Config, sizes: Sizes, gpu: Gpu) -> float:
    shape, attention = counted_attention(config)
    forward_again = config.performance.recompute not in ATTENTION_ONCE
    tokens = sizes.tokens * shape.num_layers / config.parallel.tensor_model_parallel_size
    if attention.scores:  # one product with probabilities, over the full square
        rate = gpu.fp32_tflops if config.precision.dtype == "fp32" else gpu.gemm_tflops
        products = (2 if attention.frozen else 3) + forward_again
        return tokens * score_products(shape, 1.0) * products / (rate * 1e12)
    rate = gpu.attention_tflops * sizes.length / (sizes.length + gpu.attention_half_length)
    if config.precision.dtype == "fp32":  # there is no flash kernel for it
        rate = min(rate, gpu.fp32_tflops / 2)
    # A dense mask skips nothing. Documents attended one by one skip more than the causal half: by how much
    # depends on their lengths.
    flash = config.performance.document_attention == "flash" and config.precision.dtype == "bf16"
    share = 1.0 if config.data.reset_at_document_end and not flash else 0.5
    passes = 1 + FLASH_BACKWARD + forward_again
    return tokens * 2 * score_products(shape, share) * passes / (rate * 1e12)


def _elementwise(config: Config, sizes: Sizes, zero_stage: int) -> float:
    """Bytes that norms, dropout, residuals, GELU and what surrounds Q, K and V move in one pass."""
    policy, dropout = config.policy(), config.model.dropout > 0
    between = sizes.between * sizes.hidden * (26 + (10 if dropout else 0))
    inner = sizes.tokens * sizes.ffn * 5
    query_key = sizes.tokens * (sizes.heads + sizes.groups) * sizes.head_dim
    frozen = not policy.trainable and not policy.synthesizer
    joined = query_key * 2 if frozen else sizes.tokens * (sizes.heads + 2 * sizes.groups) * sizes.head_dim * 2
    added = sizes.tokens * sizes.hidden * 3 * (1 + ("low_rank" in policy.adapters)) if frozen else 0
    if policy.structured:  # small blocks: what the two products read and write takes longer than they do
        joined += query_key * 6 + sizes.tokens * sizes.hidden * 3
    rotary = query_key * 10 if config.model.position_embedding == "rope" else 0
    passes = {"low_rank": 5, "core": 5, "qk_norm": 24, "logit_scale": 4}
    adapters = sum(query_key * passes[name] for name in policy.adapters)
    mixed = query_key * 8 if policy.frozen_heads else 0
    scores = 0
    if policy.synthesizer:
        joined = rotary = 0
        samples = sizes.batch if dropout or config.data.reset_at_document_end else 1
        scores = samples * sizes.heads * sizes.length**2 * 24
    moved = between + inner + joined + added + rotary + adapters + mixed + scores
    share = COMPILED if config.performance.compiles(True, zero_stage) else 1.0
    remade = {"none": 0.0, "query_key": 0.0, "attention": REMADE_ATTENTION, "full": REMADE_LAYER}
    again = remade[config.performance.recompute]
    if config.performance.recompute == "query_key":  # made, and rotated
        again += (query_key * 3 + sizes.tokens * sizes.hidden + rotary / 2) / moved
    return config.model.num_layers * moved * sizes.element * (share + again)


def _tensor_parallel(config: Config, sizes: Sizes, gpu: Gpu) -> float:
    """Four all-reduces a layer, or what sequence parallelism makes of them with one more gather each way."""
    size = config.parallel.tensor_model_parallel_size
    if size == 1:
        return 0.0
    rate = (gpu.node_gb_s if size <= gpu.gpus_per_node else gpu.network_gb_s) * 1e9
    one = 2 * (size - 1) / size * sizes.tokens * sizes.hidden * sizes.element / rate
    return one * (config.model.num_layers * (5 if config.parallel.sequence_parallel else 4) + 2)


def _data_parallel(
    config: Config,
    world_size: int,
    gpu: Gpu,
    layout: Layout,
    trainable: int,
    passes: int,
    one_pass: float,
) -> tuple[float, float]:
    """(reduction of gradients, gathering of weights), as far as nothing hides them."""
    ranks = layout.data_parallel_size
    if ranks == 1:
        return 0.0, 0.0
    size = config.parallel.tensor_model_parallel_size
    rate = gpu.node_gb_s * 1e9
    if world_size > gpu.gpus_per_node:  # groups that stride over a node share its network
        rate = gpu.network_gb_s * 1e9 / min(size, gpu.gpus_per_node)
    once = (ranks - 1) / ranks * trainable / rate
    weights, gradients = once * BYTES[layout.dtype], once * BYTES[layout.grad_accum_dtype]
    if layout.zero_stage <= 1:
        hidden = one_pass * 2 / 3 if layout.reduces_in_backward else 0.0  # by the last pass's backward
        return max(0.0, 2 * gradients - hidden), weights if layout.zero_stage else 0.0
    if layout.zero_stage == 2:  # at every micro batch, while backward runs: two thirds of a pass
        return passes * max(0.0, gradients - one_pass * 2 / 3), weights
    return passes * max(0.0, gradients + 2 * weights - one_pass), 0.0


def _update_bytes(layout: Layout, states: States, trainable: int) -> float:
    """Norm, clipping, staging copies and AdamW."""
    own = states.own_elements
    if layout.zero_stage == 0:
        return 8 * FP32 * trainable
    if layout.bf16_optimizer:  # where gradients are reduced as they lie, no staging: three copies of 8 bytes
        return (22 if layout.reduces_in_backward else 46) * trainable + 30 * own
    return 68 * own + (16 * trainable if layout.zero_stage == 1 else 0)
