"""Small trainable corrections of frozen queries and keys.

With q_h = W_q x of head h (k likewise), in this order:

    low_rank     q_h += B_qh A_q x,  k_h += B_kh A_k x    A [rank, hidden] shared by the heads; B starts at 0
    core         q_h ← C_h q_h                            C_h [head_dim, head_dim] starts as I; queries only
    qk_norm      q_h ← g_qh ∘ q_h / rms(q_h), k alike     gains g start at 1; the scale becomes at once the
                                                          one that orthonormal rows have on average
    logit_scale  q_h ← s_h q_h                            s_h starts at 1

All but A belong to a head and are sharded with it. A is the same on every tensor-parallel rank; each rank's
gradient of it covers its own heads only, so it carries the mark `partial_gradient` (see `freeze`). The
product A x is made by the projection layer, in the collective that its other products share.

The sources: LoRA (Hu et al., 2021) for low_rank; query-key normalisation (Henry et al., 2020) for qk_norm.

Version-sensitive: sets the marks by which megatron-core 0.16 knows a tensor-parallel parameter.
"""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes

from megatron_patches.bank.orthonormal import Role

QK_NORM_EPSILON = 1e-6


class QueryKeyAdapters(torch.nn.Module):
    """The adapters of this rank's frozen heads in one layer.

    Args:
        names: of `policy.ADAPTERS`.
        num_heads, num_groups: this rank's frozen query and key heads.
        rank: of low_rank.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        num_heads: int,
        num_groups: int,
        head_dim: int,
        rank: int,
        dtype: torch.dtype,
        device: torch.device | int,
    ) -> None:
        super().__init__()
        self.heads, self.groups, self.head_dim = num_heads, num_groups, head_dim
        heads: dict[Role, int] = {"query": num_heads, "key": num_groups}

        def parameter(name: str, role: Role, *of_head: int, decay: bool = True) -> torch.nn.Parameter | None:
            """One parameter for the heads of a role, from the shape of a head's part of it."""
            if name not in names:
                return None
            shape = (heads[role] * of_head[0], *of_head[1:])
            weight = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
            set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=0, stride=1)
            # Ranks may hold unequal numbers of frozen heads: whoever joins their shards needs these.
            weight.role, weight.rows_per_head = role, of_head[0]  # type: ignore[attr-defined]
            weight.no_weight_decay = not decay  # type: ignore[attr-defined]  # decay would pull C from I to 0
            return weight

        self.up_query = parameter("low_rank", "query", head_dim, rank)
        self.up_key = parameter("low_rank", "key", head_dim, rank)
        self.core = parameter("core", "query", 1, head_dim, head_dim, decay=False)
        self.query_gain = parameter("qk_norm", "query", head_dim, decay=False)
        self.key_gain = parameter("qk_norm", "key", head_dim, decay=False)
        self.logit_scale = parameter("logit_scale", "query", 1, decay=False)

    @torch.no_grad()
    def fill(self) -> None:
        """Give every parameter its start value."""
        for up in (self.up_query, self.up_key):
            if up is not None:
                up.zero_()
        for one in (self.query_gain, self.key_gain, self.logit_scale):
            if one is not None:
                one.fill_(1.0)
        if self.core is not None:
            self.core.copy_(torch.eye(self.head_dim, dtype=self.core.dtype).expand_as(self.core))

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, low_rank: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Correct queries `[seq, batch, heads, head_dim]` and keys `[seq, batch, groups, head_dim]`.

        Args:
            low_rank: A_q x and A_k x, `[seq, batch, 2 * rank]`, where the adapter of that name is used.
        """
        if low_rank is not None:
            assert self.up_query is not None and self.up_key is not None
            for_query, for_key = low_rank.chunk(2, dim=-1)
            query = query + (for_query @ self.up_query.t()).view_as(query)
            key = key + (for_key @ self.up_key.t()).view_as(key)
        if self.core is not None:
            query = torch.einsum("sbhe,hde->sbhd", query, self.core)
        if self.query_gain is not None and self.key_gain is not None:
            query, key = _rms_norm(query, self.query_gain), _rms_norm(key, self.key_gain)
        if self.logit_scale is not None:
            query = query * self.logit_scale.unsqueeze(-1)
        return query, key


def _rms_norm(vectors: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """Each head's vector divided by its root mean square, in fp32, times the head's gain."""
    normalised = torch.nn.functional.rms_norm(vectors.float(), vectors.shape[-1:], eps=QK_NORM_EPSILON)
    return normalised.type_as(vectors) * gain.view(vectors.shape[-2:])
