"""Blocks of logical parameters: the ranks' together are every parameter once, for every design."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from megatron_patches.recipe.parts import Tensor
from megatron_patches.recipe.tensors import tensors
from pretrain.checkpoint.blocks import Part, overlaps, parts_of_rank
from pretrain.checkpoint.format import Block
from pretrain.config.load import load_config
from tests.distributed.designs import DESIGNS, design_keys

SIZES = {"num_attention_heads": 8, "num_query_groups": 4, "hidden_size": 64, "head_dim": 8}


@pytest.mark.parametrize("design", DESIGNS)
def test_the_blocks_of_all_ranks_are_every_parameter_once(design: str) -> None:
    axes = [f"{key}={value}" for key, value in design_keys(design).items()]
    config = load_config("demo", [*(f"model.{key}={value}" for key, value in SIZES.items()), *axes])
    for phase in config.phases:
        inventory = tensors(config.shape, config.policy, phase.number)
        for size in (1, 2, 4):
            ranks = [parts_of_rank(inventory, rank, size) for rank in range(size)]
            by_name: dict[str, list[Part]] = {}
            for rank, parts in enumerate(ranks):
                for tensor in inventory:
                    start = 0
                    for part in parts.get(tensor.name, ()):
                        assert part.start == start
                        start += part.numel
                        by_name.setdefault(part.name, []).append(part)
                    assert start == (tensor.rank_elements(rank, size) if tensor.stored else 0)
            for name, held in by_name.items():
                if held[0].replicated:
                    assert len(held) == size and {part.numel for part in held} == {held[0].numel}
                    continue
                ends = [0, *(part.block.last for part in held)]
                assert [part.block.first for part in held] == ends[:-1], name
                assert ends[-1] == held[0].shape[held[0].block.dim], name


def test_trainable_heads_are_two_logical_parameters() -> None:
    config = load_config("demo", ["attention.variant=hybrid", "attention.frozen_heads={0: 0.5}"])
    names = {
        part.name.rpartition(".")[2]
        for parts in parts_of_rank(tensors(config.shape, config.policy), 0, 2).values()
        for part in parts
    }
    assert {"trained_query", "trained_key"} < names and "trained_query_key" not in names


def test_a_range_is_split_by_the_parts_that_it_meets() -> None:
    whole = Block.whole
    parts = (
        Part("a", (2, 3), whole((2, 3)), 0, replicated=True),
        Part("b", (4,), whole((4,)), 6, replicated=True),
        Part("c", (5,), Block(0, 1, 3), 10, replicated=False),
    )
    assert [part.numel for part in parts] == [6, 4, 2]
    for start in range(12):
        for length in range(13 - start):
            pieces = list(overlaps(start, length, parts))
            places = [
                (part.start + inside + n, beside + n)
                for part, inside, beside, count in pieces
                for n in range(count)
            ]
            assert places == [(start + n, n) for n in range(length)]
            assert all(inside + count <= part.numel and count for part, inside, _, count in pieces)


def test_a_fused_weight_of_two_parts_is_the_same_after_every_change_of_the_size() -> None:
    """Each rank has its share of the gate, then its share of the other part."""
    parts = (("layer.0.mlp.gate", 8), ("layer.0.mlp.up", 8))
    fused = Tensor("mlp.linear_fc1.weight", (16, 3), "ordinary", cut=0, parts=parts)
    whole = torch.arange(48).view(16, 3)

    def of_rank(rank: int, size: int) -> torch.Tensor:
        shares = [half.chunk(size)[rank] for half in whole.split(8)]
        assert [list(fused.rows(8, rank, size))] * 2 == [
            list(range(rank * 8 // size, (rank + 1) * 8 // size))
        ] * 2
        return torch.cat(shares)

    for saved_size, after in pairwise((1, 2, 4, 1)):
        stored: dict[str, torch.Tensor] = {}
        for rank in range(saved_size):
            held = of_rank(rank, saved_size).flatten()
            for part in parts_of_rank([fused], rank, saved_size)[fused.name]:
                logical = stored.setdefault(part.name, torch.full(part.shape, -1))
                values = held[part.start : part.start + part.numel]
                logical[part.block.first : part.block.last] = values.view(-1, 3)
        assert stored.keys() == {f"{fused.name}.gate", f"{fused.name}.up"}
        for rank in range(after):
            read = [
                stored[part.name][part.block.first : part.block.last]
                for part in parts_of_rank([fused], rank, after)[fused.name]
            ]
            assert torch.equal(torch.cat(read), of_rank(rank, after)), (saved_size, after)
