"""Causal self-attention with frozen Query and Key rows as a plain torch module, for any model.

    attention = FrozenAttention(hidden_size=256, num_attention_heads=4, seed=1, layer=0)
    hidden_states = hidden_states + attention(norm(hidden_states))

One process computes all heads; needs neither megatron-core nor a process group. The rows are those
of the training program (`projections`) at the same sizes and (seed, layer, role, head), bit for
bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megatron_patches.attention.rotary import RotaryAngles
from megatron_patches.bank.monarch import Factors, add_input_grad, project
from megatron_patches.bank.orthonormal import Role
from megatron_patches.bank.shards import query_key_rows
from megatron_patches.errors import MethodError
from megatron_patches.recipe.policy import VARIANTS, policy_for
from megatron_patches.recipe.recipes import bank_recipe

DRAWN = tuple(
    name
    for name, policy in VARIANTS.items()
    if not (policy.trainable or policy.frozen_heads or policy.unfreeze or policy.adapters)
    and policy.init != "pretrained"
)
"""The variants that FrozenAttention knows.

Their rows are drawn from a seed and frozen in all heads throughout, without adapters.
"""


class FrozenAttention(nn.Module):
    """Causal attention softmax(q·k/√head_dim) v, with q and k by rows drawn from a seed.

    V and the output projection train.

    The state dict holds the weights of v_proj and o_proj only; the rows are drawn wherever the
    module is made. So keep seed and layer with a saved model: with other rows the same weights are
    another model.

    Args:
        hidden_size: width of the inputs and outputs.
        num_attention_heads: query heads.
        seed: seed of the rows, from 0.
        layer: number of the layer, from 0; give each layer of a model its own.
        num_query_groups: key and value heads; None: as many as query heads.
        head_dim: width of a head; None: hidden_size / num_attention_heads.
        variant: one of DRAWN.
        scope: whether rows are orthonormal within a head or a layer, see docs/method.md; None: as
            the variant.
        construction: how rows are made, see docs/method.md; None: as the variant.
        shared: keys have the rows of queries; None: as the variant.
        rotary_base: of rotary positions, such as 10000; None: queries and keys are not rotated.
        dropout: probability of dropping an attention probability, in training.
        device: of the module; None: torch's default.
        dtype: of weights and rows; None: torch's default.

    Attributes:
        recipe: of the rows, for `bank_rows`.
        query_key_weight: buffer `[rows, hidden]` of queries, then keys, in the module's dtype, or
            None.
        query_key_right: buffer, the right factor of the rows of a structured variant, or None.
        query_key_left: buffer, the left factor, or None.

    Raises:
        MethodError: the variant is not one of DRAWN, or there are no such rows at these sizes.
    """

    query_key_weight: torch.Tensor | None
    query_key_right: torch.Tensor | None
    query_key_left: torch.Tensor | None

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        *,
        seed: int,
        layer: int,
        num_query_groups: int | None = None,
        head_dim: int | None = None,
        variant: str = "orthogonal",
        scope: str | None = None,
        construction: str | None = None,
        shared: bool | None = None,
        rotary_base: float | None = None,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        policy = policy_for(
            variant, {"scope": scope, "construction": construction, "shared": shared}
        )
        if variant not in DRAWN:
            raise MethodError(
                "FrozenAttention has rows that are drawn from a seed and frozen in all heads, "
                f"which variant '{variant}' has not; it knows {', '.join(DRAWN)}"
            )
        self.num_heads = num_attention_heads
        self.num_groups = num_query_groups or num_attention_heads
        self.head_dim = head_dim or hidden_size // max(1, num_attention_heads)
        if not head_dim and self.head_dim * num_attention_heads != hidden_size:
            raise MethodError(
                f"hidden_size={hidden_size} is not divisible by "
                f"num_attention_heads={num_attention_heads}; give head_dim"
            )
        if rotary_base is not None and self.head_dim % 2:
            raise MethodError(f"head_dim={self.head_dim} is odd; rotary positions need an even one")
        recipe = bank_recipe(
            policy,
            seed=seed,
            hidden_size=hidden_size,
            head_dim=self.head_dim,
            num_attention_heads=num_attention_heads,
            num_query_groups=self.num_groups,
        )
        assert recipe is not None  # every variant of DRAWN has rows
        self.recipe, self.layer, self.variant = recipe, layer, variant
        self.shared, self.dropout = policy.shared, dropout
        self.rotary = None if rotary_base is None else RotaryAngles(self.head_dim, rotary_base)
        options: dict[str, Any] = {"bias": False, "device": device, "dtype": dtype}
        self.v_proj = nn.Linear(hidden_size, self.num_groups * self.head_dim, **options)
        self.o_proj = nn.Linear(num_attention_heads * self.head_dim, hidden_size, **options)
        for name in ("query_key_weight", "query_key_right", "query_key_left"):
            self.register_buffer(name, None, persistent=False)
        self._draw()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Attend within each sequence of `[batch, tokens, hidden]`; return the same shape."""
        query, key = self.queries_and_keys(hidden_states)
        value = self.v_proj(hidden_states).unflatten(-1, (self.num_groups, self.head_dim))
        context = nn.functional.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
            enable_gqa=self.num_groups != self.num_heads,
        )
        output: torch.Tensor = self.o_proj(context.transpose(1, 2).flatten(2))
        return output

    def queries_and_keys(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Project `[batch, tokens, hidden]` to `[batch, tokens, heads, head_dim]`, and rotate."""
        rows: torch.Tensor
        if self.query_key_weight is not None:
            rows = nn.functional.linear(hidden_states, self.query_key_weight)
        else:
            assert self.query_key_right is not None and self.query_key_left is not None
            # Autocast does not cast the operands of products that write into `out`.
            with torch.autocast(hidden_states.device.type, enabled=False):
                inputs = hidden_states.to(self.query_key_left.dtype)
                rows = _Project.apply(inputs, self.query_key_right, self.query_key_left)  # type: ignore[no-untyped-call]
        heads = rows.view(*rows.shape[:-1], -1, self.head_dim)
        query, key = heads[:, :, : self.num_heads], heads[:, :, self.num_heads :]
        if self.shared:  # a key head has the rows of the first query head of its group
            key = query[:, :, :: self.num_heads // self.num_groups]
        if self.rotary is not None:
            query, key = (
                self.rotary.rotate(one.transpose(0, 1)).transpose(0, 1) for one in (query, key)
            )
        return query, key

    def extra_repr(self) -> str:
        """Return what the rows depend on, for `print(model)`."""
        return (
            f"variant={self.variant!r}, seed={self.recipe.seed}, layer={self.layer}, "
            f"shared={self.shared}"
        )

    def _draw(self) -> None:
        """Fill the buffers, cast once from float64 to the trained weights' dtype and device."""
        keys = range(0 if self.shared else self.num_groups)
        heads: dict[Role, range] = {"query": range(self.num_heads), "key": keys}
        weight = self.v_proj.weight
        rows = query_key_rows(self.recipe, self.layer, heads, weight.dtype)
        if isinstance(rows, Factors):
            self.query_key_right, self.query_key_left = (
                factor.to(weight.device) for factor in rows
            )
        else:
            self.query_key_weight = rows.to(weight.device)

    def _apply(
        self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> FrozenAttention:
        """Move or cast the module, but draw its rows again for another dtype."""
        # A cast of rows that were cast before would round twice.
        dtype, was_meta = self.v_proj.weight.dtype, self.v_proj.weight.is_meta
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if dtype != self.v_proj.weight.dtype or was_meta:
            self._draw()
        return self


class _Project(torch.autograd.Function):
    """`monarch.project` by frozen factors.

    The gradient is of the input only, which need not be kept.
    """

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, right: torch.Tensor, left: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(right, left)
        return project(inputs, Factors(right, left))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        factors = Factors(*ctx.saved_tensors)
        shape = (*grad.shape[:-1], factors.right.size(0) * factors.right.size(2))
        total = add_input_grad(grad, factors, grad.new_zeros(shape).flatten(0, -2))
        return total.view(shape), None, None
