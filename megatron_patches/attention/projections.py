"""Self-attention with frozen Query and Key projections and a trainable Value projection.

    q = W_q x,  k = W_k x    (W_q, W_k: regenerated from a recipe, never trained, never saved)
    v = W_v x                (trainable, sharded over heads like the stock layer)

Rows of some heads or roles may train instead (`HeadSplit`), keys may share the rows of queries, W_q
and W_k may be trained factors, or missing where low_rank takes their place; and `adapters` may
correct the result.

All products of x share one autograd function, so that the layer performs exactly the collectives of
megatron-core's own column-parallel QKV layer: without sequence parallelism one all-reduce of the
input gradient; with it one all-gather forward, and one all-gather and one reduce-scatter backward.
Two column-parallel layers side by side would double them.

Version-sensitive: takes the place of megatron-core's SelfAttention and of its linear_qkv.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType

from megatron_patches.attention.convolution import reach_of
from megatron_patches.attention.head_rows import HeadRows, Rows
from megatron_patches.attention.products import column_parallel_products
from megatron_patches.bank.orthonormal import BankRecipe
from megatron_patches.engine.documents import Visible
from megatron_patches.errors import MethodError
from megatron_patches.recipe.policy import QKPolicy


class FrozenQueryKeySelfAttention(SelfAttention):
    """megatron-core's SelfAttention with `FrozenQueryKeyValueLinear` for its fused QKV projection.

    megatron-core passes the other arguments of the constructor as it does to its own class.

    Args:
        policy: which heads are frozen, and which adapters correct them.
        recipe: recipe of frozen rows, and of trained ones that start from a bank; None: there are
            none.
        frozen_groups: global numbers of this layer's frozen key heads; their query heads are frozen
            with them.
        learned: state of the rows of the other heads.

    Attributes:
        recomputes_query_key: recompute structured queries and keys in backward instead of keeping
            them.

    Raises:
        MethodError: `submodules` has a part that this attention does not apply.
    """

    recomputes_query_key = False

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        policy: QKPolicy,
        recipe: BankRecipe | None,
        frozen_groups: tuple[int, ...],
        learned: Rows = Rows.TRAINED,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        name: str | None = None,
    ) -> None:
        applied = {"linear_qkv", "core_attention", "linear_proj", "q_layernorm", "k_layernorm"}
        for field in fields(submodules):
            if field.name not in applied and getattr(submodules, field.name) is not None:
                raise MethodError(
                    f"frozen queries and keys are made without megatron-core's {field.name}; "
                    "leave it out"
                )
        # linear_qkv does not get the layer number, which is global and from 1; the bank counts from
        # 0.
        linear_qkv = partial(
            FrozenQueryKeyValueLinear,
            policy=policy,
            recipe=recipe,
            frozen_groups=frozen_groups,
            learned=learned,
            layer=layer_number - 1,
        )
        super().__init__(
            config=config,
            submodules=replace(submodules, linear_qkv=linear_qkv),
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            cp_comm_type=cp_comm_type,
            pg_collection=pg_collection,
        )

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: Visible, **others: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend as megatron-core's SelfAttention does.

        Short convolutions mix only tokens that the mask lets see each other.

        Args:
            hidden_states: `[seq(/tp), batch, hidden]`, cut along seq under sequence parallelism.
            attention_mask: `[batch, 1, seq, seq]` bool, True where a position must not see another,
                the future included, or documents that stand alone; None: causal.
            others: megatron-core's further arguments, such as `packed_seq_params`.

        Returns:
            The output `[seq(/tp), batch, hidden]`, and its bias, which is None.
        """
        # The projection does not get the mask, which its short convolutions must respect.
        self.linear_qkv.look_back_within(attention_mask)
        attended: tuple[torch.Tensor, torch.Tensor | None]
        attended = super().forward(hidden_states, attention_mask, **others)
        return attended

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Project hidden states to queries, keys and values, with the norms that the model has.

        megatron-core's SelfAttention calls this method in its own forward.

        Args:
            hidden_states: `[seq(/tp), batch, hidden]`.
            key_value_states: argument of megatron-core's cross-attention; must be None.
            output_gate: argument of megatron-core's gated attention; must be False.
            split_qkv: must be True.

        Returns:
            This rank's queries `[seq, batch, heads, head_dim]`, keys and values
            `[seq, batch, groups, head_dim]`.
        """
        assert key_value_states is None and not output_gate and split_qkv
        if (
            self.recomputes_query_key
            and torch.is_grad_enabled()
            and self.linear_qkv.only_structured
        ):
            recompute = partial(self.linear_qkv.queries_and_keys, hidden_states.detach())
            self.core_attention.recompute_query_key = recompute
        query, key, value = self.linear_qkv(hidden_states)
        if self.q_layernorm is not None:
            query = self.q_layernorm(query)
        if self.k_layernorm is not None:
            key = self.k_layernorm(key)
        return query, key, value


class FrozenQueryKeyValueLinear(HeadRows):
    """Column-parallel projection to this rank's queries and keys (frozen) and values (trainable).

    Attributes:
        value_weight: parameter `[groups * head_dim, hidden]`.
    """

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
        name: str | None = None,
        policy: QKPolicy,
        recipe: BankRecipe | None,
        frozen_groups: tuple[int, ...],
        layer: int,
        learned: Rows = Rows.TRAINED,
    ) -> None:
        super().__init__()
        assert not (bias or gather_output or is_expert), (
            "the frozen projection has no bias and stays sharded"
        )
        self.tp_group = tp_group
        self.sequence_parallel = config.sequence_parallel
        device = torch.cuda.current_device()  # of the CPU too, see `compat.prepare_megatron_core`
        self._add_frozen_rows(
            policy,
            recipe,
            frozen_groups,
            layer=layer,
            heads=(config.num_attention_heads, config.num_query_groups),
            sizes=(input_size, config.kv_channels),
            tp_rank=(tp_group.rank(), tp_group.size()),
            dtype=config.params_dtype,
            device=device,
            learned=learned,
        )
        self.value_weight = self._parameter((self.num_groups * self.head_dim, input_size), device)
        self._add_trained(device)

    def look_back_within(self, visible: Visible) -> None:
        """Limit short convolutions to the tokens that an attention mask shows, from now on."""
        self.reach = reach_of(visible, self.taps) if self.taps else None

    def forward(
        self, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Project hidden states to this rank's queries, keys and values, adapters applied.

        Args:
            hidden_states: `[seq(/tp), batch, hidden]`, cut along seq under sequence parallelism.

        Returns:
            Queries `[seq, batch, heads, head_dim]`, keys and values
            `[seq, batch, groups, head_dim]`.
        """
        query, key, value, _ = self._assembled(self._products(hidden_states))
        assert value is not None
        return query, key, value

    @property
    def only_structured(self) -> bool:
        """Return whether queries and keys of this layer come from structured frozen rows alone."""
        alone = self.adapters is None and self.trained_query_key is None
        return alone and self.query_key_weight is None

    def queries_and_keys(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute queries and keys as `forward` does, for a layer that is `only_structured`.

        Call it without gradients.

        Args:
            hidden_states: `[seq(/tp), batch, hidden]`.

        Returns:
            Queries `[seq, batch, heads, head_dim]` and keys `[seq, batch, groups, head_dim]`.
        """
        (frozen,) = column_parallel_products(
            hidden_states,
            self.frozen(),
            tp_group=self.tp_group,
            sequence_parallel=self.sequence_parallel,
            weights=[],
        )
        return self._split(frozen, self.heads.frozen)

    def _products(self, hidden_states: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return {name: `[seq, batch, rows]`}, the products of the input with every weight."""
        rows = self.trained_query_key
        factors = self.trained_factors()
        kept = self.learned is Rows.KEPT
        # The order of `column_parallel_products`: the operand that may be factors, then the weights
        # that train, then the one that does not. It is also the order of the input gradient's sum.
        frozen = self.frozen() if self.frozen_groups else None
        operands = [
            ("frozen", frozen) if factors is None else ("trained", factors),
            ("value", self.value_weight),
            ("trained", None if kept else rows),
            *((name, getattr(self, name)) for name in self.shared_adapters),
            ("trained", rows if kept else None),
        ]
        products = column_parallel_products(
            hidden_states,
            operands[0][1],
            tp_group=self.tp_group,
            sequence_parallel=self.sequence_parallel,
            weights=[weight for _, weight in operands[1:] if weight is not None],
            kept=int(kept and rows is not None),
            factors_train=factors is not None and not kept,
        )
        names = [name for name, operand in operands if operand is not None]
        return dict(zip(names, products, strict=True))
