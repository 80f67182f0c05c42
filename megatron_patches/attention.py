"""The patched self-attention: Query and Key projections are frozen buffers, the Value projection trains.

    q = W_q x,  k = W_k x    (W_q, W_k: regenerated from a recipe, never trained, never saved)
    v = W_v x                (trainable, sharded over heads like the stock layer)

The three products share one autograd function, so that the layer performs exactly the collectives of
megatron-core's own column-parallel QKV layer: without sequence parallelism one all-reduce of the input
gradient; with it one all-gather forward, and one all-gather and one reduce-scatter backward. Two
column-parallel layers side by side would double them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType

from megatron_patches.orthonormal import BankRecipe
from megatron_patches.shards import layer_shard


class FrozenQueryKeySelfAttention(SelfAttention):
    """megatron-core's SelfAttention with the fused QKV projection replaced by `FrozenQueryKeyValueLinear`."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        recipe: BankRecipe,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        # megatron-core numbers layers globally from 1 and does not tell linear_qkv the number; the bank
        # counts from 0.
        linear_qkv = partial(FrozenQueryKeyValueLinear, recipe=recipe, layer=layer_number - 1)
        super().__init__(
            config=config,
            submodules=replace(submodules, linear_qkv=linear_qkv),
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            cp_comm_type=cp_comm_type,
            pg_collection=pg_collection,
        )

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`[seq, batch, hidden]` -> query, key, value, each `[seq, batch, heads or groups, head_dim]`."""
        assert key_value_states is None and not output_gate and split_qkv
        return self.linear_qkv(hidden_states)


class FrozenQueryKeyValueLinear(torch.nn.Module):
    """Column-parallel projection to this rank's queries, keys (frozen) and values (trainable).

    Attributes:
        query_key_weight: non-persistent buffer `[(heads + groups) * head_dim, hidden]` in the compute dtype.
            A buffer, not a parameter, because DeepSpeed partitions, gathers, broadcasts and saves parameters,
            frozen or not.
        value_weight: parameter `[groups * head_dim, hidden]`, marked as tensor-parallel for DeepSpeed's
            gradient norm.
    """

    query_key_weight: torch.Tensor

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[torch.Tensor], Any],
        gather_output: bool,
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool,
        tp_comm_buffer_name: str,
        tp_group: dist.ProcessGroup,
        recipe: BankRecipe,
        layer: int,
    ) -> None:
        super().__init__()
        assert not (bias or gather_output or is_expert), "the frozen projection has no bias and stays sharded"
        self.recipe = recipe
        self.layer = layer
        self.tp_group = tp_group
        self.sequence_parallel = config.sequence_parallel
        self.dtype = config.params_dtype
        self.num_heads = recipe.num_attention_heads // tp_group.size()
        self.num_groups = recipe.num_query_groups // tp_group.size()
        device = torch.cuda.current_device()
        self.register_buffer("query_key_weight", self.regenerate().to(device), persistent=False)
        value_shape = (self.num_groups * recipe.head_dim, input_size)
        self.value_weight = torch.nn.Parameter(torch.empty(value_shape, device=device, dtype=self.dtype))
        set_tensor_model_parallel_attributes(self.value_weight, is_parallel=True, dim=0, stride=1)

    def regenerate(self) -> torch.Tensor:
        """This rank's frozen rows, queries then keys, made anew on the CPU in the compute dtype."""
        rank, size = self.tp_group.rank(), self.tp_group.size()
        shards = [
            layer_shard(self.recipe, self.layer, role, rank, size, self.dtype) for role in ("query", "key")
        ]
        return torch.cat(shards)

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`[seq(/tp), batch, hidden]` -> query, key, value `[seq, batch, heads or groups, head_dim]`."""
        query_key, value = _FrozenQueryKeyTrainableValue.apply(
            hidden_states, self.query_key_weight, self.value_weight, self.tp_group, self.sequence_parallel
        )
        query_key = query_key.unflatten(-1, (self.num_heads + self.num_groups, self.recipe.head_dim))
        query, key = query_key.split((self.num_heads, self.num_groups), dim=2)
        return query, key, value.unflatten(-1, (self.num_groups, self.recipe.head_dim))


class _FrozenQueryKeyTrainableValue(torch.autograd.Function):
    """(x, W_qk, W_v) -> (x W_qkᵀ, x W_vᵀ), with a gradient for x and W_v and none for W_qk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: torch.Tensor,
        query_key_weight: torch.Tensor,
        value_weight: torch.Tensor,
        tp_group: dist.ProcessGroup,
        sequence_parallel: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # The local slice is kept for backward, not the gathered sequence: the memory sequence parallelism
        # exists to save.
        ctx.save_for_backward(hidden_states, query_key_weight, value_weight)
        ctx.tp_group = tp_group
        ctx.sequence_parallel = sequence_parallel
        if sequence_parallel:
            hidden_states, _ = _all_gather_sequence(hidden_states, tp_group, async_op=False)
        return hidden_states @ query_key_weight.t(), hidden_states @ value_weight.t()

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, query_key_grad: torch.Tensor, value_grad: torch.Tensor
    ) -> tuple[torch.Tensor, None, torch.Tensor, None, None]:
        hidden_states, query_key_weight, value_weight = ctx.saved_tensors
        # Each collective overlaps a product that does not depend on it: the gather overlaps the input
        # gradient, and the reduction of the input gradient overlaps the weight gradient of V.
        gather = None
        if ctx.sequence_parallel:
            hidden_states, gather = _all_gather_sequence(hidden_states, ctx.tp_group, async_op=True)
        input_grad = query_key_grad @ query_key_weight
        input_grad = torch.addmm(input_grad.flatten(0, 1), value_grad.flatten(0, 1), value_weight).view_as(
            input_grad
        )
        if gather is not None:
            gather.wait()
        input_grad, reduction = _reduce_input_grad(input_grad, ctx.tp_group, ctx.sequence_parallel)
        value_weight_grad = value_grad.flatten(0, 1).t() @ hidden_states.flatten(0, 1)
        if reduction is not None:
            reduction.wait()
        return input_grad, None, value_weight_grad, None, None


def _all_gather_sequence(
    local: torch.Tensor, group: dist.ProcessGroup, async_op: bool
) -> tuple[torch.Tensor, dist.Work | None]:
    """Gather `[seq/tp, batch, hidden]` slices along the sequence; valid once the returned work is done."""
    gathered = local.new_empty((local.size(0) * group.size(), *local.shape[1:]))
    return gathered, dist.all_gather_into_tensor(gathered, local.contiguous(), group=group, async_op=async_op)


def _reduce_input_grad(
    grad: torch.Tensor, group: dist.ProcessGroup, sequence_parallel: bool
) -> tuple[torch.Tensor, dist.Work | None]:
    """Start summing the input gradient over the ranks; with `sequence_parallel` each keeps its slice."""
    if group.size() == 1:
        return grad, None
    if not sequence_parallel:
        return grad, dist.all_reduce(grad, group=group, async_op=True)
    local = grad.new_empty((grad.size(0) // group.size(), *grad.shape[1:]))
    return local, dist.reduce_scatter_tensor(local, grad, group=group, async_op=True)
