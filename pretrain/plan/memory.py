"""The memory of one rank, by kind, and its peak.

States that last from step to step are exact: what the audit of an engine finds. Leans on how
DeepSpeed 0.19 cuts and pads: stages 1 and 2 flatten each group of the optimizer and round it up to
2 × the data-parallel ranks, stage 3 cuts every tensor for itself. A test compares each number with
the audit of live engines. All else is an estimate.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from megatron_patches.recipe.matrices import AT_A_TIME, has_matrices, stacks
from megatron_patches.recipe.optimizers import Rule, rule_of
from megatron_patches.recipe.tensors import LOGITS_AT_A_TIME
from pretrain.plan.activations import Activations, activations_of
from pretrain.plan.workload import BYTES, FP32, Workload

BUCKET = 500_000_000
"""Elements that DeepSpeed's BF16 optimizer copies together for a reduction."""

CONTEXT_BYTES = 1_500_000_000
"""Assumed for the CUDA context, NCCL's own buffers, workspaces and what the allocator cannot fill.
"""

Group = tuple[Rule, tuple[int, int], bool, float]
"""A group of the optimizer: the rule of its update, the phases in which its weights train,
whether weight decay leaves them alone, the factor of their learning rate.
"""


@dataclass(frozen=True)
class RankTensors:
    """Elements that one tensor-parallel rank holds of the model, before ZeRO cuts them up.

    Attributes:
        weights: (elements, optimizer group) of every parameter.
        frozen: elements of buffers.
    """

    weights: tuple[tuple[int, Group], ...]
    frozen: int

    @property
    def trainable(self) -> int:
        """Return the elements that train."""
        return sum(elements for elements, _ in self.weights)


def rank_tensors(work: Workload, rank: int) -> RankTensors:
    """Return what a tensor-parallel rank holds.

    Args:
        work: of the rank.
        rank: of tensor parallelism.
    """
    weights, frozen = [], 0
    for tensor in work.tensors():
        elements = tensor.rank_elements(rank, work.tensor_parallel_size)
        if tensor.phase is None:
            frozen += elements
        else:
            rule = rule_of(tensor, work.config.optimizer.rules)
            factor = work.config.optimizer.rate_factor(tensor)
            weights.append((elements, (rule, tensor.span, not tensor.decay, factor)))
    return RankTensors(tuple(weights), frozen)


@dataclass(frozen=True)
class States:
    """Bytes of one rank that last from step to step.

    Attributes:
        gradients: what gradients are added up in, over micro batches and ranks.
        autograd_gradients: what backward writes before that, where it is not the same tensor.
        own_elements: trainable elements that this rank updates.
        update_traffic: bytes that their update reads and writes, which are no memory of their own.
    """

    weights: int
    frozen_bank: int
    gradients: int
    autograd_gradients: int
    master_weights: int
    optimizer_states: int
    own_elements: int
    update_traffic: int

    @property
    def total(self) -> int:
        """Return the sum of all."""
        gradients = self.gradients + self.autograd_gradients
        updated = self.master_weights + self.optimizer_states
        return self.weights + self.frozen_bank + gradients + updated


def rank_states(held: RankTensors, work: Workload) -> States:
    """Return the bytes of a rank; all data-parallel ranks hold equally much.

    Args:
        held: what the rank holds of the model.
        work: of the rank.
    """
    layout, element = work.layout, work.element
    by_rule = _own_elements(held, work)
    own = by_rule.total()
    keeps_masters = layout.zero_stage > 0 or layout.dtype == "bf16"
    gradients, written = held.trainable * element, 0
    if work.bf16_optimizer:
        gradients = own * layout.data_parallel_size * FP32
        one_at_a_time = max(elements for elements, _ in held.weights)
        written = (one_at_a_time if work.immediate_grad_update else held.trainable) * element
    elif layout.zero_stage >= 2:
        gradients = own * BYTES[work.config.precision.grad_accum_dtype]
    return States(
        weights=(own if layout.zero_stage == 3 else held.trainable) * element,
        frozen_bank=held.frozen * element,
        gradients=gradients,
        autograd_gradients=written,
        master_weights=own * FP32 if keeps_masters else 0,
        optimizer_states=sum(rule.state_bytes * count for rule, count in by_rule.items()),
        own_elements=own,
        update_traffic=sum(rule.traffic * count for rule, count in by_rule.items()),
    )


def _own_elements(held: RankTensors, work: Workload) -> Counter[Rule]:
    """Return the elements by rule that one data-parallel rank updates, with padding."""
    layout = work.layout
    own: Counter[Rule] = Counter()
    groups: Counter[Group] = Counter()
    for elements, group in held.weights:
        groups[group] += elements
    if layout.zero_stage in (1, 2):
        for group, elements in groups.items():
            own[group[0]] += 2 * -(-elements // (2 * layout.data_parallel_size))
        return own
    ranks = layout.data_parallel_size if layout.zero_stage == 3 else 1
    for elements, group in held.weights:
        own[group[0]] += -(-elements // ranks)
    return own


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, of those tensor-parallel ranks that need most.

    Attributes:
        states: exact; all else is an estimate.
        activations: kept between forward and backward.
        logits: at the moment of a pass when they need most.
        layer_gradients: what the backward pass of one layer has at once, when the logits are gone:
            gradients, and the activations that it makes again.
        communication_buffers: those of collectives while backward runs.
        update_buffers: copies that reduction and update make, when activations are gone.
    """

    states: States
    activations: int
    logits: int
    layer_gradients: int
    communication_buffers: int
    update_buffers: int
    context: int

    @property
    def peak(self) -> int:
        """Return the larger of two moments: the end of a forward pass, and the update."""
        passing = (
            self.activations + max(self.logits, self.layer_gradients) + self.communication_buffers
        )
        return self.states.total + self.context + max(passing, self.update_buffers)


def memory_of(work: Workload) -> Memory:
    """Return the memory of the rank that needs most."""
    # Frozen heads are spread over the layer, so ranks may hold unequal shares of them. Without any,
    # every rank needs the same.
    ranks = range(work.tensor_parallel_size if work.policy.frozen_heads else 1)
    return max((_of_rank(work, rank) for rank in ranks), key=lambda memory: memory.peak)


def _of_rank(work: Workload, rank: int) -> Memory:
    held = rank_tensors(work, rank)
    states = rank_states(held, work)
    activations = activations_of(work, rank)
    return Memory(
        states=states,
        activations=activations.kept(work.config.performance.recompute),
        logits=logit_bytes(work),
        layer_gradients=layer_gradient_bytes(work, activations),
        communication_buffers=_communication(work, held) if work.layout.world_size > 1 else 0,
        update_buffers=_update(held, states, work) + _orthogonalising(work, held),
        context=CONTEXT_BYTES,
    )


def logit_bytes(work: Workload) -> int:
    """Return the most that logits need at once, in cross entropy.

    By megatron's own in bf16 the fp32 gradient beside its bf16 copy; in fp32 the gradient beside a
    new weight gradient of the output layer, which is then added to the one that is there. The
    others have no more than `LOGITS_AT_A_TIME` in fp32, once or, for soft cap and z-loss, several
    times. Compiled, `in_place` has none of these; this is not counted.
    """
    element = work.element
    logits, weight = work.tokens * work.vocabulary, work.vocabulary * work.shape.hidden_size
    at_a_time = min(logits, LOGITS_AT_A_TIME)
    softcap = work.config.model.logit_softcap is not None
    if work.config.performance.cross_entropy == "in_place":
        in_fp32 = 4 if element == FP32 else 8
        if softcap or work.config.model.z_loss > 0:
            in_fp32 = 16 if softcap or element < FP32 else 12
        return logits * element + max(at_a_time * in_fp32, weight * element)
    if work.config.performance.cross_entropy == "chunked":
        return at_a_time * (26 if softcap else 22) + weight * element
    copies = element if work.layout.dtype == "bf16" else 0
    if softcap:  # its tanh and its result, both in fp32
        return logits * (3 * FP32 + copies)
    return logits * (FP32 + copies) + (0 if copies else weight * FP32)


def layer_gradient_bytes(work: Workload, activations: Activations) -> int:
    """Return the bytes of one layer's gradients while its backward pass runs.

    An MLP has gradients of all that it keeps, and of a weight. What is recomputed of a whole layer
    is there then too; the attention alone is made again later, when these gradients are gone.

    Args:
        work: of the rank.
        activations: of the rank.
    """
    layers, size = work.shape.num_layers, work.tensor_parallel_size
    mlp = [tensor for tensor in work.tensors() if ".mlp." in tensor.name]
    weight = max(tensor.rank_elements(0, size) for tensor in mlp) * work.element
    gradients = activations.mlp // layers + weight
    recompute = work.config.performance.recompute
    again = activations.made_again(recompute) // layers
    return gradients + again if recompute == "full" else max(gradients, again)


def _communication(work: Workload, held: RankTensors) -> int:
    """Return the bytes of DeepSpeed's buckets in backward, and a gathered sequence."""
    stage, zero = work.layout.zero_stage, work.zero_settings
    bucket = min(int(zero.get("reduce_bucket_size", BUCKET)), held.trainable) * work.element
    gathered = 0
    if work.layout.sequence_parallel:
        gathered = work.tokens * work.shape.hidden_size * work.element
    if stage == 2:  # one bucket fills while the other is reduced
        return gathered + bucket * (2 if zero.get("overlap_comm") else 1)
    if stage == 3:
        live = min(int(zero.get("stage3_max_live_parameters", 10**9)), held.trainable)
        return gathered + bucket + live * work.element
    return gathered + (bucket if stage == 1 and not work.bf16_optimizer else 0)


def _update(held: RankTensors, states: States, work: Workload) -> int:
    if work.reduces_in_backward:
        return 0
    if work.bf16_optimizer:
        return min(held.trainable, BUCKET) * FP32 if work.layout.data_parallel_size > 1 else 0
    return states.own_elements * FP32 if work.layout.zero_stage > 0 else 0


def _orthogonalising(work: Workload, held: RankTensors) -> int:
    """Return the bytes of the matrices that Muon has at once, and of what ranks send each other."""
    layout, element = work.layout, BYTES[work.newton_schulz]
    own = sum(elements for elements, group in held.weights if group[0].whole_matrices)
    if not own:
        return 0
    taken = filter(has_matrices, work.tensors())
    largest = max(each.rows * each.columns for tensor in taken for each in stacks(tensor))
    at_a_time = 4 * min(own, max(AT_A_TIME, largest))  # X, the next X, and two of at most its size
    if layout.world_size == 1:
        return at_a_time * element
    share = own // layout.data_parallel_size
    answered = own if layout.zero_stage == 0 else share
    return max(share + at_a_time + answered, 2 * answered) * element
