"""The bound on attention scores in a run: what it is, and how an update is held within it.

What `megatron_patches.recipe.score_bound` says of numbers, for the weights of a live engine. All
of it is on the host in fp64, so that every rank and device comes to the same.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_patches.recipe.adapters import Array
from megatron_patches.recipe.score_bound import held_within, largest_bound, weights_of_layers
from pretrain.checkpoint.format import MASTER
from pretrain.checkpoint.slices import slices_of_rank
from pretrain.config.tree import Config
from pretrain.ranks.groups import ParallelContext


class ScoreBound:
    """The bound of an engine's scores, by the weights of this rank.

    Args:
        engine: a deepspeed.DeepSpeedEngine, not of ZeRO stage 3, whose ranks lack weights.
        config: of a run whose scores are bounded.
        context: this rank's place in the layout.
    """

    def __init__(self, engine: Any, config: Config, context: ParallelContext) -> None:
        self._shape, self._policy, self._context = config.shape, config.policy, context
        self._limit = config.attention.score_bound
        self._heads = config.model.num_attention_heads // context.tensor_parallel_size
        self._layers = weights_of_layers(engine.module.inventory, self._shape, self._policy)
        parameters = dict(engine.module.named_parameters())
        names = [one.name for layer in self._layers for one in layer.values()]
        self._live = {name: parameters[name] for name in names}
        sizes = [weight.numel() for weight in self._live.values()]
        self._starts = dict(zip(names, [0, *accumulate(sizes)][:-1], strict=True))
        self._elements = sum(sizes)
        self._split = engine.zero_optimization_stage() > 0
        held = slices_of_rank(engine) if self._limit is not None else []
        self._slices = [own for own in held if own.name in self._live]

    def largest(self) -> float:
        """Return the largest bound of all layers and heads (collective)."""
        own = [weight.detach().float().view(-1) for weight in self._live.values()]
        flat = torch.cat(own) if own else torch.empty(0)
        layers = self._by_layers(flat.cpu().double().numpy())
        found = largest_bound(self._shape, self._policy, layers, heads=self._heads)
        if self._context.tensor_parallel_size == 1:
            return found
        most = torch.tensor(found, dtype=torch.float64, device=self._context.device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self._context.tensor_parallel_group)
        return float(most)

    @torch.no_grad()
    def hold(self) -> None:
        """Scale down what has left attention.score_bound, if it is set (collective)."""
        if self._limit is None:
            return
        masters = torch.zeros(self._elements, device=self._context.device)
        for own in self._slices:
            self._of(own.name, masters, own.start, own.length).copy_(own.values(MASTER))
        if self._split:  # every element is in the optimizer of one rank
            dist.all_reduce(masters, group=self._context.mpu.get_data_parallel_group())
        changed: dict[str, Array] = {}
        layers = self._by_layers(masters.cpu().double().numpy())
        for declared, values in zip(self._layers, layers, strict=True):
            made = held_within(
                self._limit, self._shape, self._policy, values=values, heads=self._heads
            )
            changed |= {declared[name].name: one for name, one in made.items()}
        for name, new in changed.items():
            whole = self._of(name, masters)
            whole.copy_(torch.from_numpy(np.ascontiguousarray(new)).view(-1))
            self._live[name].copy_(whole.view_as(self._live[name]))
        for own in self._slices:
            if own.name in changed:
                own.values(MASTER).copy_(self._of(own.name, masters, own.start, own.length))

    def _of(
        self, name: str, flat: torch.Tensor, start: int = 0, length: int | None = None
    ) -> torch.Tensor:
        """Return a weight's elements, or some of them, in a tensor of all."""
        length = self._live[name].numel() if length is None else length
        return flat.narrow(0, self._starts[name] + start, length)

    def _by_layers(self, flat: Array) -> list[dict[str, Array]]:
        """Return the weights of each layer by their own names, in the shapes of the live ones."""
        return [
            {
                own: flat[self._starts[one.name] :][: self._live[one.name].numel()].reshape(
                    self._live[one.name].shape
                )
                for own, one in layer.items()
            }
            for layer in self._layers
        ]
