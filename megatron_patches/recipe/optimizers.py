"""Rules by which an optimizer updates tensors: what a rule keeps, moves and computes. No torch.

This is the only place that states what an optimizer keeps of a parameter. Checkpoints, the audit,
`plan`, the choice of the ZeRO stage and the formulas of `compare` are sums over the tensors of the
inventory, each by its rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, partial

from megatron_patches.recipe.matrices import has_matrices, stacks
from megatron_patches.recipe.parts import FP32, Tensor


def every(tensor: Tensor) -> bool:
    """Return True: the rule takes every tensor that no rule before it has taken."""
    return True


def no_products(tensor: Tensor) -> int:
    """Return 0: the update is elementwise, and its arithmetic hides behind its memory traffic."""
    return 0


@dataclass(frozen=True)
class Rule:
    """The update of some of a model's tensors.

    Attributes:
        name: of the rule, under which `pretrain.training.optimizers` has the class that applies it.
        states: names of the numbers that the optimizer keeps of each element beside the master
            weight, as in the optimizer's state and in checkpoints; in fp32 at any precision, as
            weights are updated.
        takes: whether the rule updates a tensor.
        products: FLOPs of the matrix products in one update of a whole tensor.
        whole_matrices: an update needs the whole tensor, so that ZeRO cannot cut it anywhere.
        takes_adamw_rates: its learning rates are on AdamW's scale, as published laws have them.
    """

    name: str
    states: tuple[str, ...]
    takes: Callable[[Tensor], bool] = every
    products: Callable[[Tensor], int] = no_products
    whole_matrices: bool = False
    takes_adamw_rates: bool = False

    @property
    def state_bytes(self) -> int:
        """Return the bytes of an element's states, without its master weight."""
        return FP32 * len(self.states)

    @property
    def checkpoint_bytes(self) -> int:
        """Return the bytes of an element in a checkpoint: its fp32 master weight and its states."""
        return FP32 + self.state_bytes

    @property
    def traffic(self) -> int:
        """Return the bytes of an element that one update in one pass reads and writes.

        The gradient is read; the weight and the states are read and written.
        """
        return FP32 + 2 * self.checkpoint_bytes


ADAMW = Rule("adamw", states=("exp_avg", "exp_avg_sq"), takes_adamw_rates=True)


@cache
def muon(steps: int, takes_adamw_rates: bool = True) -> Rule:
    """Return the rule of Muon, which takes the matrices of the layers.

    Args:
        steps: Newton-Schulz iterations of an update.
        takes_adamw_rates: updates are scaled to the size of AdamW's.
    """
    return Rule(
        "muon",
        states=("momentum",),
        takes=has_matrices,
        products=partial(newton_schulz_flops, steps=steps),
        whole_matrices=True,
        takes_adamw_rates=takes_adamw_rates,
    )


def newton_schulz_flops(tensor: Tensor, steps: int) -> int:
    """Return the FLOPs of the Newton-Schulz iterations of a whole tensor.

    Args:
        tensor: its declaration.
        steps: iterations.
    """
    return sum(stack.flops(steps) for stack in stacks(tensor))


def rule_of(tensor: Tensor, rules: Sequence[Rule]) -> Rule:
    """Return the rule that updates a tensor: the first that takes it.

    Args:
        tensor: its declaration.
        rules: of the run's optimizer, in order.
    """
    return next(rule for rule in rules if rule.takes(tensor))


def factor_of_name(name: str, factors: Mapping[str, float]) -> float:
    """Return the factor of a parameter's learning rate.

    Args:
        name: of the parameter.
        factors: {name pattern: factor}.

    Returns:
        The factor of the first pattern that the name matches, or 1.
    """
    return next((factor for pattern, factor in factors.items() if fnmatchcase(name, pattern)), 1.0)


def checkpoint_bytes(some: Iterable[Tensor], rules: Sequence[Rule]) -> int:
    """Return the bytes that tensors take in a checkpoint, headers of files not counted.

    Args:
        some: tensors of the inventory; of what does not train, only kept rows take any.
        rules: of the run's optimizer, in the order in which they choose their tensors.
    """
    return sum(
        tensor.elements * (rule_of(tensor, rules).checkpoint_bytes if tensor.trains else FP32)
        for tensor in some
        if tensor.stored
    )


def state_bytes(some: Iterable[Tensor], rules: Sequence[Rule]) -> int:
    """Return the bytes of the states of trainable tensors, without master weights.

    Args:
        some: tensors of the inventory; buffers among them have none.
        rules: of the run's optimizer, in the order in which they choose their tensors.
    """
    return sum(
        tensor.elements * rule_of(tensor, rules).state_bytes for tensor in some if tensor.trains
    )
