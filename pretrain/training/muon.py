"""Muon for the matrices of the layers, AdamW for everything else, as one optimizer.

Momentum is elementwise and lies where DeepSpeed has the weights; only the Newton-Schulz iterations
need whole matrices, see `ownership`. What DeepSpeed has under the name of Muon is not used.

Version-sensitive: ZeRO stage 1 of DeepSpeed 0.19 calls `step` once for each parameter group, with
`param_groups` narrowed to it, in the same order on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from inspect import unwrap
from math import sqrt
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from megatron_patches.recipe.optimizers import ADAMW, Muon, muon
from megatron_patches.recipe.parts import Tensor
from pretrain.checkpoint.slices import slices_of_rank
from pretrain.config.optimizer import OptimizerSection
from pretrain.ranks.groups import ParallelContext
from pretrain.training.optimizers import FusedAdamW
from pretrain.training.ownership import (
    Exchange,
    Holding,
    Matrix,
    check_groups,
    matrices_of,
    pieces_of,
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

T = TypeVar("T")


class MuonWithAdamW(FusedAdamW):
    """Muon in the groups whose rule says so, AdamW in the others.

    Args:
        groups: as `parameter_groups` returns them, each of one rule.
        settings: of both rules; the loop sets the rates before every step.
    """

    rule = muon(1)

    def __init__(self, groups: list[dict[str, Any]], settings: OptimizerSection) -> None:
        super().__init__(groups, settings)
        self._settings = cast(Muon, settings.of_kind)
        self._matrices: list[Matrix] = []
        self._exchanges: dict[int, Exchange] = {}
        self._norms: dict[int, list[torch.Tensor]] | None = {}  # of the last update, until reported

    def states_of(self, tensor: torch.Tensor) -> tuple[str, ...]:
        """Return the names of a tensor's states, each of the tensor's shape."""
        return self.rule.states if self._by_muon(tensor) else ADAMW.states

    def begin(self, tensor: torch.Tensor) -> None:
        """Create the state of a tensor as its first update would; nothing if the state is there."""
        if not self._by_muon(tensor):
            super().begin(tensor)
        elif not self.state[tensor]:
            self.state[tensor]["momentum"] = torch.zeros_like(tensor)

    def _by_muon(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is in one of Muon's groups."""
        return any(
            tensor is one
            for group in self.param_groups
            if group["rule"] == self.rule.name
            for one in group["params"]
        )

    def prepare(
        self,
        engine: Any,
        inventory: Iterable[Tensor],
        context: ParallelContext,
        replicated: bool,
    ) -> dict[str, list[str]]:
        """Find out which rank orthogonalises what (collective); before the first step.

        Args:
            engine: the deepspeed.DeepSpeedEngine of this optimizer.
            inventory: the tensors of the whole model.
            context: this rank's place in the layout.
            replicated: data-parallel ranks hold the same.

        Returns:
            {name of a rule: the parameters in its groups, over all ranks}.

        Raises:
            MethodError: on every rank: Muon would not reach every matrix of the layers, or
                parameter groups differ between ranks.
        """
        own = slices_of_rank(engine)
        tensors = [tensor for tensor in inventory if self.rule.takes(tensor)]
        self._matrices, _ = matrices_of(tensors, context.tensor_parallel_size)
        groups = [group for group in self.param_groups if group["rule"] == self.rule.name]
        holdings = [
            Holding(context.data_parallel_rank, pieces_of(own, tensors, group["params"], context))
            for group in groups
        ]
        held = _of_all_ranks(holdings)
        check_groups(held, self._matrices)
        factors = [self._factor(matrix) for matrix in self._matrices]
        for number, group in enumerate(groups):
            every = [one[number] for one in held]
            self._exchanges[id(group)] = Exchange(
                self._matrices, every, context.rank, replicated=replicated, factors=factors
            )

        ours: dict[str, set[str]] = {self.rule.name: set(), ADAMW.name: set()}
        for each in own:
            ours[self.rule.name if self._by_muon(each.flat) else ADAMW.name].add(each.name)
        ranks = _of_all_ranks(ours)
        return {rule: sorted(set().union(*(rank[rule] for rank in ranks))) for rule in ours}

    def report(self) -> dict[str, Any] | None:
        """Return what the last update did, the first time that it is asked for (collective).

        Returns:
            Matrices that were orthogonalised, in all and by each rank; iterations and type; for
            each parameter the Frobenius norm of its update at a learning rate of 1, without weight
            decay. None from the second time on.
        """
        if self._norms is None:
            return None
        squares: dict[str, float] = {}
        for number, norms in self._norms.items():
            for chunk, own in zip(self._exchanges[number].chunks, norms, strict=True):
                for matrix, norm in zip(chunk.numbers, own.tolist(), strict=True):
                    name = self._matrices[matrix].tensor
                    square = (norm * self._factor(self._matrices[matrix])) ** 2
                    squares[name] = squares.get(name, 0.0) + square
        self._norms = None
        owned = sum(exchange.owned for exchange in self._exchanges.values())
        ranks = _of_all_ranks((owned, squares))
        names = sorted({name for _, own in ranks for name in own})
        return {
            "matrices": sum(count for count, _ in ranks),
            "matrices_by_rank": [count for count, _ in ranks],
            "newton_schulz_steps": self._settings.newton_schulz_steps,
            "update_norm": {
                name: sqrt(sum(own.get(name, 0.0) for _, own in ranks)) for name in names
            },
        }

    def _factor(self, matrix: Matrix) -> float:
        """Return the factor of a matrix's update."""
        rows, columns = matrix.stack.rows, matrix.stack.columns
        if self._settings.update_scale == "spectral":
            return sqrt(max(1, rows / columns))
        return 0.2 * sqrt(max(rows, columns))

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update what has a gradient (collective)."""
        groups = self.param_groups
        self.param_groups = [group for group in groups if group["rule"] != self.rule.name]
        if self.param_groups:
            unwrap(torch.optim.AdamW.step)(self, closure)
        self.param_groups = groups
        for group in groups:
            if group["rule"] == self.rule.name:
                self._update(group)

    def _update(self, group: dict[str, Any]) -> None:
        """Update one of Muon's groups; gradients are overwritten."""
        allowed = None if self.found_inf is None else self.found_inf == 0
        directions = [self._direction(weight, allowed).view(-1) for weight in group["params"]]
        exchange = self._exchanges[id(group)]
        norms = exchange.orthogonalise(
            directions, self._settings.newton_schulz_steps, self._dtype(directions[0].device)
        )
        if self._norms is not None:
            self._norms[id(group)] = norms
        rate: float | torch.Tensor = group["lr"]
        if allowed is not None:
            rate = allowed * torch.tensor(group["lr"], dtype=torch.float64)
        for weight, direction in zip(group["params"], directions, strict=True):
            weight.mul_(1 - rate * group["weight_decay"])
            weight.sub_(direction.view_as(weight).mul_(rate))

    def _direction(self, weight: torch.Tensor, allowed: torch.Tensor | None) -> torch.Tensor:
        """Return what is to be orthogonalised, in place of the gradient, and move the momentum."""
        self.begin(weight)
        momentum = self.state[weight]["momentum"]
        decay = self._settings.momentum
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
        if self.grad_scale is not None:
            gradient.div_(self.grad_scale)
        if allowed is not None:  # the momentum moves towards itself where nothing may move
            torch.where(allowed, gradient, momentum, out=gradient)
        momentum.lerp_(gradient, 1 - decay)
        return (
            gradient.lerp_(momentum, decay) if self._settings.nesterov else gradient.copy_(momentum)
        )

    def _dtype(self, device: torch.device) -> torch.dtype:
        """Return the type of the Newton-Schulz iterations."""
        automatic = "fp32" if device.type == "cpu" else "bf16"
        chosen = self._settings.newton_schulz_dtype
        return DTYPES[automatic if chosen == "auto" else chosen]


def _of_all_ranks(own: T) -> list[T]:
    """Return what each rank has (collective)."""
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    return ranks
