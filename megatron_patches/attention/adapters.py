"""Adapters: small trainable changes of queries, keys and values.

With q_h = W_q x of head h (k likewise), in this order:

    low_rank           q_h += B_qh A_q x,  k_h += B_kh A_k x   B starts at 0, or normal where there
                                                               is no W
    query_key_bias     q_h ← q_h + b_qh, k alike               b starts at 0
    short_convolution  k_t ← Σ_j c_j ∘ k_(t−j), v alike        c_0 starts at 1; of the odd channels
                                                               of k, c_1
    channel_scale      q_h ← exp(s_h) ∘ q_h                    s starts at 0

A `[rank, hidden]` is shared by the heads.

Weights and costs are declared in `megatron_patches.recipe.adapters`; here are the formulas. All
weights but A belong to a head and are sharded with it. A is the same on every tensor-parallel rank,
and each rank's gradient of it covers its own heads only. The projection layer owns A and makes A x
in the collective that its other products share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from megatron_patches.attention.convolution import Reach, convolve
from megatron_patches.errors import MethodError
from megatron_patches.recipe.adapters import Adapter, AdapterSizes, HeadRole, even_values
from megatron_patches.recipe.parts import Start


class Heads(NamedTuple):
    """Queries, keys and values of the heads of a layer.

    Attributes:
        query: `[seq, batch, heads, head_dim]`; without heads where low_rank makes them.
        key: `[seq, batch, groups, head_dim]`, as the queries.
        value: `[seq, batch, groups, head_dim]`; None where only queries and keys are needed.
        reach: masks of the earlier tokens that a token sees (see `convolution`).
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor | None = None
    reach: Reach = None


Weights = Mapping[str, torch.Tensor]
"""An adapter's tensors by name.

A tensor that heads share is replaced by its product with the input, `[seq, batch, rows]`.
"""
Formula = Callable[[Heads, Weights], Heads]


def low_rank(heads: Heads, weights: Weights) -> Heads:
    """Add B A x to queries and keys; without queries and keys, B A x takes their place.

    Args:
        heads: queries and keys, and values if needed.
        weights: `low_rank_down`: the product A x `[seq, batch, 2 * rank]`, for queries, then for
            keys; `up_query` `[heads * head_dim, rank]`; `up_key` `[groups * head_dim, rank]`.

    Returns:
        The corrected heads.
    """
    for_query, for_key = weights["low_rank_down"].chunk(2, dim=-1)
    query = _up(for_query, weights["up_query"])
    key = _up(for_key, weights["up_key"])
    # Without W there are no heads to add to: B A x is all that queries and keys consist of.
    if not heads.query.size(2) and query.size(-1):
        by_head = (-1, heads.query.size(-1))
        return heads._replace(query=query.unflatten(-1, by_head), key=key.unflatten(-1, by_head))
    return heads._replace(
        query=heads.query + query.view_as(heads.query), key=heads.key + key.view_as(heads.key)
    )


def query_key_bias(heads: Heads, weights: Weights) -> Heads:
    """Add each head's biases to its queries and keys.

    Args:
        heads: queries and keys, and values if needed.
        weights: `query_bias` `[heads * head_dim]` and `key_bias` `[groups * head_dim]`.

    Returns:
        The corrected heads, of the same shapes.
    """
    query, key = heads.query, heads.key
    return heads._replace(
        query=query + weights["query_bias"].view(query.shape[-2:]),
        key=key + weights["key_bias"].view(key.shape[-2:]),
    )


def short_convolution(heads: Heads, weights: Weights) -> Heads:
    """Mix each channel of keys and values with the same channel of the tokens before.

    Args:
        heads: queries and keys, and values if needed.
        weights: `key_taps` and `value_taps`, `[groups * head_dim, taps]`, or one of both.

    Returns:
        The corrected heads, of the same shapes.
    """
    if "key_taps" in weights:
        heads = heads._replace(key=convolve(heads.key, weights["key_taps"], heads.reach))
    if "value_taps" in weights and heads.value is not None:
        heads = heads._replace(value=convolve(heads.value, weights["value_taps"], heads.reach))
    return heads


def channel_scale(heads: Heads, weights: Weights) -> Heads:
    """Multiply each channel of the queries by the exponential of its weight.

    Args:
        heads: queries and keys, and values if needed.
        weights: `log_scale` `[heads * head_dim]`.

    Returns:
        The corrected heads, of the same shapes.
    """
    return heads._replace(
        query=heads.query * weights["log_scale"].exp().view(heads.query.shape[-2:])
    )


FORMULAS: Mapping[str, Formula] = {
    formula.__name__: formula
    for formula in (
        low_rank,
        query_key_bias,
        short_convolution,
        channel_scale,
    )
}


class HeadAdapters(torch.nn.Module):
    """The adapters of this rank's adapted heads in one layer, without the tensors that heads share.

    Args:
        adapters: adapters in the order in which they are applied.
        num_heads: this rank's adapted query heads.
        num_groups: this rank's adapted key and value heads.
        dtype: data type of the parameters, which have no values yet.
    """

    def __init__(
        self,
        adapters: Iterable[Adapter],
        num_heads: int,
        num_groups: int,
        sizes: AdapterSizes,
        dtype: torch.dtype,
        device: torch.device | int | str,
    ) -> None:
        super().__init__()
        heads: dict[HeadRole, int] = {"query": num_heads, "key": num_groups, "value": num_groups}
        self.steps: dict[str, tuple[str, ...]] = {}
        for adapter in adapters:
            adapter_weights = adapter.weights(sizes)
            self.steps[adapter.name] = tuple(weight.name for weight in adapter_weights)
            for weight in adapter_weights:
                # A tensor without a role is shared by the heads; the projection layer owns it.
                if weight.role is not None:
                    shape = (heads[weight.role] * weight.shape[0], *weight.shape[1:])
                    parameter = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
                    self.register_parameter(weight.name, parameter)

    def forward(self, heads: Heads, shared: Weights) -> Heads:
        """Correct queries, keys and values by all adapters.

        Args:
            heads: queries, keys and values of the adapted heads.
            shared: products of the input with tensors that heads share, by name,
                `[seq, batch, rows]`.

        Returns:
            The corrected heads.
        """
        return self.apply_some(tuple(self.steps), heads, shared)

    def apply_some(self, names: Iterable[str], heads: Heads, shared: Weights) -> Heads:
        """Apply some of the adapters, as `forward` applies all.

        Args:
            names: names of the adapters, in the order in which they are applied.
            heads: queries, keys and values of the adapted heads; weights are cast to their type.
            shared: products of the input with tensors that heads share, by name,
                `[seq, batch, rows]`.

        Returns:
            The corrected heads.
        """
        for name in names:
            weights = {
                weight_name: shared[weight_name]
                if weight_name in shared
                else getattr(self, weight_name).to(heads.query.dtype)
                for weight_name in self.steps[name]
            }
            heads = FORMULAS[name](heads, weights)
        return heads


@torch.no_grad()
def require_effect(adapters: Iterable[Adapter], sizes: AdapterSizes, *, qk_norm: bool) -> None:
    """Check that every tensor of the adapters can change a score or a value.

    It is tried: each tensor in turn is drawn anew, for one head of a few random tokens. Scores are
    looked at before the softmax, which also takes back what is the same for all keys of a query.

    Args:
        qk_norm: Whether queries and keys are normalised afterwards.

    Raises:
        MethodError: a tensor would train without changing anything.
    """
    adapters = tuple(adapters)
    module = HeadAdapters(
        adapters, num_heads=1, num_groups=1, sizes=sizes, dtype=torch.float64, device="cpu"
    )
    generator = torch.Generator().manual_seed(0)

    def draw(shape: Sequence[int]) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    tokens = 2 * sizes.taps
    query_heads = 0 if sizes.alone else 1
    heads = Heads(
        draw((tokens, 1, query_heads, sizes.head_dim)),
        draw((tokens, 1, query_heads, sizes.head_dim)),
        draw((tokens, 1, 1, sizes.head_dim)),
    )
    products = {
        weight.name: draw((tokens, 1, weight.shape[0]))
        for adapter in adapters
        for weight in adapter.weights(sizes)
        if weight.role is None
    }
    tensors = {**dict(module.named_parameters()), **products}
    for name, parameter in module.named_parameters():
        parameter.copy_(draw(tensors[name].shape))

    def outcome() -> torch.Tensor:
        corrected = module(heads, products)
        query, key = corrected.query, corrected.key
        if qk_norm:
            query, key = (torch.nn.functional.normalize(rows, dim=-1) for rows in (query, key))
        scores = torch.einsum("qbhd,kbhd->bhqk", query, key)
        assert corrected.value is not None
        return torch.cat([scores.flatten(), corrected.value.flatten()])

    outcome_before = outcome()
    for adapter in adapters:
        for weight in adapter.weights(sizes):
            tensor = tensors[weight.name]
            drawn_before = tensor.clone()
            tensor.copy_(draw(tensor.shape))
            if torch.allclose(outcome(), outcome_before, rtol=1e-9):
                cause = "the norm of queries and keys (model.qk_norm) undoes it; " * qk_norm
                raise MethodError(
                    f"attention.adapters names {adapter.name}, whose tensor {weight.name} would "
                    f"train without changing a score or a value: {cause}leave the adapter out"
                )
            tensor.copy_(drawn_before)


@torch.no_grad()
def fill_evenly(weight: torch.Tensor, start: Start, head_dim: int) -> None:
    """Fill a weight with initial values that are the same for every head, and not drawn.

    Args:
        weight: filled in place.
        head_dim: rows of taps that a head has.
    """
    weight.copy_(torch.as_tensor(even_values(weight.shape, start, head_dim)))


def _up(inner: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply `[..., rank]` by `[rows, rank]`ᵀ."""
    # Copied: in that layout gradients take less time on a CPU.
    return inner @ weight.t().contiguous()
