"""Rank functions of test_synthesizer.py.

One Synthesizer layer in float64 beside plain autograd, dropout and initial values.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch.utils.flop_counter import FlopCounterMode

from megatron_patches.bank.shards import digest
from megatron_patches.engine.freeze import frozen_layers
from megatron_patches.recipe.counting import executed_flops_per_token
from megatron_patches.recipe.parts import ModelShape
from megatron_patches.recipe.variants import policy_for
from pretrain.model.build import token_losses
from pretrain.ranks.groups import ParallelContext, set_seeds
from tests.distributed.one_layer import BATCH, full_weights, run_layer, worst_difference
from tests.distributed.synthesizer_reference import LENGTH, SEED, rank_of, reference
from tests.distributed.workers.runs import of_all_ranks, parallel
from tests.megatron_patches.models import HEAD_DIM, HEADS, HIDDEN, VOCAB, build


def synthesizer(
    context: ParallelContext, variant: str, groups: int = HEADS, **settings: Any
) -> GPTModel:
    """A one-layer model in float64, initialised by the product."""
    axes = {"dtype": torch.float64, **settings}
    if variant != "vanilla":
        axes["synthesizer_rank"] = rank_of(variant)
    return build(
        variant,
        groups,
        layers=1,
        length=LENGTH,
        seed=SEED,
        tensor_parallel_size=context.world_size,
        **axes,
    )


def everything(payload: dict[str, Any]) -> dict[str, Any]:
    """{"cases": [...], "weights": {variant: {name: SHA-256}}, "dropout": {...}, ...}."""
    with parallel() as context:
        answer = {
            "cases": [_case(context, **case) for case in payload["cases"]],
            "weights": {
                "vanilla": _weights(context, "vanilla"),
                **{
                    f"{variant} trainable={trainable}": _weights(
                        context, variant, trainable=trainable
                    )
                    for variant in payload["variants"]
                    for trainable in (True, False)
                },
            },
            "dropout": {
                f"sequence_parallel={parallel}": _dropout(context, parallel)
                for parallel in ((False, True) if context.world_size > 1 else (False,))
            },
            "flops": {
                f"{variant} trainable={trainable}": _flops(context, variant, trainable)
                for variant in payload["variants"]
                for trainable in (True, False)
                if context.world_size == 1
            },
        }
    return answer


def _case(
    context: ParallelContext,
    variant: str,
    groups: int,
    length: int,
    masked: bool,
    trainable: bool,
) -> dict[str, Any]:
    sequence_parallel = context.world_size > 1
    model = synthesizer(
        context, variant, groups, trainable=trainable, sequence_parallel=sequence_parallel
    )
    attention = model.decoder.layers[0].self_attention
    mask = _documents(length) if masked else None
    layer = run_layer(model, context, length, sequence_parallel=sequence_parallel, mask=mask)
    expected = reference(layer.full, layer.full_grad, variant, groups=groups, mask=mask)
    core = attention.core_attention
    errors = layer.errors(expected)
    value_grad = attention.linear_v.weight.grad
    errors["value"] = worst_difference(value_grad, _own(expected["value"], context))
    if trainable:
        for name in core.recipe.matrices:
            gradient = getattr(core, name).grad
            errors[name] = worst_difference(gradient, _own(expected[name].flatten(0, 1), context))
    return {
        "errors": errors,
        **layer.report,
        "logit_sd": float(core.logits(LENGTH).std()),
    }


def _weights(context: ParallelContext, variant: str, **axes: bool) -> dict[str, str]:
    """{weight: SHA-256 of the full float32 weight}, frozen score matrices by head."""
    model = synthesizer(context, variant, dtype=torch.float32, **axes)
    digests = {name: digest(weight) for name, weight in full_weights(model, context, HEADS)}
    rank_digests = {}
    for _, layer in frozen_layers(model):
        for name, heads, rows in layer.frozen_shards():
            for head, values in zip(heads, rows.split(len(rows) // len(heads)), strict=True):
                rank_digests[f"frozen {name} head={head}"] = digest(values)
    for shard in of_all_ranks(rank_digests):
        digests |= shard
    return digests


def _dropout(context: ParallelContext, sequence_parallel: bool) -> dict[str, Any]:
    """Mixed values of ones: 1 without dropout.

    Here each sample and head loses its own probabilities.
    """
    model = synthesizer(
        context, "synthesizer_random", sequence_parallel=sequence_parallel, dropout=0.5
    )
    core = model.decoder.layers[0].self_attention.core_attention
    value = torch.ones(LENGTH, BATCH, HEADS // context.world_size, HEAD_DIM, dtype=torch.float64)
    # Each token's value is 1 at a place of its own: where the output is 0, a key was dropped.
    places = torch.eye(LENGTH, HEAD_DIM, dtype=torch.float64)[:, None, None].expand_as(value)

    def run(step: int, value: torch.Tensor = value) -> torch.Tensor:
        set_seeds(SEED, step, 0, context.tensor_parallel_rank)
        if not sequence_parallel:
            return core(value, None)
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        with get_cuda_rng_tracker().fork():  # as TransformerBlock does
            return core(value, None)

    with torch.no_grad():
        first = run(1)
        again = run(1)
        next_step = run(2)
        marks = run(1, places)
        core.eval()
        kept_all = run(1)
    ranks = [torch.empty_like(first) for _ in range(context.world_size)]
    dist.all_gather(ranks, first)
    masks = [torch.empty_like(marks) for _ in range(context.world_size)]
    dist.all_gather(masks, marks)
    heads = (torch.cat(masks, dim=-1).unflatten(-1, (HEADS, HEAD_DIM)) != 0).unbind(2)
    return {
        "repeats": torch.equal(first, again),
        "changes_with_the_step": not torch.equal(first, next_step),
        "differs_between_samples": not torch.equal(first[:, 0], first[:, 1]),
        "differs_between_heads": all(not torch.equal(a, b) for a, b in combinations(heads, 2)),
        "mean": float(torch.stack(ranks).mean()),
        "evaluation": float((kept_all - 1).abs().max()),
    }


def _flops(context: ParallelContext, variant: str, trainable: bool) -> dict[str, float]:
    """FLOPs of forward and backward by torch's count, and by the formula for the full matrix."""
    with FlopCounterMode(display=False) as counter:
        token_losses(
            synthesizer(context, variant, 2, trainable=trainable), _tokens()
        ).mean().backward()
    shape = ModelShape(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=2,
        head_dim=HEAD_DIM,
        ffn_hidden_size=4 * HIDDEN,
        vocab_size=VOCAB,
        sequence_length=LENGTH,
        learned_positions=True,
        tied_embeddings=True,
    )
    policy = policy_for(variant, {"trainable": trainable, "synthesizer_rank": rank_of(variant)})
    per_token = executed_flops_per_token(shape, policy, causal_share=1.0)
    return {"torch": counter.get_total_flops(), "formula": BATCH * LENGTH * per_token}


def _tokens() -> torch.Tensor:
    """`[batch, length + 1]`, the same on every machine."""
    stream = np.random.Generator(np.random.Philox(3))
    return torch.from_numpy(stream.integers(VOCAB, size=(BATCH, LENGTH + 1)))


def _documents(length: int) -> torch.Tensor:
    """`[batch, 1, length, length]`, True where hidden.

    Sample b has documents of b + 2 positions.
    """
    index = torch.arange(length)
    masks = []
    for sample in range(BATCH):
        document = index // (sample + 2)
        masks.append((document[:, None] != document[None, :]) | (index[None, :] > index[:, None]))
    return torch.stack(masks).unsqueeze(1)


def _own(full: torch.Tensor, context: ParallelContext) -> torch.Tensor:
    return full.chunk(context.world_size)[context.rank]
