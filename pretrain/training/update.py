"""The update of an engine's weights: made only from good numbers, and what a run does after it.

DeepSpeed does not ask before it moves the weights, and what it does with a gradient norm that is
not finite depends on ZeRO stage, precision and settings: it skips the update without a word, or
makes it. All its optimizers end in `step` of the optimizer that this program gave them, after the
global norm is known and, under ZeRO, once for every group. There the decision falls, on the device,
without waiting for it: a hook tells our optimizer whether it is allowed to change weights, states
and step counts. The engine then ends the step as always: its buffers are free for the next one.

What else a run does around an update is an `AfterUpdate`: QK-Clip, norms of weights, the audit of
the first update. `actions_after_update` lists them in the order in which they act.

Version-sensitive: DeepSpeed 0.19 keeps the global norm in `optimizer._global_grad_norm` when our
optimizer is called, negative or infinite where a part of it was not finite; it casts and gathers
the fp32 weights after our optimizer's `step`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from typing_extensions import override

from megatron_patches.recipe.parts import ModelShape, Tensor
from pretrain.checkpoint.format import MASTER
from pretrain.checkpoint.slices import Slice, slices_of_rank
from pretrain.config.sections import TelemetrySection
from pretrain.ranks.groups import ParallelContext
from pretrain.runs.tags import SPECTRAL_NORM, UPDATE_NORM, WEIGHT_NORM


@dataclass(frozen=True)
class Update:
    """The outcome of an update, as numbers on the device.

    Attributes:
        made: 1 if the weights moved, else 0.
        gradient_norm: the global norm before clipping, infinite where it was not finite.
    """

    made: torch.Tensor
    gradient_norm: torch.Tensor


class GuardedUpdate:
    """The optimizer step of one engine. Norms are reduced over all ranks, so all decide alike."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._allowed: torch.Tensor | None = (
            None  # None: nobody has decided, as while a checkpoint is loaded
        )
        self._largest_norm = math.inf
        self._decided: Update | None = None
        self._hook = engine.basic_optimizer.register_step_pre_hook(self._before_update)

    def detach(self) -> None:
        """Let go of the engine."""
        self._hook.remove()
        del self._engine

    def make(self, allowed: torch.Tensor, largest_norm: float = math.inf) -> Update:
        """Step the engine; the weights move if allowed and the norm is finite (collective).

        Waits for the device only where DeepSpeed does, to learn the norm it clips by.

        Args:
            allowed: a truth value on the device, the same on all ranks.
            largest_norm: a norm above it does not move the weights either; the same on all ranks.
        """
        self._allowed, self._largest_norm, self._decided = allowed, largest_norm, None
        self._engine.step()
        self._allowed = None
        self._engine.basic_optimizer.allow(None)
        if self._decided is not None:
            return self._decided
        none = torch.zeros((), dtype=torch.float64, device=allowed.device)
        # DeepSpeed has skipped the update by itself.
        return Update(made=none, gradient_norm=none + torch.inf)

    def _before_update(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        if self._allowed is None:
            return
        if self._decided is None:
            self._decided = self._decide(self._allowed)
        optimizer.allow(self._decided.made)

    def _decide(self, allowed: torch.Tensor) -> Update:
        norm = torch.as_tensor(
            self._engine.optimizer._global_grad_norm, dtype=torch.float64, device=allowed.device
        ).reshape(())
        norm = torch.where(norm >= 0, norm, torch.inf)  # NaN too
        good = allowed & norm.isfinite() & (norm <= self._largest_norm)
        return Update(made=good.double(), gradient_norm=norm)


class AfterUpdate:
    """Something that a run does after updates of the weights, for as long as one engine lives.

    Attributes:
        name: Of what `note` returns, in audit.json.
    """

    name: ClassVar[str]

    def due(self, step: int) -> bool:
        """Return whether the update of a step concerns it; the same on every rank."""
        return True

    def before(self) -> None:
        """Read what the update is going to overwrite."""

    def after(self) -> Mapping[str, float]:
        """Change weights that the update has moved, or measure them.

        Nothing here may wait for the device at every step.

        Returns:
            {tag of `runs.tags`: value} for the record of the step; a step that has some is written.
        """
        return {}

    def note(self) -> Mapping[str, Any] | None:
        """Return what the audit is to say of an update that has moved the weights, or None."""
        return None


@contextmanager
def around_update(actions: Sequence[AfterUpdate], step: int) -> Iterator[dict[str, float]]:
    """Let those of the actions that are due act around the update within (collective).

    Args:
        actions: In their order.
        step: The number of the step.

    Yields:
        {tag: value} of what they measure, filled at the end.
    """
    due = [action for action in actions if action.due(step)]
    for action in due:
        action.before()
    measured: dict[str, float] = {}
    yield measured
    for action in due:
        measured.update(action.after())


def actions_after_update(
    engine: Any,
    context: ParallelContext,
    shape: ModelShape,
    qk_clip: float | None,
    telemetry: TelemetrySection,
) -> tuple[AfterUpdate, ...]:
    """Return what a run does after the updates of an engine, in its order.

    Args:
        engine: A deepspeed.DeepSpeedEngine.
        context: This rank's place in the layout.
        shape: Of the model.
        qk_clip: The limit of QK-Clip; None: scores have none.
        telemetry: Says which weights are measured, and when.
    """
    actions: list[AfterUpdate] = []
    if qk_clip is not None:
        actions.append(QueryKeyClip(engine, context, shape, qk_clip))
    if telemetry.weights_every > 0:
        actions.append(WeightNorms(engine, context, telemetry))
    actions.append(FirstUpdate(engine))
    return tuple(actions)


class FirstUpdate(AfterUpdate):
    """The proof of the first update, of an optimizer that has something to prove."""

    name = "first_update"

    def __init__(self, engine: Any) -> None:
        self._optimizer = engine.basic_optimizer

    @override
    def note(self) -> Mapping[str, Any] | None:
        """Return what the optimizer reports, once (collective)."""
        report: Mapping[str, Any] | None = self._optimizer.report()
        return report


class QueryKeyClip(AfterUpdate):
    """QK-Clip: W_Q and W_K of heads whose scores were too large are scaled down.

        largest_h = the largest q·k / √head_dim of head h in the step, over micro batches and ranks
        γ_h = min(1, τ / largest_h),        W_Qh ← √γ_h W_Qh,  W_Kh ← √γ_h W_Kh

    After Kimi K2 (arXiv:2507.20534). Where query heads share a key head, W_Qh ← γ_h W_Qh alone: the
    key head's other query heads are not to notice.

    Our optimizer has moved the fp32 weights, and DeepSpeed has not made the model's of them yet,
    when a hook multiplies them: so the model's follow, rounded once.

    Args:
        engine: A deepspeed.DeepSpeedEngine with megatron-core's fused W_QKV, not of ZeRO stage 3.
        limit: τ, optimizer.qk_clip.
    """

    name = "qk_clip"

    def __init__(
        self, engine: Any, context: ParallelContext, shape: ModelShape, limit: float
    ) -> None:
        self._limit = limit
        self._group = context.mpu.get_data_parallel_group()
        self._shape = shape
        heads = shape.num_attention_heads // context.tensor_parallel_size
        attentions = [layer.self_attention for layer in engine.module.decoder.layers]
        self._cores = [attention.core_attention for attention in attentions]
        for core in self._cores:
            core.largest = torch.full((heads,), -math.inf, device=context.device)
        names = {id(weight): name for name, weight in engine.module.named_parameters()}
        layers = {names[id(one.linear_qkv.weight)]: n for n, one in enumerate(attentions)}
        own = slices_of_rank(engine)
        self._slices = [(layers[one.name], one) for one in own if one.name in layers]
        self._rows: list[torch.Tensor] | None = None
        engine.basic_optimizer.register_step_post_hook(self._scale)

    @override
    def before(self) -> None:
        """Find the factors of all rows (collective). Nothing waits for the device."""
        largest = torch.stack([core.largest for core in self._cores])
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        above = (largest > self._limit) & largest.isfinite()
        factors = torch.where(above, self._limit / largest, 1.0)
        self._rows = [self._by_rows(own) for own in factors]

    @override
    def after(self) -> dict[str, float]:
        """Forget the scores of the step."""
        self._rows = None
        for core in self._cores:
            core.largest.fill_(-math.inf)
        return {}

    @torch.no_grad()
    def _scale(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        """Multiply the weights that the optimizer has just moved; a factor of 1 changes no bit."""
        if self._rows is None:
            return
        moved = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
        refused = 0.0 if optimizer.found_inf is None else optimizer.found_inf
        for layer, one in self._slices:
            if id(one.flat) in moved:
                columns = self._shape.hidden_size
                factors = self._rows[layer].repeat_interleave(columns)
                factors = factors[one.start : one.start + one.length]
                one.values(MASTER).mul_(torch.where(torch.as_tensor(refused) > 0, 1.0, factors))

    def _by_rows(self, factors: torch.Tensor) -> torch.Tensor:
        """Return the factors of the rows of W_QKV, [q … q k v] of each key head."""
        of_groups = factors.view(-1, self._shape.queries_per_group)
        untouched = torch.ones_like(of_groups[:, :1])
        alone = self._shape.queries_per_group == 1
        query = of_groups.sqrt() if alone else of_groups
        parts = (query, query if alone else untouched, untouched)
        return torch.cat(parts, dim=1).flatten().repeat_interleave(self._shape.head_dim)


class WeightNorms(AfterUpdate):
    """Norms of weights and of their updates, and spectral norms, at any layout.

    Ranks have slices of the fp32 weights (`checkpoint.slices`), some of them alike: an element
    counts once, however many ranks have it, because sums are divided by how often elements were
    counted.
    """

    name = "weight_norms"

    def __init__(self, engine: Any, context: ParallelContext, telemetry: TelemetrySection) -> None:
        self._engine = engine
        self._every = telemetry.weights_every
        self._patterns = telemetry.spectral_norms
        self._context = context
        self._earlier: list[tuple[Slice, torch.Tensor]] = []

    @override
    def due(self, step: int) -> bool:
        """Return whether telemetry.weights_every asks for the step."""
        return step % self._every == 0

    @override
    def before(self) -> None:
        """Copy this rank's slices of the weights."""
        slices = slices_of_rank(self._engine)
        self._earlier = [(own, own.values(MASTER).clone()) for own in slices]

    @override
    def after(self) -> dict[str, float]:
        """Return the norms (collective); the only place that waits for the device."""
        inventory: Sequence[Tensor] = self._engine.module.inventory
        elements: dict[str, int] = {}
        for tensor in inventory:
            if tensor.trains:
                kind = kind_of(tensor.name)
                elements[kind] = elements.get(kind, 0) + tensor.elements
        numbers = {kind: number for number, kind in enumerate(elements)}
        sums = torch.zeros(len(elements), 3, dtype=torch.float64, device=self._context.device)
        for own, earlier in self._earlier:
            now = own.values(MASTER)
            lengths = [torch.linalg.vector_norm(one).double() for one in (now, now - earlier)]
            row = sums[numbers[kind_of(own.name)]]
            row[:2] += torch.stack(lengths).square()
            row[2] += own.length
        dist.all_reduce(sums)
        whole = torch.tensor(list(elements.values()), dtype=sums.dtype, device=sums.device)
        norms, changes = (sums[:, :2] * (whole / sums[:, 2])[:, None]).sqrt().t().tolist()
        matrices = [tensor for tensor in inventory if is_measured(tensor, self._patterns)]
        spectral = [self._spectral_norm(matrix) for matrix in matrices]
        values = torch.stack(spectral).tolist() if spectral else []
        self._earlier = []
        families = (
            (WEIGHT_NORM, elements, norms),
            (UPDATE_NORM, elements, changes),
            (SPECTRAL_NORM, [matrix.name for matrix in matrices], values),
        )
        return {
            family.of(name): value
            for family, names, measured in families
            for name, value in zip(names, measured, strict=True)
        }

    def _spectral_norm(self, tensor: Tensor) -> torch.Tensor:
        """Return the largest singular value of a matrix, by power iteration."""
        context = self._context
        rank, size = context.tensor_parallel_rank, context.tensor_parallel_size
        rows, columns = tensor.rank_shape(rank, size)
        flat = torch.zeros(rows * columns + 1, device=context.device)
        for own, _ in self._earlier:
            if own.name == tensor.name:
                flat[own.start : own.start + own.length] = own.values(MASTER)
                flat[-1] += own.length / max(1, rows * columns)  # 0 of a rank without these heads
        dist.all_reduce(flat, group=context.mpu.get_data_parallel_group())
        matrix = (flat[:-1] / flat[-1]).view(rows, columns)
        if tensor.cut == 1:  # then its transpose is cut along its rows, and has the same norm
            matrix = matrix.t()
        start = torch.randn(matrix.size(1), generator=torch.Generator().manual_seed(0))
        vector = start.to(context.device)
        length = vector.norm()
        for _ in range(POWER_ITERATIONS):
            vector = matrix.t() @ (matrix @ (vector / length))
            if tensor.cut is not None:
                dist.all_reduce(vector, group=context.tensor_parallel_group)
            length = vector.norm().clamp(min=torch.finfo(vector.dtype).tiny)
        return length.sqrt()


POWER_ITERATIONS = 30
"""Of a spectral norm; the estimate is low, for a random matrix by some 3 %."""


def kind_of(name: str) -> str:
    """Return the name of a weight without the number of its layer, which layers have in common."""
    return re.sub(r"^decoder\.(layers\.\d+\.)?", "", name)


def is_measured(tensor: Tensor, patterns: Sequence[str]) -> bool:
    """Return whether a tensor's spectral norm is asked for: a trained matrix that a pattern names.

    Args:
        tensor: of the model.
        patterns: of names, in which * stands for any text.
    """
    is_matrix = tensor.trains and len(tensor.shape) == 2
    return is_matrix and any(fnmatchcase(tensor.name, pattern) for pattern in patterns)
