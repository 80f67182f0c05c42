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


class RuleOptimizer(torch.optim.Optimizer):
    """What a run asks of its optimizer beyond torch's interface.

    As it stands the class is for torch's fused optimizers, in front of which it is inherited. The
    methods that it takes from torch are without what hides them from torch.compile: that would
    import the compiler, and no optimizer is compiled here.

    Attributes:
        rule: what the optimizer keeps of a tensor.
        counts_steps: the state of a tensor has a count of its updates, under STEP.
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
        """Create the state of a tensor as its first update would; nothing if the state is there."""
        state = self.state[tensor]
        if state:
            return
        if self.counts_steps:  # a fused optimizer has the count on the device of the weights
            state[STEP] = torch.zeros((), dtype=torch.float32, device=tensor.device)
        for name in self.states_of(tensor):
            state[name] = torch.zeros_like(tensor)

    def allow(self, allowed: torch.Tensor | None) -> None:
        """Say whether the next calls of `step` may change anything.

        Args:
            allowed: a truth value, as a number on the device; None: they may.
        """
        self.found_inf = None if allowed is None else 1.0 - allowed.float()

    def prepare(
        self,
        engine: Any,
        inventory: Iterable[Tensor],
        context: ParallelContext,
        replicated: bool,
    ) -> dict[str, list[str]] | None:
        """Find out which rank updates what (collective); before the first step.

        Args:
            engine: the deepspeed.DeepSpeedEngine of this optimizer.
            inventory: the tensors of the whole model.
            context: this rank's place in the layout.
            replicated: data-parallel ranks hold the same.

        Returns:
            {name of a rule: the parameters that it updates, over all ranks}; None where one rule
            updates whatever a rank holds.

        Raises:
            MethodError: on every rank: a rule would not reach every tensor that it is for.
        """
        return None

    def report(self) -> dict[str, Any] | None:
        """Return what the first update did, once; None where there is nothing to prove."""
        return None

    def divide_gradients(self, divisor: torch.Tensor) -> None:
        """Let the next calls of `step` divide the gradients by a number on the device."""
        self.grad_scale = divisor


class FusedAdamW(RuleOptimizer, torch.optim.AdamW):
    """AdamW in one pass over weights, gradients and moments, on the CPU as on CUDA.

    Args:
        groups: as `parameter_groups` returns them.
        settings: rate, betas and epsilon; the loop sets the rate before every step.
    """

    rule = ADAMW
    counts_steps = True
    step = torch.no_grad()(unwrap(torch.optim.AdamW.step))

    def __init__(self, groups: list[dict[str, Any]], settings: OptimizerSection) -> None:
        rate, betas, eps = settings.learning_rate, settings.betas, settings.eps
        super().__init__(groups, lr=rate, betas=betas, eps=eps, fused=True)


def clip_by_own_norm(optimizer: RuleOptimizer, clip: float, tp_group: dist.ProcessGroup) -> None:
    """Let an optimizer of the model's own weights take the norm of all gradients, and clip by it.

    What DeepSpeed's ZeRO optimizers do around it, without their flat copies of weights and
    gradients: one pass for the norm, one for clipping and update together. Where the norm is not
    finite nothing is updated.

    Args:
        optimizer: without hooks so far, so that each later hook finds the norm of its step.
        clip: the norm to clip to; 0: none.
        tp_group: over whose ranks weights marked `tensor_model_parallel` are spread; others are the
            same on all of them and count once.
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
    """Let the update divide gradients by the norm that DeepSpeed's optimizer around it has taken.

    DeepSpeed's own clipping would be a pass over the gradients of the whole model, of which a rank
    updates a part.

    Args:
        optimizer: of this program.
        outer: DeepSpeed's optimizer around it.
        clip: the norm to clip to; 0: none.
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
    squares = torch.stack(torch._foreach_norm(counted)).double().square().sum()
    if tp_group.size() > 1:
        dist.all_reduce(squares, group=tp_group)
    return squares.sqrt().float()


def _divisor(norm: torch.Tensor, clip: float) -> torch.Tensor:
    """Return the divisor of gradients of this norm, by the formula of DeepSpeed's optimizers."""
    return ((norm + 1e-6) / clip).clamp(min=1.0) if clip else torch.ones_like(norm)
