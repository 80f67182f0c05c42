"""How many parameters a model has, how many FLOPs a token costs: formulas, nothing measured.

Symbols: L num_layers, d hidden_size, H query heads, G key/value heads, h head_dim, F ffn_hidden_size,
V vocab_size, s sequence_length, c the share of the score matrix that is counted (1/2 when causal, 1 when
full). One multiply-add is 2 FLOPs.
Norms, softmax, GELU, embedding look-ups and the optimizer are not counted, as is usual.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron_patches.recipe.policy import QKPolicy
from megatron_patches.recipe.recipes import score_recipe

CAUSAL = 0.5
# The backward pass makes two GEMMs (input and weight gradient) for each one of the forward pass.
FORWARD_AND_BACKWARD = 3


@dataclass(frozen=True)
class ModelShape:
    """The sizes that the counts depend on."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    sequence_length: int
    learned_positions: bool
    tied_embeddings: bool

    @property
    def query_size(self) -> int:
        """H h: rows of W_Q, and the width that the attention output projection reads."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_size(self) -> int:
        """G h: rows of W_K, and of W_V."""
        return self.num_query_groups * self.head_dim


@dataclass(frozen=True)
class AttentionCount:
    """What a policy makes of the Query/Key weights of the whole model.

    Attributes:
        frozen: elements of W_Q and W_K, of factors in their place, or of score matrices, that never train.
        spared: elements of frozen W_Q and W_K beyond those of the factors in their place.
        adapters: trainable elements added to them.
        adapter_multiplications: multiply-adds that the adapters add to the forward pass of one token.
        scores: elements of a synthesizer's score matrices, which stand in the place of W_Q and W_K; frozen or
            not.
    """

    frozen: int = 0
    spared: int = 0
    adapters: int = 0
    adapter_multiplications: int = 0
    scores: int = 0


VANILLA = AttentionCount()
"""Ordinary attention: nothing frozen, nothing added."""


@dataclass(frozen=True)
class ParameterCount:
    """Weights of the whole model, each once."""

    total: int
    frozen: int

    @property
    def trainable(self) -> int:
        """Weights that the optimizer updates."""
        return self.total - self.frozen


def query_key_parameters(shape: ModelShape) -> int:
    """W_Q and W_K of all layers: L d (H + G) h; for ordinary multi-head attention (h = d / H) 2 L d²."""
    return shape.num_layers * shape.hidden_size * (shape.query_size + shape.key_size)


def count_attention(shape: ModelShape, policy: QKPolicy, phase: int = 0) -> AttentionCount:
    """Frozen and added weights of all layers.

    Args:
        phase: of a run in which layers become trainable on the way (see `phases`).

    Raises:
        MethodError: the policy names layers or heads that this shape does not have.
    """
    recipe = score_recipe(
        policy, seed=0, num_attention_heads=shape.num_attention_heads, sequence_length=shape.sequence_length
    )
    if recipe is not None:
        scores = shape.num_layers * recipe.elements_per_layer
        return AttentionCount(frozen=0 if policy.trainable else scores, scores=scores)
    h, d, rank = shape.head_dim, shape.hidden_size, policy.low_rank
    queries_per_group = shape.num_attention_heads // shape.num_query_groups
    columns = policy.stored_columns(d, h)
    frozen = spared = adapters = multiplications = 0
    for frozen_groups in policy.frozen_groups(shape.num_layers, shape.num_query_groups, phase):
        groups = len(frozen_groups)
        heads = groups * queries_per_group
        frozen += (heads + groups) * h * columns
        spared += (heads + groups) * h * (d - columns)
        matrices = 0
        if groups and "low_rank" in policy.adapters:
            matrices += 2 * rank * d + (heads + groups) * h * rank
        if groups and "core" in policy.adapters:
            matrices += heads * h * h
        multiplications += matrices
        adapters += matrices
        adapters += (heads + groups) * h if "qk_norm" in policy.adapters else 0
        adapters += heads if "logit_scale" in policy.adapters else 0
    return AttentionCount(frozen, spared, adapters, multiplications)


def count_parameters(shape: ModelShape, attention: AttentionCount) -> ParameterCount:
    """Parameters of the whole model; the frozen bank counts as parameters although it is stored as a buffer.

        total = V d (twice if the output layer is untied) + s d if positions are learned
              + L [d (2 H + 2 G) h  +  2 d F  +  4 d] + 2 d + adapters

    4 d and 2 d are LayerNorm weights and biases: two norms a layer, one at the end. Nothing else has a bias.
    A synthesizer has L H s² or 2 L H s k elements of score matrices and no L d (H + G) h of W_Q and W_K.
    Structured rows of W_Q and W_K are a + b numbers instead of d = a b.
    """
    d = shape.hidden_size
    query_key = attention.scores - query_key_parameters(shape) if attention.scores else -attention.spared
    embeddings = shape.vocab_size * d * (1 if shape.tied_embeddings else 2)
    positions = shape.sequence_length * d if shape.learned_positions else 0
    layer = 2 * d * (shape.query_size + shape.key_size) + 2 * d * shape.ffn_hidden_size + 4 * d
    return ParameterCount(
        total=embeddings + positions + shape.num_layers * layer + 2 * d + attention.adapters + query_key,
        frozen=attention.frozen,
    )


def checkpoint_bytes(count: ParameterCount) -> int:
    """Size of one checkpoint: an fp32 master and Adam's two fp32 moments of every trainable parameter."""
    return count.trainable * 12


def forward_flops_per_token(
    shape: ModelShape, attention: AttentionCount = VANILLA, causal_share: float = CAUSAL
) -> float:
    """FLOPs of one forward pass, per token.

        L [2 d (2 H + 2 G) h  +  4 d F  +  4 c s H h]  +  2 d V

    For ordinary multi-head attention (G = H, h = d / H) with F = f d: L (8 d² + 4 f d² + 4 c s d) + 2 d V.
    The default c = 1/2 counts the scores that a causal model needs; a kernel that makes the full matrix and
    masks it does more.

    A synthesizer has no products with W_Q and W_K, 2 d (H + G) h, and none of q with k, half of the last term
    of a layer. Making S_h of its factors happens once a micro batch, not for each token, and is not counted.
    """
    d = shape.hidden_size
    projections = 4 * d * (shape.query_size + shape.key_size)
    scores = 2 * score_products(shape, causal_share)
    layers = shape.num_layers * (projections + 4 * d * shape.ffn_hidden_size + scores)
    if attention.scores:
        layers -= 2 * query_key_parameters(shape) + shape.num_layers * score_products(shape, causal_share)
    return layers + 2 * d * shape.vocab_size


def executed_forward_flops_per_token(
    shape: ModelShape, attention: AttentionCount, causal_share: float = CAUSAL
) -> float:
    """What a forward pass really executes: with the adapters, and structured W_Q and W_K as two products."""
    added = attention.adapter_multiplications - attention.spared
    return forward_flops_per_token(shape, attention, causal_share) + 2 * added


def score_products(shape: ModelShape, causal_share: float = CAUSAL) -> float:
    """2 c s H h: FLOPs per token of q·k, and of probabilities times values, in one layer's forward pass."""
    return 2 * causal_share * shape.sequence_length * shape.query_size


def model_flops_per_token(
    shape: ModelShape, attention: AttentionCount = VANILLA, causal_share: float = CAUSAL
) -> float:
    """FLOPs per token of a training step if all weights train: 3 × forward. `mfu` is made of this."""
    return FORWARD_AND_BACKWARD * forward_flops_per_token(shape, attention, causal_share)


def executed_flops_per_token(
    shape: ModelShape, attention: AttentionCount, causal_share: float = CAUSAL
) -> float:
    """FLOPs per token that a training step really executes. `hfu` is made of this.

    Freezing W_Q and W_K removes their weight-gradient GEMMs, 2 FLOPs an element, and nothing else: the
    gradient still flows through the scores to the layer's input. For ordinary multi-head attention that is 4
    L d². Freezing score matrices removes the gradient of the probabilities, 2 c s H h a layer. Structured
    rows cost 2 (a + b) FLOPs in place of 2 d, forward and backward.
    """
    executed = FORWARD_AND_BACKWARD * executed_forward_flops_per_token(shape, attention, causal_share)
    if attention.scores:
        return executed - (shape.num_layers * score_products(shape, causal_share) if attention.frozen else 0)
    return executed - 2 * attention.frozen


# Dense bf16 tensor-core FLOP/s in units of 1e12, from NVIDIA's data sheets (some print only twice that, the
# figure with sparsity). The first match wins, so a narrower name stands before the wider one.
PEAK_BF16_TFLOPS = (
    ("GH200", 989.4),
    ("H200 NVL", 835.5),
    ("H200", 989.4),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.5),
    ("H100", 989.4),
    ("H800 PCIe", 756.0),
    ("H800", 989.4),
    ("A100", 312.0),
    ("A800", 312.0),
    ("A30", 165.0),
    ("A40", 149.7),
    ("A10", 125.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
    ("RTX 4090", 165.2),
    ("RTX 3090", 71.0),
)


def peak_flops(device_name: str, dtype: str = "bf16") -> float | None:
    """Peak dense FLOP/s of a device, or None if it is not known.

    Args:
        device_name: as `torch.cuda.get_device_name` gives it.
        dtype: "bf16" or "fp32". There is no entry for fp32: its peak depends on whether TF32 is allowed.

    A slice of a device (MIG) is not known either: the name does not say how much of the arithmetic it owns.
    """
    if dtype != "bf16" or re.search(r"\bMIG\b", device_name):
        return None
    for name, tflops in PEAK_BF16_TFLOPS:
        if re.search(rf"\b{name}\b", device_name, re.IGNORECASE):
            return tflops * 1e12
    return None
