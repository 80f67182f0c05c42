"""Initial values of every trainable weight, the same for any tensor-parallel size and any variant.

megatron-core draws weights from a global generator in module order, so a variant with one parameter fewer
would give other initial values to all other weights. Here each *row* of each full weight matrix has a random
stream of its own, keyed by (seed, name of the weight, row): a rank draws just the rows it owns, and V of a
frozen variant equals V of vanilla.

Version-sensitive: walks megatron-core's GPTModel by the names of its modules, and knows how megatron-core
shards and interleaves their weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.attention import SelfAttention

from megatron_patches.attention.projections import FrozenQueryKeyValueLinear
from megatron_patches.attention.synthesizer import SynthesizerSelfAttention
from megatron_patches.bank.head_split import heads_of_rank
from megatron_patches.bank.initial_weights_file import GivenWeights
from megatron_patches.bank.orthonormal import BankRecipe
from megatron_patches.bank.shards import head_rows_in, layer_shard, rank_factors
from megatron_patches.engine.compat import mark_tensor_parallel
from megatron_patches.engine.random_streams import normal_rows


def initialize_parameters(
    model: GPTModel,
    seed: int,
    init_std: float,
    recipe: BankRecipe | None,
    given: GivenWeights | None = None,
) -> None:
    """Fill every parameter of `model` in place, and mark the tensor-parallel ones for DeepSpeed's norm.

    Matrices get N(0, init_std²); the two that write into the residual stream (attention output, second MLP
    layer) get init_std/√(2·num_layers) as in GPT-2; LayerNorm keeps weight 1, bias 0. `recipe`: recipe of the
    bank from which Q and K of wholly trainable layers start; None: they start like every other matrix.
    `given`: file of weights, each of which takes the place of the drawn one; MethodError if damaged.
    """
    init = _Initializer(model, seed, init_std, recipe, given)
    init.column_parallel("embedding.word", model.embedding.word_embeddings.weight)
    if model.position_embedding_type == "learned_absolute":
        init.replicated("embedding.position", model.embedding.position_embeddings.weight)
    for layer in model.decoder.layers:
        name = f"layer.{layer.layer_number - 1}"
        init.attention(name, layer.self_attention)
        init.column_parallel(f"{name}.mlp.fc1", layer.mlp.linear_fc1.weight)
        init.row_parallel(f"{name}.mlp.fc2", layer.mlp.linear_fc2.weight)
        init.norm(f"{name}.norm1", layer.input_layernorm)
        init.norm(f"{name}.norm2", layer.pre_mlp_layernorm)
    init.norm("norm", model.decoder.final_layernorm)
    if not model.share_embeddings_and_output_weights:
        init.column_parallel("output", model.output_layer.weight)


class _Initializer:
    """Initial values of this rank's part of each weight; one method per way of sharding."""

    def __init__(
        self,
        model: GPTModel,
        seed: int,
        init_std: float,
        recipe: BankRecipe | None,
        given: GivenWeights | None,
    ) -> None:
        self.seed = seed
        self.given = given
        self.std = init_std
        self.residual_std = init_std / math.sqrt(2 * model.config.num_layers)
        self.recipe = recipe
        tp_group = model.pg_collection.tp
        self.rank, self.size = tp_group.rank(), tp_group.size()

    def replicated(self, name: str, weight: torch.nn.Parameter) -> None:
        rows, columns = weight.shape
        self._fill(weight, self._rows(name, range(rows), columns, self.std))

    def column_parallel(self, name: str, weight: torch.nn.Parameter) -> None:
        """Fill a weight whose output rows are sharded: this rank owns a contiguous range of rows."""
        rows, columns = weight.shape
        mine = range(self.rank * rows, (self.rank + 1) * rows)
        self._fill(weight, self._rows(name, mine, columns, self.std))
        mark_tensor_parallel(weight, dim=0)

    def row_parallel(self, name: str, weight: torch.nn.Parameter) -> None:
        """Fill a weight whose input columns are sharded: draw whole rows, keep this rank's columns."""
        rows, columns = weight.shape
        full = self._rows(name, range(rows), columns * self.size, self.residual_std)
        self._fill(weight, full[:, self.rank * columns : (self.rank + 1) * columns])
        mark_tensor_parallel(weight, dim=1)

    def attention(self, name: str, attention: SelfAttention | SynthesizerSelfAttention) -> None:
        self.row_parallel(f"{name}.attention.proj", attention.linear_proj.weight)
        head_dim = attention.hidden_size_per_attention_head
        num_groups = attention.config.num_query_groups
        groups = heads_of_rank(num_groups, self.rank, self.size)
        columns = attention.config.hidden_size
        value = self._head_rows(f"{name}.attention.value", groups, head_dim, columns)
        if isinstance(
            attention, SynthesizerSelfAttention
        ):  # its scores have been filled by their recipe
            self._fill(attention.linear_v.weight, value)
            mark_tensor_parallel(attention.linear_v.weight, dim=0)
            return
        if isinstance(attention.linear_qkv, FrozenQueryKeyValueLinear):
            self._fill(attention.linear_qkv.value_weight, value)
            self._beside_the_bank(name, attention.linear_qkv)
            return
        heads = heads_of_rank(attention.config.num_attention_heads, self.rank, self.size)
        if self.recipe is None:
            query = self._head_rows(f"{name}.attention.query", heads, head_dim, columns)
            key = self._head_rows(f"{name}.attention.key", groups, head_dim, columns)
        else:
            layer = attention.layer_number - 1
            query, key = (
                layer_shard(self.recipe, layer, role, self.rank, self.size, torch.float32)
                for role in ("query", "key")
            )
        # megatron-core interleaves its fused weight by group: [q … q k v] of group 0, then of group 1 ...
        parts = [rows.view(len(groups), -1, columns) for rows in (query, key, value)]
        self._fill(attention.linear_qkv.weight, torch.cat(parts, dim=1).flatten(0, 1))
        mark_tensor_parallel(attention.linear_qkv.weight, dim=0)

    def _beside_the_bank(self, name: str, linear: FrozenQueryKeyValueLinear) -> None:
        """Fill the trainable parts of a layer with frozen heads: its other heads, and adapters."""
        columns = linear.value_weight.size(1)
        trainable, factors = linear.heads.trainable, linear.trained_factors()
        if factors is not None:
            assert self.recipe is not None
            for live, made in zip(
                factors,
                rank_factors(self.recipe, linear.layer, trainable, torch.float32),
                strict=True,
            ):
                self._fill(live, made)
        if linear.trained_query_key is not None:
            bank = linear.recipe if linear.trains_from_bank else self.recipe
            rows = [
                head_rows_in(bank, linear.layer, role, heads, linear.dtype)
                if bank is not None
                else self._head_rows(f"{name}.attention.{role}", heads, linear.head_dim, columns)
                for role, heads in trainable.items()
            ]
            self._fill(linear.trained_query_key, torch.cat(rows))
        for shared, adapter in linear.shared_adapters.items():
            weight = getattr(linear, shared)
            self._normal(weight, f"{name}.attention.{adapter}", range(weight.size(0)))
        if linear.adapters is not None:
            linear.adapters.fill()
            for own, declared in linear.adapters.declared.items():
                if declared.start == "normal":
                    weight = getattr(linear.adapters, own)
                    first = self.rank * weight.size(0)
                    self._normal(
                        weight, f"{name}.attention.{own}", range(first, first + weight.size(0))
                    )

    def _normal(self, weight: torch.nn.Parameter, name: str, rows: range) -> None:
        """Fill a factor so that it keeps the variance of what it multiplies: N(0, 1/columns)."""
        columns = weight.size(1)
        self._fill(weight, normal_rows(self.seed, name, rows, columns, 1 / math.sqrt(columns)))

    def _head_rows(
        self, name: str, heads: Sequence[int], head_dim: int, columns: int
    ) -> torch.Tensor:
        rows = [head * head_dim + row for head in heads for row in range(head_dim)]
        return self._rows(name, rows, columns, self.std)

    def norm(self, name: str, norm: torch.nn.LayerNorm) -> None:
        """Fill a norm from the file; without one it keeps weight 1 and bias 0."""
        if self.given is not None:
            for part in ("weight", "bias"):
                parameter = getattr(norm, part)
                rows = self.given.rows(f"{name}.{part}", range(len(parameter)))
                self._fill(parameter, rows)

    def _rows(self, name: str, rows: Sequence[int], columns: int, std: float) -> torch.Tensor:
        """Return rows of the full matrix called `name`, from the file or drawn: `[len(rows), columns]`."""
        if self.given is not None and self.given.has(name):
            return self.given.rows(name, rows)
        return normal_rows(self.seed, name, rows, columns, std)

    @staticmethod
    def _fill(weight: torch.Tensor, values: torch.Tensor) -> None:
        with torch.no_grad():
            weight.copy_(values)
