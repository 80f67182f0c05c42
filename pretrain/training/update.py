"""The update of an engine's weights, made only from good numbers, and the actions around it.

DeepSpeed does not ask before it moves the weights. Given a gradient norm that is not finite, it
skips the update silently or makes it, depending on ZeRO stage, precision and settings. All its
optimizers end in `step` of the optimizer that this program gave them, after the global norm is
known and, under ZeRO, once for every group. We decide there, on the device and without waiting for
it: a hook tells our optimizer whether it may change weights, states and step counts. The engine
then ends the step as always, so its buffers are free for the next one.

Everything else that a run does around an update is an `AfterUpdate`: QK-Clip, norms of weights, the
audit of the first update. `actions_after_update` lists them in the order in which they act.

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
from pretrain.config.tree import Config
from pretrain.optimizer.optimizers import row_norms
from pretrain.ranks.groups import ParallelContext
from pretrain.runs.tags import SPECTRAL_NORM, UPDATE_NORM, WEIGHT_NORM


@dataclass(frozen=True)
class Update:
    """The outcome of an update, as numbers on the device.

    Attributes:
        moved: 1 if the weights moved, else 0.
        gradient_norm: The global norm before clipping, infinite where it was not finite.
    """

    moved: torch.Tensor
    gradient_norm: torch.Tensor


class GuardedUpdate:
    """The optimizer step of one engine; all ranks see the same norms, so they decide alike."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        # None: nobody has decided, as while a checkpoint is loaded.
        self._allowed: torch.Tensor | None = None
        self._largest_norm = math.inf
        self._decided: Update | None = None
        self._hook = engine.basic_optimizer.register_step_pre_hook(self._before_update)

    def detach(self) -> None:
        """Remove the hook and drop the reference to the engine."""
        self._hook.remove()
        del self._engine

    def make(self, allowed: torch.Tensor, largest_norm: float = math.inf) -> Update:
        """Step the engine; the weights move if allowed and the norm is finite (collective).

        Waits for the device only where DeepSpeed does, to learn the norm it clips by.

        Args:
            allowed: Truth value on the device, the same on all ranks.
            largest_norm: Gradient norm above which the weights do not move; the same on all ranks.
        """
        self._allowed, self._largest_norm, self._decided = allowed, largest_norm, None
        self._engine.step()
        self._allowed = None
        self._engine.basic_optimizer.allow(None)
        if self._decided is not None:
            return self._decided
        none = torch.zeros((), dtype=torch.float64, device=allowed.device)
        # DeepSpeed has skipped the update by itself.
        return Update(moved=none, gradient_norm=none + torch.inf)

    def _before_update(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        if self._allowed is None:
            return
        if self._decided is None:
            self._decided = self._decide(self._allowed)
        optimizer.allow(self._decided.moved)

    def _decide(self, allowed: torch.Tensor) -> Update:
        norm = torch.as_tensor(
            self._engine.optimizer._global_grad_norm, dtype=torch.float64, device=allowed.device
        ).reshape(())
        norm = torch.where(norm >= 0, norm, torch.inf)  # NaN too
        good = allowed & norm.isfinite() & (norm <= self._largest_norm)
        return Update(moved=good.double(), gradient_norm=norm)


class AfterUpdate:
    """An action that a run takes around updates of the weights, bound to one engine.

    Attributes:
        name: Key of `note`'s entry in audit.json.
    """

    name: ClassVar[str]

    def due(self, step: int) -> bool:
        """Return whether the action runs at a step; the same on every rank."""
        return True

    def before(self) -> None:
        """Read values that the update will overwrite."""

    def change(self, weights: Sequence[Slice], moved: torch.Tensor) -> None:
        """Change fp32 weights that the optimizer has moved, before the model gets its copy.

        Under ZeRO it is called once for every group of parameters.

        Args:
            weights: This rank's slices of the weights.
            moved: Truth value on the device; where it is false, the weights stay as they are.
        """

    def after(self) -> Mapping[str, float]:
        """Measure the weights that the update has moved.

        Nothing here may wait for the device at every step.

        Returns:
            {tag of `runs.tags`: value} for the record of the step; a step that has some is written.
        """
        return {}

    def note(self) -> Mapping[str, Any] | None:
        """Return the audit entry of an update that has moved the weights, or None."""
        return None


class Actions:
    """The actions around the updates of one engine, in the order in which they run."""

    def __init__(self, engine: Any, actions: Sequence[AfterUpdate]) -> None:
        self._actions = tuple(actions)
        self._due: list[AfterUpdate] = []
        if any(type(action).change is not AfterUpdate.change for action in actions):
            self._slices = slices_of_rank(engine)
            engine.basic_optimizer.register_step_post_hook(self._change)

    def __iter__(self) -> Iterator[AfterUpdate]:
        return iter(self._actions)

    @contextmanager
    def around_update(self, step: int) -> Iterator[dict[str, float]]:
        """Run the actions that are due before and after the update in the block (collective).

        Yields:
            {tag: value} measured by the actions, filled when the block ends.
        """
        self._due = [action for action in self._actions if action.due(step)]
        for action in self._due:
            action.before()
        measured: dict[str, float] = {}
        yield measured
        for action in self._due:
            measured.update(action.after())
        self._due = []

    @torch.no_grad()
    def _change(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        """Let the actions change what the optimizer has just moved; DeepSpeed casts it later."""
        if self._due:
            flat = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
            weights = [weight for weight in self._slices if id(weight.flat) in flat]
            refused = 0.0 if optimizer.found_inf is None else optimizer.found_inf
            for action in self._due:
                action.change(weights, torch.as_tensor(refused) == 0)


def actions_after_update(engine: Any, config: Config, context: ParallelContext) -> Actions:
    """Return the actions around the updates of an engine.

    Args:
        engine: A deepspeed.DeepSpeedEngine.
        config: Configuration of the run.
    """
    actions: list[AfterUpdate] = []
    if config.optimizer.qk_clip is not None:
        actions.append(QueryKeyClip(engine, context, config.shape, config.optimizer.qk_clip))
    if config.telemetry.weights_every > 0:
        actions.append(WeightNorms(engine, context, config.telemetry))
    actions.append(FirstUpdate(engine))
    return Actions(engine, actions)


class FirstUpdate(AfterUpdate):
    """The audit entry of the first update, for an optimizer that reports one."""

    name = "first_update"

    def __init__(self, engine: Any) -> None:
        self._optimizer = engine.basic_optimizer

    @override
    def note(self) -> Mapping[str, Any] | None:
        """Return the optimizer's report, once (collective)."""
        report: Mapping[str, Any] | None = self._optimizer.report()
        return report


class QueryKeyClip(AfterUpdate):
    """QK-Clip: scale down W_Q and W_K of heads whose scores were too large.

        largest_h = the largest q·k / √head_dim of head h in the step, over micro batches and ranks
        γ_h = min(1, τ / largest_h),        W_Qh ← √γ_h W_Qh,  W_Kh ← √γ_h W_Kh

    After Kimi K2 (arXiv:2507.20534). Where query heads share a key head, W_Qh ← γ_h W_Qh only, so
    that the key head's other query heads keep their scores.

    The fp32 weights are multiplied before DeepSpeed casts them to the model's type, so the model's
    weights are rounded once.

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
        self._layers = {
            names[id(attention.linear_qkv.weight)]: layer
            for layer, attention in enumerate(attentions)
        }
        self._rows: list[torch.Tensor] = []

    @override
    def before(self) -> None:
        """Compute the factors of all rows (collective), without waiting for the device."""
        largest = torch.stack([core.largest for core in self._cores])
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        above = (largest > self._limit) & largest.isfinite()
        factors = torch.where(above, self._limit / largest, 1.0)
        self._rows = [self._by_rows(head_factors) for head_factors in factors]

    @override
    def change(self, weights: Sequence[Slice], moved: torch.Tensor) -> None:
        """Multiply the rows of queries and keys; a factor of 1 changes no bit."""
        for weight in weights:
            if weight.name in self._layers:
                rows = self._rows[self._layers[weight.name]]
                factors = rows.repeat_interleave(self._shape.hidden_size)
                factors = factors[weight.start : weight.start + weight.length]
                weight.values(MASTER).mul_(torch.where(moved, factors, 1.0))

    @override
    def after(self) -> dict[str, float]:
        """Forget the scores of the step."""
        for core in self._cores:
            core.largest.fill_(-math.inf)
        return {}

    def _by_rows(self, factors: torch.Tensor) -> torch.Tensor:
        """Return the factors of the rows of W_QKV, [q … q k v] of each key head."""
        group_factors = factors.view(-1, self._shape.queries_per_group)
        untouched = torch.ones_like(group_factors[:, :1])
        alone = self._shape.queries_per_group == 1
        query = group_factors.sqrt() if alone else group_factors
        row_factors = (query, query if alone else untouched, untouched)
        return torch.cat(row_factors, dim=1).flatten().repeat_interleave(self._shape.head_dim)


class WeightNorms(AfterUpdate):
    """Norms of weights and of their updates, and spectral norms, at any layout.

    Ranks hold slices of the fp32 weights (`checkpoint.slices`), and several ranks may hold the same
    element. Sums are divided by how often their elements were counted, so each counts once.
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
        self._earlier = [
            (weight_slice, weight_slice.values(MASTER).clone()) for weight_slice in slices
        ]

    @override
    def after(self) -> dict[str, float]:
        """Return the norms (collective). Only this action waits for the device."""
        inventory: Sequence[Tensor] = self._engine.module.inventory
        elements: dict[str, int] = {}
        for tensor in inventory:
            if tensor.trains:
                kind = kind_of(tensor.name)
                elements[kind] = elements.get(kind, 0) + tensor.elements
        numbers = {kind: number for number, kind in enumerate(elements)}
        sums = torch.zeros(len(elements), 3, dtype=torch.float64, device=self._context.device)
        for weight_slice, earlier in self._earlier:
            now = weight_slice.values(MASTER)
            norms_of_both = [row_norms(values).double() for values in (now, now - earlier)]
            row = sums[numbers[kind_of(weight_slice.name)]]
            row[:2] += torch.stack([norms.square().sum() for norms in norms_of_both])
            row[2] += weight_slice.length
        dist.all_reduce(sums)
        element_counts = torch.tensor(list(elements.values()), dtype=sums.dtype, device=sums.device)
        norms, changes = (sums[:, :2] * (element_counts / sums[:, 2])[:, None]).sqrt().t().tolist()
        matrices = [tensor for tensor in inventory if is_measured(tensor, self._patterns)]
        spectral = [self._spectral_norm(matrix) for matrix in matrices]
        spectral_norms = torch.stack(spectral).tolist() if spectral else []
        self._earlier = []
        families = (
            (WEIGHT_NORM, elements, norms),
            (UPDATE_NORM, elements, changes),
            (SPECTRAL_NORM, [matrix.name for matrix in matrices], spectral_norms),
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
        for weight_slice, _ in self._earlier:
            if weight_slice.name == tensor.name:
                end = weight_slice.start + weight_slice.length
                flat[weight_slice.start : end] = weight_slice.values(MASTER)
                # 0 of a rank without these heads.
                flat[-1] += weight_slice.length / max(1, rows * columns)
        dist.all_reduce(flat, group=context.mpu.get_data_parallel_group())
        matrix = (flat[:-1] / flat[-1]).view(rows, columns)
        if tensor.cut == 1:  # then its transpose is cut along its rows, and has the same norm
            matrix = matrix.t()
        # Every rank starts from the same vector, drawn without touching the training's generators.
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
"""Iterations of a spectral norm; the estimate is about 3 % low for a random matrix."""


def kind_of(name: str) -> str:
    """Return the name of a weight without its layer's number, the same in all layers."""
    return re.sub(r"^decoder\.(layers\.\d+\.)?", "", name)


def is_measured(tensor: Tensor, patterns: Sequence[str]) -> bool:
    """Return whether a tensor is a trained matrix whose name matches one of the patterns.

    Args:
        patterns: Patterns of names, in which * stands for any text.
    """
    is_matrix = tensor.trains and len(tensor.shape) == 2
    return is_matrix and any(fnmatchcase(tensor.name, pattern) for pattern in patterns)
