"""The cards, and how long a step takes on one of them, part by part. An estimate.

Every number of a card is an assumption until it is measured there. What layers move was counted by
reading the kernels. The traffic of the update, the curve of attention and the rates of collectives
were solved from an earlier estimate's totals; nothing was fitted to a measurement. Products run at
the rate of products, all else at the rate of memory. Nothing overlaps but what DeepSpeed and
`training.reduction` reduce in backward.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields

from pydantic import Field, ValidationError

from data_pipeline.io.home import expand_home
from megatron_patches.recipe.block import MLPS, NORMS
from megatron_patches.recipe.counting import score_products
from megatron_patches.recipe.optimizers import rule_of
from megatron_patches.recipe.tensors import QueryKeyNorm, adapter_sizes, is_patched
from pretrain.config.sources import did_you_mean, is_file, read_yaml
from pretrain.config.types import Number, Section
from pretrain.errors import UserError
from pretrain.plan.memory import States
from pretrain.plan.products import ATTENTION_ONCE, Products
from pretrain.plan.workload import BYTES, FP32, Layout, Workload
from pretrain.ranks.devices import PEAK_BF16_TFLOPS

_PEAK = dict(PEAK_BF16_TFLOPS)


class Gpu(Section):
    """A card, and the cluster around it. Rates are those that programs reach, not a data sheet's.

    A user's own card is a YAML or JSON file with these fields.
    """

    name: str = Field(min_length=1, max_length=60, description="What it is called in the output.")
    memory_gb: Number = Field(gt=0, description="Memory that torch reports, in 1e9 bytes.")
    peak_tflops: Number = Field(
        gt=0, description="The data sheet's dense bf16 rate, for MFU and HFU."
    )
    gemm_tflops: Number = Field(
        gt=0, description="bf16 products of forward and of input gradients."
    )
    weight_gradient_tflops: Number = Field(gt=0, description="bf16 products of weight gradients.")
    fp32_tflops: Number = Field(gt=0, description="Products in fp32, without TF32.")
    attention_tflops: Number = Field(
        gt=0, description="Flash attention over long samples, causal half."
    )
    attention_half_length: Number = Field(
        default=400.0, ge=0, description="Length of samples at which it reaches half of that rate."
    )
    bandwidth_tb_s: Number = Field(
        gt=0, description="Memory traffic of elementwise kernels, in 1e12 bytes/s."
    )
    node_gb_s: Number = Field(
        gt=0, description="Bus bandwidth of collectives inside a node, 1e9 bytes/s."
    )
    network_gb_s: Number = Field(gt=0, description="The same over nodes, all GPUs of each at once.")
    gpus_per_node: int = Field(default=8, ge=1, le=1024, description="GPUs of a node.")
    watts: Number = Field(gt=0, description="Power of the board at full load; no host, no cooling.")


_COLUMNS = [field for field in Gpu.model_fields if field != "gpus_per_node"]
_CARDS = (
    ("a100-40gb", 42.3, _PEAK["A100"], 225.0, 190.0, 16.0, 135.0, 350.0, 1.25, 230.0, 160.0, 400.0),
    ("a100-80gb", 85.0, _PEAK["A100"], 225.0, 190.0, 16.0, 135.0, 350.0, 1.65, 230.0, 160.0, 400.0),
    ("h100-80gb", 85.0, _PEAK["H100"], 600.0, 480.0, 50.0, 296.0, 580.0, 2.7, 370.0, 320.0, 700.0),
    ("h200", 150.0, _PEAK["H100"], 600.0, 480.0, 50.0, 296.0, 580.0, 3.9, 370.0, 320.0, 700.0),
    ("l40s", 47.7, _PEAK["L40S"], 210.0, 175.0, 60.0, 120.0, 350.0, 0.7, 20.0, 18.0, 350.0),
)
GPUS = {str(card[0]): Gpu.model_validate(dict(zip(_COLUMNS, card, strict=True))) for card in _CARDS}


def find_gpu(name_or_path: str) -> Gpu:
    """Return a card of the table by name, or one that a file describes.

    Raises:
        UserError: no such card and no such file, or the file does not describe a card.
    """
    if name_or_path.lower() in GPUS:
        return GPUS[name_or_path.lower()]
    path = expand_home(name_or_path)
    if path.suffix not in (".yaml", ".yml", ".json") and not is_file(path):
        close = difflib.get_close_matches(name_or_path.lower(), GPUS, n=1, cutoff=0.4)
        hint = f"did you mean '{close[0]}'? " if close else ""
        raise UserError(
            f"--gpu '{name_or_path}' is not a card that is known; {hint}known: {', '.join(GPUS)}, "
            "or a YAML or JSON file that describes yours"
        )
    return _described(read_yaml(path, name_or_path).values, name_or_path)


def _described(values: dict[str, object], source: str) -> Gpu:
    fields = Gpu.model_fields
    for key in values:
        if key not in fields:
            hint = did_you_mean(str(key), fields) or f"; known: {', '.join(fields)}"
            raise UserError(f"card {source}: unknown key '{key}'{hint}")
    try:
        return Gpu.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        if first["type"] == "missing":
            meaning = fields[key].description
            raise UserError(f"card {source}: '{key}' is missing: {meaning}") from None
        reason = first["msg"][0].lower() + first["msg"][1:]
        raise UserError(f"card {source}: '{key}' is {first['input']!r}: {reason}") from None


FLASH_BACKWARD = 2.5
"""Flash attention's backward pass makes five products where forward makes two."""

BYTES_A_LOGIT = {"megatron": 52, "in_place": 20, "chunked": 50}
COMPILED_BYTES_A_LOGIT = 6
"""Traffic of cross entropy, forward and backward, by `performance.cross_entropy`, as bf16 kernels
touch it: to fp32 6, log-softmax 8, exponentials 6; chunked: the first two, and 36 in backward. If
the second-level cache keeps a slice, it is less. `in_place`, compiled: logits read twice and
written once."""

COMPILED, REMADE_LAYER, REMADE_ATTENTION = 53 / 63, 23 / 63, 8 / 63
"""Shares of the elementwise traffic: of kernels that torch.compile has joined (52 to 54 tokens ×
hidden size a layer, in the code that inductor made for an H100), and of a layer's or its
attention's forward pass, which `performance.recompute` takes twice."""

RESIDUAL_PASSES, DROPOUT_PASSES = 12, 10
"""Reads and writes of the residual stream in a layer: by its two sums, and by dropout behind each
part."""

LAUNCHES_A_LAYER = 60
SECONDS_A_LAUNCH = 6e-6
HOST_SECONDS = 1e-3
"""A step's waits for the host that are left: the gradient norm and the agreement of the ranks."""


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of one optimizer step, by what takes them.

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
        """Return the whole step."""
        return float(sum(getattr(self, part.name) for part in fields(self)))


def step_seconds(
    work: Workload, gpu: Gpu, passes: int, states: States, trainable: int
) -> StepSeconds:
    """Return the step of one rank; all ranks work alike.

    Args:
        work: of the rank.
        gpu: the card.
        passes: micro batches of a step.
        states: of that rank, for what the update moves.
        trainable: elements that train on that rank.
    """
    layout, memory_rate = work.layout, gpu.bandwidth_tb_s * 1e12
    products = _products(work, gpu)
    attention = _attention(work, gpu)
    elementwise = _elementwise(work) / memory_rate
    entropy = work.tokens * work.vocabulary * bytes_a_logit(work) / memory_rate
    accumulation = trainable * (10 if layout.bf16_optimizer else 12) / memory_rate
    parallel = _tensor_parallel(work, gpu)
    one_pass = products + attention + elementwise + entropy + accumulation + parallel
    launches = max(0.0, work.shape.num_layers * LAUNCHES_A_LAYER * SECONDS_A_LAUNCH - one_pass)
    reduction, gathering = _data_parallel(layout, gpu, trainable, passes, one_pass=one_pass)
    return StepSeconds(
        products=passes * products,
        attention=passes * attention,
        elementwise=passes * elementwise,
        cross_entropy=passes * entropy,
        accumulation=passes * accumulation,
        tensor_parallel=passes * parallel,
        reduction=reduction,
        gathering=gathering,
        update=_update_bytes(layout, states, trainable) / memory_rate
        + _update_products(work, gpu)
        + _exchange(work, gpu),
        launches=passes * launches,
        host=HOST_SECONDS,
    )


def _products(work: Workload, gpu: Gpu) -> float:
    """Return the seconds of products: forward, input gradients, weight gradients."""
    products = Products(work.shape, work.policy, work.phase)
    forward = products.forward
    weight_gradient = forward - products.frozen
    forward_again = products.again(work.performance)
    tokens = work.tokens / work.layout.tensor_parallel_size
    if work.layout.dtype == "fp32":
        return tokens * (2 * forward + forward_again + weight_gradient) / (gpu.fp32_tflops * 1e12)
    seconds = (2 * forward + forward_again) / gpu.gemm_tflops
    seconds += weight_gradient / gpu.weight_gradient_tflops
    return tokens * seconds / 1e12


def _attention(work: Workload, gpu: Gpu) -> float:
    forward_again = work.performance.recompute not in ATTENTION_ONCE
    tokens = work.tokens * work.shape.num_layers / work.layout.tensor_parallel_size
    if work.policy.synthesizer:  # one product with probabilities, over the full square
        rate = gpu.fp32_tflops if work.layout.dtype == "fp32" else gpu.gemm_tflops
        products = (3 if work.policy.trainable else 2) + forward_again
        return tokens * score_products(work.shape, 1.0) * products / (rate * 1e12)
    length = work.shape.sequence_length
    rate = gpu.attention_tflops * length / (length + gpu.attention_half_length)
    if work.layout.dtype == "fp32":  # there is no flash kernel for it
        rate = min(rate, gpu.fp32_tflops / 2)
    # A dense mask skips nothing. Documents attended one by one skip more than the causal half: by
    # how much depends on their lengths.
    flash = work.performance.document_attention == "flash" and work.layout.dtype == "bf16"
    share = 1.0 if work.masked and not flash else 0.5
    passes = 1 + FLASH_BACKWARD + forward_again
    return tokens * 2 * score_products(work.shape, share) * passes / (rate * 1e12)


def bytes_a_logit(work: Workload) -> int:
    """Return the traffic of cross entropy, in bytes a logit."""
    way = work.performance.cross_entropy
    compiled = work.performance.compiles(True, work.layout.zero_stage)
    return COMPILED_BYTES_A_LOGIT if compiled and way == "in_place" else BYTES_A_LOGIT[way]


def _elementwise(work: Workload) -> float:
    """Return the bytes that norms, dropout, residuals and the MLP's and Q, K, V's steps move."""
    policy, head_dim = work.policy, work.shape.head_dim
    residual = work.tokens * work.shape.hidden_size
    compiled = work.performance.compiles(True, work.layout.zero_stage)
    hidden = work.between * work.shape.hidden_size
    passed = [
        (2 * hidden, NORMS[work.shape.norm].passes),
        (work.tokens * work.ffn, MLPS[work.shape.mlp].passes),
    ]
    alone = sum(
        elements * own for elements, (own, joined) in passed if not compiled or joined is None
    )
    between = hidden * (RESIDUAL_PASSES + (DROPOUT_PASSES if work.dropout else 0))
    query_key = work.tokens * (work.heads + work.groups) * head_dim
    adapters = policy.corrections
    sizes = adapter_sizes(work.shape, policy)
    frozen = is_patched(policy, () if policy.trainable else (0,))
    projected = (
        query_key * 2 if frozen else work.tokens * (work.heads + 2 * work.groups) * head_dim * 2
    )
    products = 1 + sum(
        weight.role is None for adapter in adapters for weight in adapter.weights(sizes)
    )
    added = residual * 3 * products if frozen else 0
    # Small blocks: what the two products read and write takes longer than they do.
    if policy.structured:
        projected += query_key * (3 if policy.shared else 6) + residual * 3
    rotary = 0 if work.shape.learned_positions else query_key * 10
    corrected = query_key * sum(adapter.passes[compiled] for adapter in adapters)
    if work.shape.qk_norm:
        corrected += query_key * (QueryKeyNorm.passes[compiled] or 0)
    corrected += sum(elements * (joined or 0) for elements, (_, joined) in passed if compiled)
    mixed = query_key * 8 if policy.frozen_heads else 0
    scores = 0
    if policy.synthesizer:
        projected = rotary = 0
        samples = work.batch if work.dropout or work.masked else 1
        scores = samples * work.heads * work.shape.sequence_length**2 * 24
    moved = between + alone + projected + added + rotary + mixed + scores
    remade = {"none": 0.0, "query_key": 0.0, "attention": REMADE_ATTENTION, "full": REMADE_LAYER}
    again = remade[work.performance.recompute] * (moved + corrected)
    if work.performance.recompute == "query_key":  # made, and rotated
        again = query_key * 3 + residual + rotary / 2
    once = moved * (COMPILED if compiled else 1.0) + corrected
    return work.shape.num_layers * (once + again) * work.layout.element


def _tensor_parallel(work: Workload, gpu: Gpu) -> float:
    """Return the seconds of a layer's four all-reduces, or of their halves and gathers."""
    size = work.layout.tensor_parallel_size
    if size == 1:
        return 0.0
    rate = (gpu.node_gb_s if size <= gpu.gpus_per_node else gpu.network_gb_s) * 1e9
    one = 2 * (size - 1) / size * work.tokens * work.shape.hidden_size * work.layout.element / rate
    return one * (work.shape.num_layers * (5 if work.layout.sequence_parallel else 4) + 2)


def _data_parallel(
    layout: Layout, gpu: Gpu, trainable: int, passes: int, one_pass: float
) -> tuple[float, float]:
    """Return the seconds of (reduction of gradients, gathering of weights) that nothing hides."""
    ranks = layout.data_parallel_size
    if ranks == 1:
        return 0.0, 0.0
    rate = gpu.node_gb_s * 1e9
    if layout.world_size > gpu.gpus_per_node:  # groups that stride over a node share its network
        rate = gpu.network_gb_s * 1e9 / min(layout.tensor_parallel_size, gpu.gpus_per_node)
    once = (ranks - 1) / ranks * trainable / rate
    weights, gradients = once * layout.element, once * BYTES[layout.grad_accum_dtype]
    if layout.zero_stage <= 1:
        # The last pass's backward hides it.
        hidden = one_pass * 2 / 3 if layout.reduces_in_backward else 0.0
        return max(0.0, 2 * gradients - hidden), weights if layout.zero_stage else 0.0
    if layout.zero_stage == 2:  # at every micro batch, while backward runs: two thirds of a pass
        return passes * max(0.0, gradients - one_pass * 2 / 3), weights
    return passes * max(0.0, gradients + 2 * weights - one_pass), 0.0


def _update_bytes(layout: Layout, states: States, trainable: int) -> float:
    """Return the bytes that norm, clipping, staging copies and the optimizer move."""
    own, optimizer = states.own_elements, states.update_traffic
    if layout.zero_stage == 0:
        return FP32 * trainable + optimizer  # the norm reads every gradient
    # Where gradients are reduced as they lie, no staging: three copies of 8 bytes.
    if layout.bf16_optimizer:
        return (22 if layout.reduces_in_backward else 46) * trainable + 2 * own + optimizer
    return 40 * own + optimizer + (16 * trainable if layout.zero_stage == 1 else 0)


def _update_products(work: Workload, gpu: Gpu) -> float:
    """Return the seconds of the matrix products in an update, shared by all ranks."""
    rate = gpu.fp32_tflops if work.newton_schulz == "fp32" else gpu.gemm_tflops
    return update_flops(work) / work.layout.world_size / (rate * 1e12)


def update_flops(work: Workload) -> int:
    """Return the FLOPs of the matrix products in one update, over all ranks."""
    trained = [tensor for tensor in work.tensors() if tensor.trains]
    return sum(rule_of(tensor, work.rules).products(tensor) for tensor in trained)


def _exchange(work: Workload, gpu: Gpu) -> float:
    """Return the seconds in which ranks send each other matrices and their updates, for Muon."""
    layout = work.layout
    whole = (t for t in work.tensors() if t.trains and rule_of(t, work.rules).whole_matrices)
    sent = 2 * sum(tensor.elements for tensor in whole) * BYTES[work.newton_schulz]
    inside = layout.world_size <= gpu.gpus_per_node
    rate = (gpu.node_gb_s if inside else gpu.network_gb_s / gpu.gpus_per_node) * 1e9
    return sent / layout.world_size / rate if layout.world_size > 1 else 0.0
