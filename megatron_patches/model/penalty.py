"""Soft orthogonality: a term of the loss that keeps trainable Query/Key rows nearly orthonormal.

    P = λ Σ_heads (‖W_q W_qᵀ − I‖²_F + ‖W_k W_kᵀ − I‖²_F),      ∂P/∂W = 4 λ (W Wᵀ − I) W

over all query heads and key heads of all layers (Bansal, Chen and Wang, "Can we gain more from
orthogonality regularizations in training deep networks?", NeurIPS 2018, eq. 1). A rank adds the
term of its own heads to its loss: no weight leaves its module, so the term is right under tensor
parallelism (each head counts on one rank) and under ZeRO-3 (weights are whole only inside their
module's forward and backward). The training loop takes the term of every micro batch; the mean over
micro batches and data-parallel ranks then counts the term once an optimizer step.

Version-sensitive: knows how megatron-core interleaves queries, keys and values in its fused weight.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_patches.model.linear import ColumnParallelLinear

NAME = "orthogonal_penalty"


class PenalizedQueryKeyValueLinear(ColumnParallelLinear):
    """megatron-core's fused QKV projection with the orthogonality penalty of its weight.

    Attributes:
        penalty: λ, set by `penalized`.
        auxiliary_loss: (name, this rank's part of the penalty) of the last forward pass with
            gradients, until `take_auxiliary_losses` collects it; else None.
    """

    penalty: float
    auxiliary_loss: tuple[str, torch.Tensor] | None = None

    def forward(
        self,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Project `[seq(/tp), batch, hidden]` -> `[seq, batch, rows of this rank]`, and the bias.

        Args:
            input_: `[seq(/tp), batch, hidden]`.
            weight: in megatron-core's fused layout, `[groups * (queries of a group + 2) * head_dim,
                hidden]`.
            runtime_gather_output: argument of megatron-core; must not be set.
        """
        output, bias = super().forward(input_, weight, runtime_gather_output)
        if torch.is_grad_enabled():
            num_groups = self.config.num_query_groups // self.tp_group.size()
            output, penalty = OrthogonalityPenalty.apply(
                output, self.weight, num_groups, self.config.kv_channels, self.penalty
            )
            self.auxiliary_loss = NAME, penalty
        return output, bias


def penalized(penalty: float) -> type[PenalizedQueryKeyValueLinear]:
    """Return the class of projections with this λ.

    Megatron-core builds them with its own arguments only.
    """
    return type(
        PenalizedQueryKeyValueLinear.__name__, (PenalizedQueryKeyValueLinear,), {"penalty": penalty}
    )


class OrthogonalityPenalty(torch.autograd.Function):
    """(output, W) -> (output, P): the output unchanged, and the penalty of the weight that made it.

    The output passes through so that the penalty's backward runs with the layer's own: only then
    has ZeRO-3 gathered the weight. Kept for backward is W Wᵀ − I, `[heads, head_dim, head_dim]`,
    not a copy of W's size.
    """

    @staticmethod
    def forward(
        ctx: Any,
        output: torch.Tensor,
        weight: torch.Tensor,
        num_groups: int,
        head_dim: int,
        penalty: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output and P.

        Args:
            weight: in megatron-core's fused layout, `[groups * (queries of a group + 2) * head_dim,
                hidden]`: for every group its query heads, its key head, its value head.
            num_groups: key heads of this rank.
        """
        rows = _query_key_rows(weight, num_groups, head_dim)
        deviation = rows @ rows.mT
        # In place on the diagonal: no identity matrix per head.
        deviation.diagonal(dim1=-2, dim2=-1).sub_(1)
        ctx.save_for_backward(weight, deviation)
        ctx.num_groups, ctx.head_dim, ctx.penalty = num_groups, head_dim, penalty
        return output.view_as(output), penalty * deviation.square().sum()

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, output_grad: torch.Tensor, penalty_grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None, None, None]:
        """Return the gradients of output and weight.

        Args:
            output_grad: gradient of the output, passed on.
            penalty_grad: gradient of P, a scalar.
        """
        weight, deviation = ctx.saved_tensors
        rows = _query_key_rows(weight, ctx.num_groups, ctx.head_dim)
        # ∂P/∂W = 4 λ (W Wᵀ − I) W, times the gradient of P.
        rows_grad = deviation @ rows * (4 * ctx.penalty * penalty_grad)
        weight_grad = torch.zeros_like(weight)
        _by_head(weight_grad, ctx.num_groups, ctx.head_dim)[:, :-1] = rows_grad
        return output_grad, weight_grad, None, None, None


def _by_head(weight: torch.Tensor, num_groups: int, head_dim: int) -> torch.Tensor:
    return weight.view(num_groups, -1, head_dim, weight.size(-1))


def _query_key_rows(weight: torch.Tensor, num_groups: int, head_dim: int) -> torch.Tensor:
    """Return `[groups, queries of a group + 1, head_dim, hidden]`, fp32 or wider."""
    rows = _by_head(weight, num_groups, head_dim)[:, :-1]
    return rows.float() if weight.dtype in (torch.bfloat16, torch.float16) else rows


def take_auxiliary_losses(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Collect the terms of the last forward pass, and clear them in their modules.

    Returns:
        {name: sum over the modules}, scalars with gradients, with the same names on every rank.
    """
    losses: dict[str, torch.Tensor] = {}
    for module in model.modules():
        auxiliary = getattr(module, "auxiliary_loss", None)
        if auxiliary is not None:
            name, term = auxiliary
            losses[name] = losses[name] + term if name in losses else term
            module.auxiliary_loss = None  # type: ignore[assignment]
    return losses
