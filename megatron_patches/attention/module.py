"""Causal self-attention with frozen Query and Key rows as a plain torch module, for any model.

    attention = FrozenAttention(hidden_size=256, num_attention_heads=4, seed=1, layer=0)
    hidden_states = hidden_states + attention(norm(hidden_states))

One process computes all heads; needs neither megatron-core nor a process group. The rows are those
of the training program (`projections`) at the same sizes and (seed, layer, role, head), bit for
bit.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import nn

from megatron_patches.attention.adapters import fill_evenly
from megatron_patches.attention.head_rows import HeadRows
from megatron_patches.attention.rotary import RotaryAngles
from megatron_patches.bank.monarch import Factors, add_input_grad, project
from megatron_patches.bank.shards import digest, query_key_rows, rank_factors, role_digest
from megatron_patches.errors import MethodError
from megatron_patches.recipe.policy import QKPolicy
from megatron_patches.recipe.recipes import bank_recipe
from megatron_patches.recipe.variants import VARIANTS, policy_for

KNOWN = tuple(
    name
    for name, policy in VARIANTS.items()
    if not (policy.synthesizer or policy.frozen_heads or policy.phases or policy.penalty)
    and policy.init != "pretrained"
)
"""Variants that FrozenAttention supports: those that describe one layer completely."""
_STD = 0.02
"""Standard deviation of trained rows that start from no bank, as `model.init_std`."""


class FrozenAttention(HeadRows):
    """Causal attention softmax(q·k/√head_dim) v, with q and k by rows drawn from a seed.

    V, the output projection, adapters and the rows of heads that are not frozen train.

    The state dict holds what trains, and recipe and digest of the frozen rows, which are drawn
    wherever the module is made: with other rows the same weights are another model, and
    `load_state_dict` refuses them.

    Args:
        hidden_size: width of the inputs and outputs.
        num_attention_heads: query heads.
        seed: seed of the rows, from 0.
        layer: number of the layer, from 0; give each layer of a model its own.
        num_query_groups: key and value heads; None: as many as query heads.
        head_dim: width of a head; None: hidden_size / num_attention_heads.
        variant: one of KNOWN.
        frozen_heads: fraction of the key heads that are frozen, with their query heads, of a
            variant that freezes any; the others train.
        qk_norm: RMS norm of queries and keys before their rotation, with gains `[head_dim]` that
            the heads share.
        norm_epsilon: term added to the mean square of the norm.
        rotary_base: base of the rotary wavelengths, such as 10000; None: no rotation.
        dropout: probability of dropping an attention probability, in training.
        device: device of the module; None: torch's default.
        dtype: data type of weights and rows; None: torch's default.
        axes: further keys of the section `attention` of a configuration, as in docs/method.md:
            scope, construction, gaussian_std, shared, frozen_roles, adapters, low_rank, taps,
            convolved; an axis that is missing or None is the variant's.

    Attributes:
        recipe: recipe of the rows, for `bank_rows`; None: there are none.
        query_key_weight: buffer `[rows, hidden]` of frozen queries, then keys, in the module's
            dtype, or None.
        query_key_right: buffer, the right factor of the rows of a structured variant, or None.
        query_key_left: buffer, the left factor, or None.

    Raises:
        MethodError: the variant is not one of KNOWN, or there are no such rows at these sizes.
    """

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
        frozen_heads: float = 1.0,
        qk_norm: bool = False,
        norm_epsilon: float = 1e-5,
        rotary_base: float | None = None,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **axes: Any,
    ) -> None:
        super().__init__()
        groups = num_query_groups or num_attention_heads
        policy = _policy(variant, axes, frozen_heads, groups)
        width = head_dim or hidden_size // max(1, num_attention_heads)
        if not head_dim and width * num_attention_heads != hidden_size:
            raise MethodError(
                f"hidden_size={hidden_size} is not divisible by "
                f"num_attention_heads={num_attention_heads}; give head_dim"
            )
        if num_attention_heads % groups:
            raise MethodError(
                f"num_attention_heads={num_attention_heads} is not divisible by "
                f"num_query_groups={groups}"
            )
        if rotary_base is not None and width % 2:
            raise MethodError(f"head_dim={width} is odd; rotary positions need an even one")
        recipe = bank_recipe(
            policy,
            seed=seed,
            hidden_size=hidden_size,
            head_dim=width,
            num_attention_heads=num_attention_heads,
            num_query_groups=groups,
        )
        options: dict[str, Any] = {
            "device": device or torch.get_default_device(),
            "dtype": dtype or torch.get_default_dtype(),
        }
        self._add_frozen_rows(
            policy,
            recipe,
            policy.frozen_groups(1, groups)[0],
            layer=layer,
            heads=(num_attention_heads, groups),
            sizes=(hidden_size, width),
            **options,
        )
        self.seed, self.variant, self.dropout = seed, variant, dropout
        self.rotary = None if rotary_base is None else RotaryAngles(width, rotary_base)
        self.v_proj = nn.Linear(hidden_size, groups * width, bias=False, **options)
        self.o_proj = nn.Linear(num_attention_heads * width, hidden_size, bias=False, **options)
        self.q_layernorm: nn.RMSNorm | None = None
        self.k_layernorm: nn.RMSNorm | None = None
        if qk_norm:
            self.q_layernorm = nn.RMSNorm(width, norm_epsilon, **options)
            self.k_layernorm = nn.RMSNorm(width, norm_epsilon, **options)
        self._add_trained(options["device"])
        self.reset_parameters()
        # torch gives this method no types.
        self.register_load_state_dict_pre_hook(_accept_without_identity)  # type: ignore[no-untyped-call]

    def get_extra_state(self) -> torch.Tensor:
        """Return recipe, layer and digest of the frozen rows, as bytes of JSON."""
        # A tensor, because safetensors holds nothing else.
        text = json.dumps(self._identity, sort_keys=True)
        return torch.tensor([*text.encode()], dtype=torch.uint8, device="cpu")

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Refuse weights that were trained over other frozen rows.

        Raises:
            MethodError: names what differs, or the state is damaged.
        """
        try:
            saved = json.loads(bytes(state.tolist()))
        except (ValueError, TypeError, RecursionError):
            saved = None
        if not isinstance(saved, dict):
            raise MethodError("the state of the frozen rows is damaged; load another checkpoint")
        own = self._identity
        for key in (*own, *saved):
            if saved.get(key) != own.get(key):
                raise MethodError(
                    f"these weights belong to other frozen rows: {key} is {saved.get(key)} there "
                    f"and {own.get(key)} here; make the module with the arguments of the saved one"
                )

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """Return recipe, layer and digest of the frozen rows; empty without any."""
        if self.recipe is None or not any(self.heads.frozen.values()):
            return {}
        rows = query_key_rows(self.recipe, self.layer, self.heads.frozen, torch.float32)
        digests = map(digest, rows if isinstance(rows, Factors) else (rows,))
        return {**self.recipe.as_dict(), "layer": self.layer, "sha256": role_digest(digests)}

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise everything that trains, from torch's generator or with equal values.

        Trained rows that start from a bank get the bank's values again.
        """
        for part in (self.v_proj, self.o_proj, self.q_layernorm, self.k_layernorm):
            if part is not None:
                part.reset_parameters()
        self._start_rows()
        sizes = self.policy.adapter_sizes(self.input_size, self.head_dim)
        for adapter in self.policy.corrections:
            for weight in adapter.weights(sizes):
                owner = self if weight.role is None else self.adapters
                assert owner is not None  # `_policy` refuses to correct heads where none are
                parameter = owner.get_parameter(weight.name)
                if weight.start == "fan_in":
                    parameter.normal_(std=1 / math.sqrt(parameter.size(1)))
                else:
                    fill_evenly(parameter, weight.start, self.head_dim)

    def _start_rows(self) -> None:
        """Fill the rows that train, or their factors."""
        trainable = self.heads.trainable
        factors = self.trained_factors()
        if factors is not None:
            assert self.recipe is not None
            drawn = rank_factors(self.recipe, self.layer, trainable, torch.float32)
            for factor, start in zip(factors, drawn, strict=True):
                factor.copy_(start)
        elif self.trained_query_key is not None:
            # Heads that train beside frozen ones start like vanilla's, not from the bank.
            if self.policy.trainable and self.recipe is not None:
                rows = query_key_rows(self.recipe, self.layer, trainable, torch.float32)
                self.trained_query_key.copy_(rows.rows() if isinstance(rows, Factors) else rows)
            else:
                self.trained_query_key.normal_(std=_STD)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Attend within each sequence of `[batch, tokens, hidden]`; return the same shape."""
        query, key, value = self.queries_keys_values(hidden_states)
        context = nn.functional.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
            enable_gqa=self.queries_per_group > 1,
        )
        output: torch.Tensor = self.o_proj(context.transpose(1, 2).flatten(2))
        return output

    def queries_keys_values(
        self, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Project, correct, normalise and rotate.

        Args:
            hidden_states: `[batch, tokens, hidden]`.

        Returns:
            Queries `[batch, tokens, heads, head_dim]`, keys and values
            `[batch, tokens, groups, head_dim]`.
        """
        products = {"value": self.v_proj(hidden_states)}
        weights = {name: getattr(self, name) for name in self.shared_adapters}
        factors = self.trained_factors()
        weights["trained"] = self.trained_query_key if factors is None else factors.rows()
        for name, weight in weights.items():
            if weight is not None:
                products[name] = nn.functional.linear(hidden_states, weight)
        if self.frozen_groups:
            products["frozen"] = self._frozen_product(hidden_states)
        heads = self._assembled(
            {name: product.transpose(0, 1) for name, product in products.items()}
        )
        query, key, value, _ = heads
        assert value is not None
        if self.q_layernorm is not None and self.k_layernorm is not None:
            query = self.q_layernorm(query)
            key = self.k_layernorm(key)
        if self.rotary is not None:
            query = self.rotary.rotate(query)
            key = self.rotary.rotate(key)
        return query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)

    def _frozen_product(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Multiply by the frozen rows: `[batch, tokens, rows]`."""
        rows = self.frozen()
        if isinstance(rows, torch.Tensor):
            return nn.functional.linear(hidden_states, rows)
        # Autocast does not cast the operands of products that write into `out`.
        with torch.autocast(hidden_states.device.type, enabled=False):
            inputs = hidden_states.to(rows.left.dtype)
            product: torch.Tensor = _Project.apply(inputs, *rows)  # type: ignore[no-untyped-call]
            return product

    def extra_repr(self) -> str:
        """Return what the rows depend on, for `print(model)`."""
        return (
            f"variant={self.variant!r}, seed={self.seed}, layer={self.layer}, shared={self.shared}"
        )

    def _apply(
        self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> FrozenAttention:
        """Move or cast the module, but draw its rows again for another dtype."""
        # Rows are drawn again for another type: a cast of cast rows would round twice.
        was_meta = self.v_proj.weight.is_meta
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        weight = self.v_proj.weight
        if self.dtype != weight.dtype or was_meta:
            self.dtype = weight.dtype
            self._draw(weight.device)
        self._place_heads(weight.device)  # plain tensors, which torch does not move
        return self


def _accept_without_identity(
    module: FrozenAttention, state: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Let weights of an older version in, which do not say over which rows they were trained."""
    name = f"{prefix}_extra_state"
    if name not in state and any(key.startswith(prefix) for key in state):
        warnings.warn(
            f"the weights of {prefix.rstrip('.') or 'this module'} do not say which frozen rows "
            "they belong to: give the seed and layer that they were trained with",
            stacklevel=2,
        )
        state[name] = module.get_extra_state()


def _policy(variant: str, axes: dict[str, Any], frozen_heads: float, groups: int) -> QKPolicy:
    """Return the policy of one layer; MethodError if the module does not support it."""
    if frozen_heads != 1:
        axes = axes | {"frozen_heads": (("0", frozen_heads),)}
    policy = policy_for(variant, axes)
    if variant not in KNOWN:
        raise MethodError(
            f"variant '{variant}' is about more than one layer by itself (other layers, a file, a "
            f"loss, later steps or scores of one length); FrozenAttention knows {', '.join(KNOWN)}"
        )
    if frozen_heads != 1 and not policy.frozen_groups(1, groups)[0]:
        raise MethodError(f"frozen_heads={frozen_heads:g} freezes no head; use variant vanilla")
    return policy


class _Project(torch.autograd.Function):
    """`monarch.project` by frozen factors, with a gradient of the input only.

    Backward needs the factors alone, so that the input is not kept.
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
