"""Small trainable corrections of frozen queries and keys.

With q_h = W_q x of head h (k likewise), in this order:

    low_rank     q_h += B_qh A_q x,  k_h += B_kh A_k x    A [rank, hidden] shared by the heads; B starts at 0
    core         q_h ← C_h q_h                            C_h [head_dim, head_dim] starts as I; queries only
    qk_norm      q_h ← g_qh ∘ q_h / rms(q_h), k alike     gains g start at 1; the scale becomes at once the
                                                          one that orthonormal rows have on average
    logit_scale  q_h ← s_h q_h                            s_h starts at 1

Weights and costs are declared in `megatron_patches.recipe.adapters`; here are the formulas. All weights but A
belong to a head and are sharded with it. A is the same on every tensor-parallel rank; each rank's gradient of
it covers its own heads only, so it carries the mark `partial_gradient` (see `freeze`). The projection layer
owns A and makes A x in the collective that its other products share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from megatron_patches.bank.orthonormal import Role
from megatron_patches.engine.compat import mark_tensor_parallel
from megatron_patches.recipe.adapters import AdapterSizes, AdapterWeight, in_order

QK_NORM_EPSILON = 1e-6

Weights = Mapping[str, torch.Tensor]
"""An adapter's tensors by name; the product of a shared one with the input stands in that one's place."""
Formula = Callable[[torch.Tensor, torch.Tensor, Weights], tuple[torch.Tensor, torch.Tensor]]
"""(queries `[seq, batch, heads, head_dim]`, keys `[seq, batch, groups, head_dim]`, weights) -> both."""


def low_rank(query: torch.Tensor, key: torch.Tensor, weights: Weights) -> tuple[torch.Tensor, torch.Tensor]:
    """Add B A x."""
    for_query, for_key = weights["low_rank_down"].chunk(2, dim=-1)
    query = query + (for_query @ weights["up_query"].t()).view_as(query)
    return query, key + (for_key @ weights["up_key"].t()).view_as(key)


def core(query: torch.Tensor, key: torch.Tensor, weights: Weights) -> tuple[torch.Tensor, torch.Tensor]:
    """Multiply each head's query by the head's matrix."""
    return torch.einsum("sbhe,hde->sbhd", query, weights["core"]), key


def qk_norm(query: torch.Tensor, key: torch.Tensor, weights: Weights) -> tuple[torch.Tensor, torch.Tensor]:
    """Divide each head's vector by its root mean square, in fp32, and multiply by the head's gain."""
    return _rms_norm(query, weights["query_gain"]), _rms_norm(key, weights["key_gain"])


def logit_scale(
    query: torch.Tensor, key: torch.Tensor, weights: Weights
) -> tuple[torch.Tensor, torch.Tensor]:
    """Multiply each head's query by the head's scale."""
    return query * weights["logit_scale"].unsqueeze(-1), key


FORMULAS: Mapping[str, Formula] = {
    "low_rank": low_rank,
    "core": core,
    "qk_norm": qk_norm,
    "logit_scale": logit_scale,
}


class QueryKeyAdapters(torch.nn.Module):
    """The adapters of this rank's frozen heads in one layer, without the tensors that heads share.

    Args:
        names: of `recipe.adapters.ADAPTERS`.
        num_heads, num_groups: this rank's frozen query and key heads.
    """

    def __init__(
        self,
        names: Iterable[str],
        num_heads: int,
        num_groups: int,
        sizes: AdapterSizes,
        dtype: torch.dtype,
        device: torch.device | int,
    ) -> None:
        super().__init__()
        heads: dict[Role, int] = {"query": num_heads, "key": num_groups}
        self.steps: dict[str, tuple[str, ...]] = {}
        self.starts: dict[str, str] = {}
        for adapter in in_order(names):
            declared = adapter.weights(sizes)
            self.steps[adapter.name] = tuple(weight.name for weight in declared)
            for weight in declared:
                if weight.role is not None:
                    self.starts[weight.name] = weight.start
                    made = sharded_parameter(weight, heads[weight.role], dtype, device)
                    self.register_parameter(weight.name, made)

    @torch.no_grad()
    def fill(self) -> None:
        """Give every parameter its start value."""
        for name, start in self.starts.items():
            weight = getattr(self, name)
            if start == "identity":
                weight.copy_(torch.eye(weight.size(-1), dtype=weight.dtype).expand_as(weight))
            else:
                weight.fill_(1.0 if start == "ones" else 0.0)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, shared: Weights
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Correct queries `[seq, batch, heads, head_dim]` and keys `[seq, batch, groups, head_dim]`.

        Args:
            shared: the input's products with the tensors that heads share, by name, `[seq, batch, rows]`.
        """
        return self.apply_some(tuple(self.steps), query, key, shared)

    def apply_some(
        self, names: Iterable[str], query: torch.Tensor, key: torch.Tensor, shared: Weights
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Apply some of the adapters, in this order and in the type of `query`; arguments as of `forward`."""
        for name in names:
            weights = {
                own: shared[own] if own in shared else getattr(self, own).to(query.dtype)
                for own in self.steps[name]
            }
            query, key = FORMULAS[name](query, key, weights)
        return query, key


def sharded_parameter(
    weight: AdapterWeight, heads: int, dtype: torch.dtype, device: torch.device | int
) -> torch.nn.Parameter:
    """Return the parameter for `heads` heads of a role, marked as tensor-parallel; values are not set."""
    shape = (heads * weight.shape[0], *weight.shape[1:])
    made = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
    mark_tensor_parallel(made, dim=0)
    made.no_weight_decay = not weight.decay  # type: ignore[attr-defined]  # see `freeze`
    return made


def _rms_norm(vectors: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    normalised = torch.nn.functional.rms_norm(vectors.float(), vectors.shape[-1:], eps=QK_NORM_EPSILON)
    return normalised.type_as(vectors) * gain.view(vectors.shape[-2:])
