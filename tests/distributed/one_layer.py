"""One-layer models in sizes without coincidences.

Each matrix product can be told by its result's shape.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_patches.bank.orthonormal import BankRecipe
from megatron_patches.model.initialize import initialize_parameters
from megatron_patches.model.install import gpt_block_spec
from megatron_patches.recipe.parts import ModelShape
from megatron_patches.recipe.policy import QKPolicy
from megatron_patches.recipe.recipes import ScoreRecipe
from megatron_patches.recipe.tensors import tensors
from pretrain.ranks.groups import ParallelContext

HIDDEN, HEADS, HEAD_DIM, BATCH, VOCABULARY = 40, 4, 6, 3, 64
INIT_STD = 0.02
GEMMS = ("aten::mm", "aten::addmm", "aten::bmm")


class OperationLog(TorchDispatchMode):
    """Counts collectives (namespace c10d) and keeps the output shape of every matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: Counter[str] = Counter()
        self.gemm_shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name.startswith("c10d::"):
            self.collectives[name.removeprefix("c10d::")] += 1
        if name in GEMMS:
            self.gemm_shapes.append(tuple(result.shape))
        return result


def one_layer_model(
    context: ParallelContext,
    policy: QKPolicy,
    recipe: BankRecipe | ScoreRecipe | None,
    *,
    seed: int,
    groups: int,
    length: int,
    sequence_parallel: bool = False,
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> GPTModel:
    """A model of one layer without biases, initialised by the product."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=groups,
        kv_channels=HEAD_DIM,
        hidden_dropout=0.0,
        attention_dropout=dropout,
        add_bias_linear=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        perform_initialization=False,
        params_dtype=dtype,
        tensor_model_parallel_size=context.tensor_parallel_size,
        sequence_parallel=sequence_parallel,
    )
    shape = ModelShape(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=groups,
        head_dim=HEAD_DIM,
        ffn_hidden_size=4 * HIDDEN,
        vocab_size=VOCABULARY,
        sequence_length=length,
        learned_positions=True,
        tied_embeddings=True,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=gpt_block_spec(policy, recipe, shape),
        vocab_size=VOCABULARY,
        max_sequence_length=length,
        share_embeddings_and_output_weights=True,
    )
    rows = recipe if isinstance(recipe, BankRecipe) else None
    initialize_parameters(model, tensors(shape, policy), seed=seed, init_std=INIT_STD, recipe=rows)
    return model


def full_weights(
    model: GPTModel, context: ParallelContext, groups: int
) -> list[tuple[str, torch.Tensor]]:
    """(name, whole weight) of every parameter; Q, K and V of the fused layout apart."""
    weights = []
    for name, parameter in model.named_parameters():
        full = parameter.detach()
        if getattr(parameter, "tensor_model_parallel", False):
            parts = [torch.empty_like(full) for _ in range(context.world_size)]
            dist.all_gather(parts, full.contiguous())
            full = torch.cat(parts, dim=parameter.partition_dim)
        if name.endswith("linear_qkv.weight"):
            prefix = name.removesuffix("weight")
            per_group = full.view(groups, -1, HEAD_DIM, HIDDEN)
            weights.append((f"{prefix}value_weight", per_group[:, -1]))
            weights.append((f"{prefix}key", per_group[:, -2]))
            weights.append((f"{prefix}query", per_group[:, :-2]))
        else:
            weights.append((name, full))
    return weights


def worst_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Worst absolute difference on any rank."""
    worst = (a - b).abs().max().detach()
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.item()
