"""Self-attention whose scores do not depend on the tokens: the Synthesizer (Tay et al., ICML 2021).

    P_h = causal softmax(S_h),   o_h = P_h v_h,   v = W_v x

S_h is a learned matrix [seq, seq] of head h, whole (`random`) or as A_h B_hᵀ (`factorized`): see
`recipes`. There is no query, no key and nothing for a rotary embedding to turn; S_h itself knows
the positions. V and the output projection are megatron-core's own column- and row-parallel layers,
so the collectives are those of the ordinary layer. A rank owns the scores of its heads.

P_h is the same for every sample of a batch, so without a mask and without dropout it is made once
and applied as one product per group, [heads · seq, seq] × [seq, batch · head_dim].

Version-sensitive: has the constructor and the forward of megatron-core's SelfAttention.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule

from megatron_patches.bank.head_split import heads_of_rank
from megatron_patches.engine.random_streams import normal_rows, own_stream
from megatron_patches.errors import MethodError
from megatron_patches.recipe.recipes import ScoreRecipe


@dataclass
class SynthesizerSelfAttentionSubmodules:
    """The projections of a `SynthesizerSelfAttention`: column-parallel V, row-parallel output."""

    linear_v: type
    linear_proj: type


class SynthesizerSelfAttention(MegatronModule):
    """Synthesizer attention in the place of megatron-core's SelfAttention in a TransformerLayer.

    Args:
        layer_number: number of the layer, from 1, as megatron-core counts.
        trainable: the score matrices are parameters; else they are buffers.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SynthesizerSelfAttentionSubmodules,
        layer_number: int,
        recipe: ScoreRecipe,
        trainable: bool,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(config=config)
        assert not config.add_bias_linear and cp_comm_type is None
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp"])
        self.layer_number = layer_number
        self.hidden_size_per_attention_head = config.kv_channels
        self.core_attention = SynthesizerCoreAttention(
            config, layer_number - 1, recipe=recipe, trainable=trainable, tp_group=pg_collection.tp
        )
        shared_options = {
            "config": config,
            "bias": False,
            "is_expert": False,
            "tp_group": pg_collection.tp,
        }
        self.linear_v = submodules.linear_v(
            config.hidden_size,
            config.num_query_groups * config.kv_channels,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="v",
            **shared_options,
        )
        self.linear_proj = submodules.linear_proj(
            config.num_attention_heads * config.kv_channels,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="proj",
            **shared_options,
        )

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Mix the values of the tokens by this layer's scores, and project them.

        Args:
            hidden_states: `[seq(/tp), batch, hidden]`.
            attention_mask: `[batch, 1, seq, seq]` bool, True where a position must not see another,
                the future included; None: causal.

        Returns:
            The output `[seq(/tp), batch, hidden]`, and its bias, which is None.

        Raises:
            MethodError: the input is longer than the score matrices.
        """
        value, _ = self.linear_v(hidden_states)
        value = value.unflatten(-1, (-1, self.hidden_size_per_attention_head))
        return self.linear_proj(self.core_attention(value, attention_mask))


class SynthesizerCoreAttention(MegatronModule):
    """Mixture of values by probabilities that belong to the heads, with this rank's score matrices.

    The matrices are parameters if trainable, else buffers that are not saved.

    Args:
        layer: number of the layer, from 0.
        trainable: the matrices are parameters.
        tp_group: the tensor-parallel ranks, each with the matrices of its heads.

    Attributes:
        scores: `[heads * T, T]`; None where scores are factorized.
        query_factor: A, `[heads * T, k]`; None where scores are whole.
        key_factor: B, `[heads * T, k]`; None where scores are whole.
    """

    scores: torch.Tensor | None
    query_factor: torch.Tensor | None
    key_factor: torch.Tensor | None

    def __init__(
        self,
        config: TransformerConfig,
        layer: int,
        recipe: ScoreRecipe,
        trainable: bool,
        tp_group: dist.ProcessGroup,
    ) -> None:
        super().__init__(config=config)
        self.layer = layer
        self.recipe = recipe
        self.trainable = trainable
        self.heads = heads_of_rank(recipe.num_attention_heads, tp_group.rank(), tp_group.size())
        self.dropout = config.attention_dropout
        for name in ("scores", "query_factor", "key_factor"):
            if name not in recipe.matrices:
                self.register_buffer(name, None)
                continue
            values = self.regenerate(name).to(torch.cuda.current_device())
            if trainable:
                self.register_parameter(name, torch.nn.Parameter(values))
            else:
                self.register_buffer(name, values, persistent=False)

    def regenerate(self, name: str) -> torch.Tensor:
        """Draw the initial values of this rank's rows of a matrix.

        Args:
            name: key of the matrix in `recipe.matrices`.

        Returns:
            `[heads * T, columns]`, on the CPU in the compute dtype.
        """
        length = self.recipe.sequence_length
        rows = range(self.heads.start * length, self.heads.stop * length)
        values = normal_rows(
            self.recipe.seed,
            f"layer.{self.layer}.attention.{name}",
            rows=rows,
            columns=self.recipe.matrices[name],
            std=self.recipe.std,
        )
        return values.to(self.config.params_dtype)

    def frozen_shards(self) -> Iterator[tuple[str, tuple[int, ...], torch.Tensor]]:
        """Yield this rank's frozen scores; nothing if they train.

        Yields:
            (matrix, global head numbers, rows `[heads * T, columns]`).
        """
        if not self.trainable:
            for name in self.recipe.matrices:
                yield name, tuple(self.heads), getattr(self, name)

    def frozen_tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the score matrices in memory that do not learn."""
        return tuple(matrix for _, _, matrix in self.frozen_shards())

    def trained_shards(self) -> Iterator[tuple[str, tuple[int, ...], torch.Tensor]]:
        """Yield nothing: a synthesizer has no rows of queries and keys."""
        yield from ()

    def kept_tensors(self) -> dict[str, torch.Tensor]:
        """Return nothing: score matrices are frozen from the start or never."""
        return {}

    def logits(self, length: int) -> torch.Tensor:
        """Return S of this rank's heads for the first `length` positions.

        Args:
            length: positions of the input.

        Returns:
            `[heads, length, length]`, in fp32 or wider.

        Raises:
            MethodError: `length` is greater than that of the score matrices.
        """
        if length > self.recipe.sequence_length:
            raise MethodError(
                f"an input of {length} positions is longer than the {self.recipe.sequence_length} "
                "that the learned score matrices have rows for; shorten it, or train with that "
                "data.sequence_length"
            )
        if self.scores is not None:
            return self._by_head(self.scores)[:, :length, :length]
        query, key = (
            self._by_head(factor)[:, :length] for factor in (self.query_factor, self.key_factor)
        )
        return query @ key.transpose(1, 2)

    def _by_head(self, rows: torch.Tensor | None) -> torch.Tensor:
        assert rows is not None
        # In half precision the products and the softmax of scores would be too coarse.
        wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
        return wide.unflatten(0, (len(self.heads), self.recipe.sequence_length))

    def probabilities(
        self, length: int, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return attention probabilities; rows sum to 1 over visible positions.

        Args:
            length: positions of the input.
            attention_mask: `[batch, 1, length, length]` bool, True where a position must not see
                another, the future included; None: causal.

        Returns:
            `[heads, length, length]`, or with a mask `[batch, heads, length, length]`, in the type
            of `logits`.
        """
        logits = self.logits(length)
        if attention_mask is None:
            attention_mask = torch.ones(
                length, length, dtype=torch.bool, device=logits.device
            ).triu(1)
        return logits.masked_fill(attention_mask, -math.inf).softmax(dim=-1)

    def forward(self, value: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """Mix this rank's values by its heads' attention probabilities.

        Args:
            value: `[seq, batch, groups, head_dim]`.
            attention_mask: `[batch, 1, seq, seq]` bool, True where a position must not see another,
                the future included; None: causal.

        Returns:
            `[seq, batch, heads * head_dim]`.
        """
        length, batch, groups, head_dim = value.shape
        probabilities = self.probabilities(length, attention_mask).to(value.dtype)
        if self.training and self.dropout > 0.0:
            probabilities = self._drop(probabilities, batch)
        # Heads of group 0, of group 1, ..., each group's stacked: one product per group, nothing
        # repeated.
        probabilities = probabilities.unflatten(-3, (groups, -1)).flatten(-3, -2)
        # The same probabilities for all samples: one product per group covers the whole batch.
        if probabilities.dim() == 3:
            mixed = probabilities @ value.permute(2, 0, 1, 3).flatten(2)
            mixed = mixed.view((groups, -1, length, batch, head_dim)).permute((2, 3, 0, 1, 4))
        else:
            mixed = probabilities @ value.permute(1, 2, 0, 3)
            mixed = mixed.view((batch, groups, -1, length, head_dim)).permute((3, 0, 1, 2, 4))
        return mixed.flatten(2)

    def _drop(self, probabilities: torch.Tensor, batch: int) -> torch.Tensor:
        """Drop probabilities, independently for every sample: `[batch, heads, seq, seq]`."""
        with own_stream(self.config):
            return torch.nn.functional.dropout(
                probabilities.expand(batch, *probabilities.shape[-3:]), self.dropout
            )
