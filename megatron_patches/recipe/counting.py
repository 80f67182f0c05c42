"""Parameter and FLOP counts of a model: sums over its tensors, nothing measured.

Symbols: L num_layers, d hidden_size, H query heads, G key/value heads, h head_dim, F
ffn_hidden_size, V vocab_size, s sequence_length, c the share of the score matrix that is counted
(1/2 when causal, 1 when full). One multiply-add is 2 FLOPs. Norms, softmax, GELU, embedding
look-ups and the optimizer are not counted, as is usual.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatron_patches.recipe.parts import ModelShape, Tensor
from megatron_patches.recipe.phases import last_steps
from megatron_patches.recipe.policy import QKPolicy
from megatron_patches.recipe.tensors import tensors
from megatron_patches.recipe.variants import ORDINARY, VARIANTS

CAUSAL = 0.5
# The backward pass makes two GEMMs (input and weight gradient) for each one of the forward pass.
FORWARD_AND_BACKWARD = 3


@dataclass(frozen=True)
class ParameterCount:
    """Weights of the whole model, each once.

    A frozen bank counts although it is stored in buffers.
    """

    total: int
    frozen: int

    @property
    def trainable(self) -> int:
        """Return the weights that the optimizer updates."""
        return self.total - self.frozen


def count_parameters(shape: ModelShape, policy: QKPolicy, phase: int = 0) -> ParameterCount:
    """Return the parameters of the whole model, in a training phase.

    For ordinary attention, untied embeddings and rotary positions

        total = 2 V d + L [d (2 H + 2 G) h + 2 d F + 4 d] + 2 d

    where 4 d and 2 d are LayerNorms. Structured rows of W_Q and W_K are a + b numbers in place of d
    = a b; a synthesizer has L H s² or 2 L H s k elements of score matrices in the place of W_Q and
    W_K.

    Args:
        phase: number of the phase in the policy's schedule, from 0.
    """
    all_tensors = tensors(shape, policy, phase)
    total = sum(tensor.elements for tensor in all_tensors)
    frozen = sum(tensor.elements for tensor in all_tensors if not tensor.trains)
    return ParameterCount(total, frozen)


def model_flops_per_token(
    shape: ModelShape, policy: QKPolicy = VARIANTS[ORDINARY], causal_share: float = CAUSAL
) -> float:
    """Return the FLOPs per token of a training step if all weights train.

    Adapters do not count, and structured rows count as whole ones: for all but a synthesizer it is

        3 (L [2 d (2 H + 2 G) h  +  4 d F  +  4 c s H h]  +  2 d V)

    Args:
        causal_share: c, the share of the score matrix that is counted.

    Returns:
        3 × forward. `mfu` is made of this.
    """
    rank = policy.synthesizer_rank
    ordinary = QKPolicy(init="default", trainable=True, scores=policy.scores, synthesizer_rank=rank)
    return FORWARD_AND_BACKWARD * forward_flops_per_token(shape, ordinary, 0, causal_share)


def executed_flops_per_token(
    shape: ModelShape, policy: QKPolicy, phase: int = 0, causal_share: float = CAUSAL
) -> float:
    """Return the FLOPs per token that a training step executes, without recomputation.

    Freezing W_Q and W_K removes their weight-gradient GEMMs, 2 FLOPs an element, and nothing else:
    the gradient still flows through the scores to the layer's input. For ordinary multi-head
    attention that is 4 L d². Freezing score matrices removes the gradient of the probabilities, 2 c
    s H h a layer. Structured rows cost 2 (a + b) FLOPs in place of 2 d, forward and backward.

    Args:
        phase: number of the phase in the policy's schedule, from 0.
        causal_share: c, the share of the score matrix that is counted.
    """
    executed = FORWARD_AND_BACKWARD * forward_flops_per_token(shape, policy, phase, causal_share)
    # Frozen scores need no gradient of the probabilities, which is a product per layer.
    if policy.synthesizer and not policy.trainable:
        return executed - shape.num_layers * score_products(shape, causal_share)
    # A frozen matrix needs no weight gradient, one of the three products.
    frozen = (tensor for tensor in tensors(shape, policy, phase) if not tensor.trains)
    return executed - 2 * multiplications(frozen)


def executed_flops_of_phases(shape: ModelShape, policy: QKPolicy) -> list[int]:
    """Return `executed_flops_per_token` of each phase of the policy's schedule, in whole FLOPs."""
    phases = range(len(policy.phases) + 1)
    return [round(executed_flops_per_token(shape, policy, number)) for number in phases]


def executed_flops_of_steps(costs: Sequence[int], policy: QKPolicy, steps: int) -> int:
    """Return the exact sum of FLOPs per token over the steps of a run, each in its phase.

    Args:
        costs: FLOPs per token of each phase, from `executed_flops_of_phases`.
    """
    bounds = pairwise([0, *last_steps(policy.phases, steps), steps])
    return sum((end - begin) * cost for (begin, end), cost in zip(bounds, costs, strict=True))


def forward_flops_per_token(
    shape: ModelShape, policy: QKPolicy, phase: int = 0, causal_share: float = CAUSAL
) -> float:
    """Return the FLOPs of a forward pass, per token, with adapters and structured rows' factors.

    The default c = 1/2 counts the scores that a causal model needs; a kernel that makes the full
    matrix and masks it does more. Making a synthesizer's S_h of its factors happens once a micro
    batch, not for each token, and is not counted.

    Args:
        phase: number of the phase in the policy's schedule, from 0.
        causal_share: c, the share of the score matrix that is counted.
    """
    products = 1 if policy.synthesizer else 2  # of probabilities with values; of queries with keys
    scores = products * shape.num_layers * score_products(shape, causal_share)
    return 2 * multiplications(tensors(shape, policy, phase)) + scores


def multiplications(some: Iterable[Tensor]) -> int:
    """Return the multiply-adds per token of some tensors in a forward pass."""
    return sum(tensor.multiplications for tensor in some)


def score_products(shape: ModelShape, causal_share: float = CAUSAL) -> float:
    """Return 2 c s H h.

    Args:
        causal_share: c, the share of the score matrix that is counted.

    Returns:
        FLOPs per token of a layer's products q·k, or of probabilities with values.
    """
    return 2 * causal_share * shape.sequence_length * shape.query_size
