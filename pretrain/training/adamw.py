"""AdamW as this program uses it: fused, and clipping in the pass of the update where that saves one.

Version-sensitive: torch's fused AdamW divides the gradients by the attribute `grad_scale` and changes nothing
where `found_inf` is 1 (written for its GradScaler); DeepSpeed 0.19's optimizers keep the gradient norm of a
step as `_global_grad_norm`, and so does `ClippingAdamW` for DeepSpeed to read; its ZeRO takes optimizers of
the classes in its list only, and `FusedAdamW` is added to them.
"""

from __future__ import annotations

from inspect import unwrap
from typing import Any

import torch
import torch.distributed as dist

from megatron_patches.engine.freeze import parameter_groups
from pretrain.config.sections import OptimizerSection


class FusedAdamW(torch.optim.AdamW):
    """AdamW in one pass over weights, gradients and moments, on the CPU as on CUDA.

    Its methods are torch's without what hides them from torch.compile: that would import the compiler, and no
    optimizer is compiled here.
    """

    add_param_group = unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = unwrap(torch.optim.Optimizer.zero_grad)
    state_dict = unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = unwrap(torch.optim.Optimizer.load_state_dict)
    step = torch.no_grad()(unwrap(torch.optim.AdamW.step))

    def __init__(
        self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        super().__init__(groups, lr=lr, betas=betas, eps=eps, fused=True)


class ClippingAdamW(FusedAdamW):
    """Fused AdamW over the model's own weights that first takes the norm of all gradients and clips by it.

    What DeepSpeed's ZeRO optimizers do around AdamW, without their flat copies of weights and gradients: one
    pass for the norm, one for clipping and update together. Where the norm is not finite nothing is updated.
    `clip`: the norm to clip to; 0: none. `tp_group`: over whose ranks weights marked `tensor_model_parallel`
    are spread; others are the same on all of them and count once.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        clip: float,
        tp_group: dist.ProcessGroup,
    ) -> None:
        super().__init__(groups, lr=lr, betas=betas, eps=eps)
        self._clip = clip
        self._tp_group = tp_group
        self._global_grad_norm: torch.Tensor | None = None
        self.grad_scale: torch.Tensor | None = None
        self.found_inf: torch.Tensor | None = None
        # Before any other hook, so that each finds the norm of its step.
        self.register_step_pre_hook(_take_norm)

    @torch.no_grad()
    def take_norm(self) -> None:
        """Set the norm before clipping, `_global_grad_norm`, and how the update is to clip by it."""
        norm = self._norm()
        self._global_grad_norm = norm
        self.found_inf = (~norm.isfinite()).float()
        self.grad_scale = _divisor(norm, self._clip)

    def _norm(self) -> torch.Tensor:
        """Return the Euclidean norm of the whole model's gradient, each element counted once (collective)."""
        counted = [
            parameter.grad
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
            and (self._tp_group.rank() == 0 or getattr(parameter, "tensor_model_parallel", False))
        ]
        squares = torch.stack(torch._foreach_norm(counted)).double().square().sum()
        if self._tp_group.size() > 1:
            dist.all_reduce(squares, group=self._tp_group)
        return squares.sqrt().float()


def _take_norm(optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> None:
    """Take the norm before each step; a function, since a bound method would keep the optimizer alive."""
    assert isinstance(optimizer, ClippingAdamW)
    optimizer.take_norm()


def clip_in_update(adamw: torch.optim.AdamW, outer: Any, clip: float) -> None:
    """Let the update divide gradients by the norm that DeepSpeed's optimizer around it has taken.

    Its own clipping would be a pass over the gradients of the whole model, of which AdamW takes a part.
    """

    def set_divisor(optimizer: Any, arguments: Any, keywords: Any) -> None:
        optimizer.grad_scale = _divisor(outer._global_grad_norm, clip)

    if clip:
        adamw.register_step_pre_hook(set_divisor)


def _divisor(norm: torch.Tensor, clip: float) -> torch.Tensor:
    """Return the divisor of gradients of this norm; DeepSpeed's ZeRO optimizers clip by the same formula."""
    return ((norm + 1e-6) / clip).clamp(min=1.0) if clip else torch.ones_like(norm)


def build_adamw(
    model: torch.nn.Module, settings: OptimizerSection, clips_over: dist.ProcessGroup | None
) -> torch.optim.AdamW:
    """Build the optimizer for DeepSpeed.

    `clips_over`: the tensor-parallel group if AdamW is to clip itself; None where DeepSpeed's own optimizer
    around it does.
    """
    from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

    if FusedAdamW not in ZERO_SUPPORTED_OPTIMIZERS:
        ZERO_SUPPORTED_OPTIMIZERS.append(FusedAdamW)
    groups = parameter_groups(model, settings.weight_decay, settings.learning_rate_factors)
    lr, betas, eps = settings.learning_rate, settings.betas, settings.eps
    if clips_over is None:
        return FusedAdamW(groups, lr=lr, betas=betas, eps=eps)
    clip = settings.gradient_clip
    return ClippingAdamW(groups, lr=lr, betas=betas, eps=eps, clip=clip, tp_group=clips_over)
