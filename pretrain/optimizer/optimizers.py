"""Optimizers for DeepSpeed, one class for each rule of `megatron_patches.recipe.optimizers`.

Version-sensitive: torch's fused optimizers divide the gradients by the attribute `grad_scale` and
change nothing where `found_inf` is 1 (written for its GradScaler). DeepSpeed 0.19's optimizers keep
the gradient norm of a step as `_global_grad_norm`, and so does `clip_by_own_norm` for DeepSpeed to
read. Its ZeRO takes optimizers of the classes in its list only; ours are added to them.
"""

from __future__ import annotations

from collections.abc import Iterable
from inspect import unwrap
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from megatron_patches.recipe.optimizers import ADAMW, Rule
from megatron_patches.recipe.parts import Tensor
from pretrain.checkpoint.slices import STEP
from pretrain.config.optimizer import OptimizerSection
from pretrain.ranks.groups import ParallelContext

NORM_ROW = 4096
"""Elements whose squares `row_norms` adds in their own type."""


class RuleOptimizer(torch.optim.Optimizer):
    """Interface that a run needs of its optimizer beyond torch's.

    The class is inherited in front of one of torch's fused optimizers. It unwraps torch's methods
    from the decorators that hide them from torch.compile: those import the compiler, and no
    optimizer is compiled here.

    Attributes:
        rule: Rule that names the states of a tensor.
        counts_steps: Whether a tensor's state counts its updates, under STEP.
    """

    rule: ClassVar[Rule]
    counts_steps: ClassVar[bool] = False
    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None
    _global_grad_norm: torch.Tensor | None

    add_param_group = unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = unwrap(torch.optim.Optimizer.zero_grad)
    state_dict = unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = unwrap(torch.optim.Optimizer.load_state_dict)

    def states_of(self, tensor: torch.Tensor) -> tuple[str, ...]:
        """Return the names of a tensor's states, each of the tensor's shape."""
        return self.rule.states

    def begin(self, tensor: torch.Tensor) -> None:
        """Create the state of a tensor as its first update would, unless the state exists."""
        state = self.state[tensor]
        if state:
            return
        if self.counts_steps:  # a fused optimizer has the count on the device of the weights
            state[STEP] = torch.zeros((), dtype=torch.float32, device=tensor.device)
        for name in self.states_of(tensor):
            state[name] = torch.zeros_like(tensor)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update what has a gradient, by the class of torch that comes next.

        Where a first update may change nothing, torch would leave a state as it was allocated.
        """
        for group in self.param_groups:
            for tensor in group["params"]:
                if tensor.grad is not None:
                    self.begin(tensor)
        return unwrap(super().step.__func__)(self, closure)  # type: ignore[attr-defined]

    def allow(self, allowed: torch.Tensor | None) -> None:
        """Set whether the next calls of `step` may change anything.

        Args:
            allowed: Truth value as a number on the device; None: the calls may.
        """
        self.found_inf = None if allowed is None else 1.0 - allowed.float()

    def prepare(
        self,
        engine: Any,
        inventory: Iterable[Tensor],
        context: ParallelContext,
        replicated: bool,
    ) -> dict[str, list[str]] | None:
        """Decide which rank updates which parameters (collective); call before the first step.

        Args:
            engine: The deepspeed.DeepSpeedEngine of this optimizer.
            inventory: The tensors of the whole model.
            replicated: Whether data-parallel ranks hold the same values.

        Returns:
            {name of a rule: the parameters that it updates, over all ranks}; None if one rule
            updates them all.

        Raises:
            MethodError: on every rank: a rule would miss some of its tensors.
        """
        return None

    def report(self) -> dict[str, Any] | None:
        """Return a report of the first update, once; None for an optimizer without one."""
        return None

    def divide_gradients(self, divisor: torch.Tensor) -> None:
        """Let the next calls of `step` divide the gradients by a number on the device."""
        self.grad_scale = divisor


class FusedAdamW(RuleOptimizer, torch.optim.AdamW):
    """AdamW in one fused pass over weights, gradients and moments, on CPU and CUDA.

    Args:
        groups: Parameter groups from `parameter_groups`.
        settings: Rate, betas and epsilon; the loop sets the rate before every step.
    """

    rule = ADAMW
    counts_steps = True

    def __init__(self, groups: list[dict[str, Any]], settings: OptimizerSection) -> None:
        rate, betas, eps = settings.learning_rate, settings.betas, settings.eps
        super().__init__(groups, lr=rate, betas=betas, eps=eps, fused=True)


def clip_by_own_norm(optimizer: RuleOptimizer, clip: float, tp_group: dist.ProcessGroup) -> None:
    """Make an optimizer of the model's own weights compute the gradient norm and clip by it.

    DeepSpeed's ZeRO optimizers do this on flat copies of weights and gradients. Here one pass takes
    the norm, and one clips and updates. Nothing is updated where the norm is not finite.

    Args:
        optimizer: Optimizer without hooks so far, so that each later hook finds the norm of its
            step.
        clip: Norm to clip to; 0: no clipping.
        tp_group: Ranks over which weights marked `tensor_model_parallel` are spread; other weights
            are the same on all of them and count once.
    """

    @torch.no_grad()
    def take_norm(optimizer: Any, arguments: Any, keywords: Any) -> None:
        norm = _norm(optimizer, tp_group)
        optimizer._global_grad_norm = norm
        optimizer.allow(norm.isfinite())
        optimizer.divide_gradients(_divisor(norm, clip))

    optimizer._global_grad_norm = None
    optimizer.register_step_pre_hook(take_norm)


def clip_by_outer_norm(optimizer: RuleOptimizer, outer: Any, clip: float) -> None:
    """Make an optimizer clip by the norm that DeepSpeed's optimizer around it has computed.

    DeepSpeed's own clipping would pass over the gradients of the whole model, while a rank updates
    only a part of them.

    Args:
        optimizer: The optimizer inside DeepSpeed's.
        outer: DeepSpeed's optimizer around it.
        clip: Norm to clip to; 0: no clipping.
    """

    def take_norm(optimizer: Any, arguments: Any, keywords: Any) -> None:
        optimizer.divide_gradients(_divisor(outer._global_grad_norm, clip))

    if clip:
        optimizer.register_step_pre_hook(take_norm)


def _norm(optimizer: torch.optim.Optimizer, tp_group: dist.ProcessGroup) -> torch.Tensor:
    """Return the Euclidean norm of the model's gradient, each element counted once (collective)."""
    counted = [
        parameter.grad
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
        and (tp_group.rank() == 0 or getattr(parameter, "tensor_model_parallel", False))
    ]
    if counted[0].is_cuda:
        norms = torch.stack(torch._foreach_norm(counted))
    else:
        norms = torch.cat([row_norms(gradient) for gradient in counted])
    squares = norms.double().square().sum()
    if tp_group.size() > 1:
        dist.all_reduce(squares, group=tp_group)
    return squares.sqrt().float()


def row_norms(values: torch.Tensor) -> torch.Tensor:
    """Return norms, `[rows]`, whose squares add up to the square of a tensor's norm.

    On a CPU torch adds squares in the tensor's own type, which makes the norm of a large fp32
    matrix up to a thousandth too low. Sums over short rows lose nothing, at the same speed.
    """
    if values.is_cuda:
        return torch.linalg.vector_norm(values).view(1)
    elements = values.reshape(-1)
    whole = elements.numel() // NORM_ROW * NORM_ROW
    rows = torch.linalg.vector_norm(elements[:whole].view(-1, NORM_ROW), dim=1)
    return torch.cat([rows, torch.linalg.vector_norm(elements[whole:]).view(1)])


def _divisor(norm: torch.Tensor, clip: float) -> torch.Tensor:
    """Return the divisor of gradients of this norm, by the formula of DeepSpeed's optimizers."""
    return ((norm + 1e-6) / clip).clamp(min=1.0) if clip else torch.ones_like(norm)
