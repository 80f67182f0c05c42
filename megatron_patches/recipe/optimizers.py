"""Rules by which an optimizer updates tensors, and the kinds of optimizers made of them. No torch.

This is the only place that states what an optimizer keeps of a parameter. Checkpoints, the audit,
`plan`, the choice of the ZeRO stage and the formulas of `compare` are sums over the tensors of the
inventory, each by its rule.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any, ClassVar, Literal

from megatron_patches.recipe.matrices import has_matrices, stacks
from megatron_patches.recipe.parts import FP32, Tensor


def every(tensor: Tensor) -> bool:
    """Return True: the rule takes every tensor that no earlier rule has taken."""
    return True


def no_products(tensor: Tensor) -> int:
    """Return 0: the update is elementwise, and its arithmetic hides behind its memory traffic."""
    return 0


@dataclass(frozen=True)
class Rule:
    """The update of some of a model's tensors.

    Attributes:
        name: key of the class that applies the rule in `pretrain.optimizer.optimizers`.
        states: names of the numbers that the optimizer keeps of each element beside the master
            weight, as in the optimizer's state and in checkpoints; in fp32 at any precision, as
            weights are updated.
        takes: whether the rule updates a tensor.
        products: FLOPs of the matrix products in one update of a whole tensor.
        whole_matrices: an update needs the whole tensor, so that ZeRO cannot cut it anywhere.
        takes_adamw_rates: its learning rates are on AdamW's scale, so that a published law of
            AdamW's rate is where to start.
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
        """Return the bytes per element that an update reads and writes in a single pass.

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
    """Return the FLOPs of the Newton-Schulz iterations of a whole tensor."""
    return sum(stack.flops(steps) for stack in stacks(tensor))


def kind_setting(default: Any, meaning: str, **limits: float) -> Any:
    """Declare a setting of one kind of optimizer, typed by its annotation.

    Args:
        default: value of the setting unless the user sets one.
        meaning: text that `show` prints.
        limits: `ge`, `gt`, `le`, `lt` of its values.
    """
    return field(default=default, metadata={"meaning": meaning, "limits": limits})


@dataclass(frozen=True)
class Kind(ABC):
    """A kind of optimizer; the fields are settings of its own, the keys of `optimizer.KIND`.

    Attributes:
        meaning: clause that says which rule updates which weights.
    """

    meaning: ClassVar[str]

    @property
    @abstractmethod
    def rules(self) -> tuple[Rule, ...]:
        """Return the rules, in the order in which they choose their tensors."""

    def rate(self, tensor: Tensor) -> float | None:
        """Return the peak learning rate of a tensor; None: `optimizer.learning_rate`."""
        return None


class AdamW(Kind):
    """AdamW for every weight."""

    meaning = "every weight by AdamW"

    @property
    def rules(self) -> tuple[Rule, ...]:
        """Return AdamW's rule."""
        return (ADAMW,)


@dataclass(frozen=True)
class Muon(Kind):
    """Muon for the matrices of the layers, AdamW for the rest."""

    meaning = "the matrices of the layers by Muon, the rest by AdamW"

    embedding_learning_rate: float | None = kind_setting(
        None, "Peak learning rate of embeddings; unset: optimizer.learning_rate.", gt=0
    )
    output_learning_rate: float | None = kind_setting(
        None, "Peak learning rate of an untied output layer; unset: optimizer.learning_rate.", gt=0
    )
    vector_learning_rate: float | None = kind_setting(
        None,
        "Peak learning rate of all else that AdamW updates, norms and adapters; unset: "
        "optimizer.learning_rate.",
        gt=0,
    )
    momentum: float = kind_setting(0.95, "Decay rate of the momentum.", ge=0, lt=1)
    nesterov: bool = kind_setting(True, "Look one gradient ahead of the momentum.")
    newton_schulz_steps: int = kind_setting(
        5, "Newton-Schulz iterations of an update.", ge=1, le=99
    )
    newton_schulz_dtype: Literal["auto", "fp32", "bf16"] = kind_setting(
        "auto",
        "Type of the Newton-Schulz iterations; auto: bf16 on GPUs and on CPUs that multiply it, "
        "else fp32.",
    )
    update_scale: Literal["match_adamw", "spectral"] = kind_setting(
        "match_adamw",
        "Factor of a matrix [out, in]; match_adamw: 0.2 sqrt(max(out, in)), for rates of AdamW; "
        "spectral: sqrt(max(1, out / in)).",
    )

    @property
    def rules(self) -> tuple[Rule, ...]:
        """Return Muon's rule and AdamW's."""
        return (muon(self.newton_schulz_steps, self.update_scale == "match_adamw"), ADAMW)

    def rate(self, tensor: Tensor) -> float | None:
        """Return the rate of what Muon does not update, by what it is."""
        # Muon's own rate is optimizer.learning_rate.
        if has_matrices(tensor):
            return None
        outside = {
            "embedding": self.embedding_learning_rate,
            "output_layer": self.output_learning_rate,
        }
        return outside.get(tensor.name.partition(".")[0], self.vector_learning_rate)


KINDS: Mapping[str, type[Kind]] = {"adamw": AdamW, "muon": Muon}
"""{value of `optimizer.kind`: its declaration}"""


def rule_of(tensor: Tensor, rules: Sequence[Rule]) -> Rule:
    """Return the rule that updates a tensor: the first that takes it.

    Args:
        rules: rules of the run, in the order in which they choose their tensors.
    """
    # The last rule takes every tensor, so that there always is one.
    return next(rule for rule in rules if rule.takes(tensor))


def factor_of_name(name: str, factors: Mapping[str, float]) -> float:
    """Return the factor of a parameter's learning rate.

    Returns:
        The factor of the first pattern that the name matches, or 1.
    """
    return next((factor for pattern, factor in factors.items() if fnmatchcase(name, pattern)), 1.0)


def checkpoint_bytes(some: Iterable[Tensor], rules: Sequence[Rule]) -> int:
    """Return the bytes that tensors take in a checkpoint, headers of files not counted.

    Args:
        some: tensors of the inventory; of what does not train, only kept rows take any.
        rules: rules of the run, in the order in which they choose their tensors.
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
        rules: rules of the run, in the order in which they choose their tensors.
    """
    return sum(
        tensor.elements * rule_of(tensor, rules).state_bytes for tensor in some if tensor.trains
    )
