"""The memory of one rank, by kind, and its peak.

States that last from step to step are exact: they equal what the audit of an engine finds, as a
test shows. They rely on how DeepSpeed 0.19 splits and pads: stages 1 and 2 flatten each group of
the optimizer and round it up to 2 × the data-parallel ranks, stage 3 splits every tensor by itself.
All else is an estimate.
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
"""Assumed for the CUDA context, NCCL's buffers, workspaces and gaps that no allocation can fill."""

Group = tuple[Rule, tuple[int, int], float, float]
"""A group of the optimizer: the rule of its update, the phases in which its weights train,
the factors of their weight decay and of their learning rate.
"""


@dataclass(frozen=True)
class RankTensors:
    """Elements of the model on one tensor-parallel rank, before ZeRO splits them.

    Attributes:
        weights: (elements, optimizer group) of every parameter.
        frozen: Elements of buffers.
    """

    weights: tuple[tuple[int, Group], ...]
    frozen: int

    @property
    def trainable(self) -> int:
        """Return the elements that train."""
        return sum(elements for elements, _ in self.weights)


def rank_tensors(work: Workload, rank: int) -> RankTensors:
    """Return the elements of the model on a rank of tensor parallelism."""
    weights, frozen = [], 0
    for tensor in work.tensors():
        elements = tensor.rank_elements(rank, work.tensor_parallel_size)
        if tensor.phase is None:
            frozen += elements
        else:
            rule = rule_of(tensor, work.config.optimizer.rules)
            factor = work.config.optimizer.rate_factor(tensor)
            decay = work.config.optimizer.decay_factor(tensor)
            weights.append((elements, (rule, tensor.span, decay, factor)))
    return RankTensors(tuple(weights), frozen)


@dataclass(frozen=True)
class States:
    """Bytes of one rank that last from step to step.

    Attributes:
        gradients: Where gradients are summed over micro batches and ranks.
        autograd_gradients: What backward writes before that, where it is not the same tensor.
        own_elements: Trainable elements that this rank updates.
        update_traffic: Bytes that their update reads and writes; no memory of its own.
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
        """Return the sum of all states."""
        gradients = self.gradients + self.autograd_gradients
        updated = self.master_weights + self.optimizer_states
        return self.weights + self.frozen_bank + gradients + updated


def rank_states(held: RankTensors, work: Workload) -> States:
    """Return the bytes of a rank's states; all data-parallel ranks hold the same number."""
    layout, element = work.layout, work.element
    by_rule = _own_elements(held, work)
    rank_elements = by_rule.total()
    keeps_masters = layout.zero_stage > 0 or layout.dtype == "bf16"
    gradients, written = held.trainable * element, 0
    if work.bf16_optimizer:
        # The BF16 optimizer writes bf16 gradients into a flat fp32 copy, padded over the ranks.
        gradients = rank_elements * layout.data_parallel_size * FP32
        one_at_a_time = max(elements for elements, _ in held.weights)
        written = (one_at_a_time if work.immediate_grad_update else held.trainable) * element
    elif layout.zero_stage >= 2:
        gradients = rank_elements * BYTES[work.config.precision.grad_accum_dtype]
    return States(
        weights=(rank_elements if layout.zero_stage == 3 else held.trainable) * element,
        frozen_bank=held.frozen * element,
        gradients=gradients,
        autograd_gradients=written,
        master_weights=rank_elements * FP32 if keeps_masters else 0,
        optimizer_states=sum(rule.state_bytes * count for rule, count in by_rule.items()),
        own_elements=rank_elements,
        update_traffic=sum(rule.traffic * count for rule, count in by_rule.items()),
    )


def _own_elements(held: RankTensors, work: Workload) -> Counter[Rule]:
    """Return the elements by rule that one data-parallel rank updates, padding included."""
    layout = work.layout
    elements_by_rule: Counter[Rule] = Counter()
    groups: Counter[Group] = Counter()
    for elements, group in held.weights:
        groups[group] += elements
    if layout.zero_stage in (1, 2):
        for group, elements in groups.items():
            elements_by_rule[group[0]] += 2 * -(-elements // (2 * layout.data_parallel_size))
        return elements_by_rule
    ranks = layout.data_parallel_size if layout.zero_stage == 3 else 1
    for elements, group in held.weights:
        elements_by_rule[group[0]] += -(-elements // ranks)
    return elements_by_rule


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, of the tensor-parallel rank that needs most.

    Attributes:
        states: Exact; all else is an estimate.
        activations: Kept between forward and backward.
        logits: At the moment of a pass when they need most.
        layer_gradients: Most that the backward pass of one layer holds once the logits are gone:
            gradients, and the activations that it makes again.
        communication_buffers: Buffers of collectives while backward runs.
        update_buffers: Copies made by reduction and update, after the activations are gone.
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
        in_backward = max(self.logits, self.layer_gradients) + self.communication_buffers
        passing = self.activations + in_backward
        return self.states.total + self.context + max(passing, self.update_buffers)


def memory_of(work: Workload) -> Memory:
    """Return the memory of the rank that needs most."""
    # Frozen heads are spread unevenly over a layer's ranks. Without any, every rank needs the same.
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
    """Return the most bytes that logits need at once, in cross entropy.

    megatron's own cross entropy holds, in bf16, the fp32 gradient beside its bf16 copy; in fp32,
    the gradient beside a new weight gradient of the output layer, which is then added to the old
    one. The other two hold at most `LOGITS_AT_A_TIME` in fp32, once or, for soft cap and z-loss,
    several times. Compiled, `in_place` holds none of these, which is not counted here.
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
    if softcap:  # the tanh and its result, both in fp32
        return logits * (3 * FP32 + copies)
    return logits * (FP32 + copies) + (0 if copies else weight * FP32)


def layer_gradient_bytes(work: Workload, activations: Activations) -> int:
    """Return the bytes of one layer's gradients while its backward pass runs.

    An MLP has gradients of all that it keeps, and of a weight. The recomputed activations of a
    whole layer exist at the same time; those of attention alone are made later, when these
    gradients are gone.
    """
    layers, size = work.shape.num_layers, work.tensor_parallel_size
    mlp = [tensor for tensor in work.tensors() if ".mlp." in tensor.name]
    weight = max(tensor.rank_elements(0, size) for tensor in mlp) * work.element
    gradients = activations.mlp // layers + weight
    recompute = work.config.performance.recompute
    again = activations.made_again(recompute) // layers
    return gradients + again if recompute == "full" else max(gradients, again)


def _communication(work: Workload, held: RankTensors) -> int:
    """Return the bytes of DeepSpeed's buckets in backward, and of a gathered sequence."""
    stage = work.layout.zero_stage
    zero = work.resolved.deepspeed.get("zero_optimization", {})
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
    """Return the bytes of Muon's matrices in work, and of what the ranks send each other."""
    layout, element = work.layout, BYTES[work.newton_schulz]
    total = sum(elements for elements, group in held.weights if group[0].whole_matrices)
    if not total:
        return 0
    matrices = filter(has_matrices, work.tensors())
    largest = max(stack.rows * stack.columns for tensor in matrices for stack in stacks(tensor))
    # X, the next X, and two of at most its size.
    at_a_time = 4 * min(total, max(AT_A_TIME, largest))
    if layout.world_size == 1:
        return at_a_time * element
    share = total // layout.data_parallel_size
    received = total if layout.zero_stage == 0 else share
    # Two moments: while matrices are orthogonalised, and while the updates are put back.
    return max(share + at_a_time + received, 2 * received) * element
