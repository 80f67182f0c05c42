"""Muon for the matrices of the layers, AdamW for everything else, as one optimizer.

Momentum is elementwise and lives where DeepSpeed keeps the weights; only the Newton-Schulz
iterations need whole matrices, see `ownership`. DeepSpeed's own Muon is not used.

Version-sensitive: ZeRO stage 1 of DeepSpeed 0.19 calls `step` once for each parameter group, with
`param_groups` narrowed to it, in the same order on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from inspect import unwrap
from itertools import chain
from math import sqrt
from typing import Any, cast

import torch

from megatron_patches.recipe.optimizers import ADAMW, Muon, muon
from megatron_patches.recipe.parts import Tensor
from pretrain.checkpoint.slices import slices_of_rank
from pretrain.config.optimizer import OptimizerSection
from pretrain.optimizer.optimizers import FusedAdamW
from pretrain.optimizer.orthogonalise import cpu_multiplies_bf16
from pretrain.optimizer.ownership import (
    Exchange,
    Holding,
    Matrix,
    check_groups,
    matrices_of,
    pieces_of,
)
from pretrain.ranks.groups import ParallelContext, gathered

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class MuonWithAdamW(FusedAdamW):
    """Muon in the parameter groups with its rule, AdamW in the others.

    Args:
        groups: Parameter groups from `parameter_groups`, each of one rule.
        settings: Settings of both rules; the loop sets the rates before every step.
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
        """Create the state of a tensor as its first update would, unless the state exists."""
        if not self._by_muon(tensor):
            super().begin(tensor)
        elif not self.state[tensor]:
            self.state[tensor]["momentum"] = torch.zeros_like(tensor)

    def _by_muon(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is in one of Muon's groups."""
        parameters = chain.from_iterable(group["params"] for group in self._muon_groups)
        return any(tensor is parameter for parameter in parameters)

    @property
    def _muon_groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups with Muon's rule."""
        return [group for group in self.param_groups if group["rule"] == self.rule.name]

    def prepare(
        self,
        engine: Any,
        inventory: Iterable[Tensor],
        context: ParallelContext,
        replicated: bool,
    ) -> dict[str, list[str]]:
        """Decide which rank orthogonalises which matrix (collective); call before the first step.

        Args:
            engine: The deepspeed.DeepSpeedEngine of this optimizer.
            inventory: The tensors of the whole model.
            replicated: Whether data-parallel ranks hold the same values.

        Returns:
            {name of a rule: the parameters in its groups, over all ranks}.

        Raises:
            MethodError: on every rank: Muon would not reach every matrix of the layers, or
                parameter groups differ between ranks.
        """
        slices = slices_of_rank(engine)
        tensors = [tensor for tensor in inventory if self.rule.takes(tensor)]
        self._matrices, _ = matrices_of(tensors, context.tensor_parallel_size)
        groups = self._muon_groups
        pieces = [pieces_of(slices, tensors, group["params"], context) for group in groups]
        holdings = [Holding(context.data_parallel_rank, of_group) for of_group in pieces]
        held = gathered(holdings)
        check_groups(held, self._matrices)
        factors = [self._factor(matrix) for matrix in self._matrices]
        for number, group in enumerate(groups):
            every = [holdings[number] for holdings in held]
            self._exchanges[id(group)] = Exchange(
                self._matrices, every, context.rank, replicated=replicated, factors=factors
            )

        ours: dict[str, set[str]] = {self.rule.name: set(), ADAMW.name: set()}
        for part in slices:
            ours[self.rule.name if self._by_muon(part.flat) else ADAMW.name].add(part.name)
        ranks = gathered(ours)
        return {rule: sorted(set().union(*(rank[rule] for rank in ranks))) for rule in ours}

    def report(self) -> dict[str, Any] | None:
        """Return a report of the last update on the first call, then None (collective).

        Returns:
            Numbers of orthogonalised matrices, in total and by rank; iterations; for each parameter
            the Frobenius norm of its update at a learning rate of 1, without weight decay.
        """
        if self._norms is None:
            return None
        squares: dict[str, float] = {}
        for number, norms in self._norms.items():
            for chunk, chunk_norms in zip(self._exchanges[number].chunks, norms, strict=True):
                for matrix, norm in zip(chunk.numbers, chunk_norms.tolist(), strict=True):
                    name = self._matrices[matrix].tensor
                    square = (norm * self._factor(self._matrices[matrix])) ** 2
                    squares[name] = squares.get(name, 0.0) + square
        self._norms = None
        owned = sum(exchange.owned for exchange in self._exchanges.values())
        ranks = gathered((owned, squares))
        names = sorted({name for _, rank_squares in ranks for name in rank_squares})
        return {
            "matrices": sum(count for count, _ in ranks),
            "matrices_by_rank": [count for count, _ in ranks],
            "newton_schulz_steps": self._settings.newton_schulz_steps,
            "update_norm": {
                name: sqrt(sum(rank_squares.get(name, 0.0) for _, rank_squares in ranks))
                for name in names
            },
        }

    def _factor(self, matrix: Matrix) -> float:
        """Return the factor of a matrix's update, by its shape."""
        rows, columns = matrix.stack.rows, matrix.stack.columns
        if self._settings.update_scale == "spectral":
            return sqrt(max(1, rows / columns))  # Jordan 2024
        # Moonlight (arXiv:2502.16982): the update's RMS is then about that of AdamW.
        return 0.2 * sqrt(max(rows, columns))

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the parameters of all groups (collective)."""
        groups = self.param_groups
        # torch's AdamW updates every group that it sees, so Muon's are hidden from it.
        self.param_groups = [group for group in groups if group["rule"] != self.rule.name]
        if self.param_groups:
            unwrap(torch.optim.AdamW.step)(self, closure)
        self.param_groups = groups
        for group in self._muon_groups:
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
        """Move the momentum; return the matrix to orthogonalise, in the gradient's memory."""
        self.begin(weight)
        momentum = self.state[weight]["momentum"]
        decay = self._settings.momentum
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
        if self.grad_scale is not None:
            gradient.div_(self.grad_scale)
        if allowed is not None:  # a refused update leaves the momentum as it is
            torch.where(allowed, gradient, momentum, out=gradient)
        momentum.lerp_(gradient, 1 - decay)
        return (
            gradient.lerp_(momentum, decay) if self._settings.nesterov else gradient.copy_(momentum)
        )

    def _dtype(self, device: torch.device) -> torch.dtype:
        """Return the type of the Newton-Schulz iterations."""
        automatic = "bf16" if device.type != "cpu" or cpu_multiplies_bf16() else "fp32"
        chosen = self._settings.newton_schulz_dtype
        return DTYPES[automatic if chosen == "auto" else chosen]
