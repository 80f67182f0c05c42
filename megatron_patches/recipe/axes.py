"""Declarations of the axes of the attention policy, each once, at its field of `policy.QKPolicy`.

A declaration gives the meaning of the axis, the range of its values and the variants to which it
applies. The key of the attention section, its refusals, the resolved config, `show` and a
checkpoint's identity follow from the declaration. `policy` and `pretrain.config.attention` read the
declarations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from megatron_patches.errors import MethodError


@dataclass(frozen=True)
class Rule:
    """Condition under which an axis may be set.

    `holds`: the condition, on the policy so far and the requested value. `sentence`: the refusal
    where the condition does not hold; `{variant}` and `{value}` are filled in.
    """

    holds: Callable[[Any, Any], bool]
    sentence: str


@dataclass(frozen=True)
class Axis:
    """Declaration of an axis.

    Attributes:
        meaning: purpose of the key of the attention section, as `show` prints it.
        rules: all must hold, else the axis does not apply. Without rules the axis applies to every
            variant.
        ge, gt, le: range of a number.
        min_length, max_length: entries of a list or mapping.
        name: key in the attention section.
        choices: possible values; empty where the range limits them instead.
    """

    meaning: str
    rules: tuple[Rule, ...] = ()
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    min_length: int | None = None
    max_length: int | None = None
    name: str = ""
    choices: tuple[Any, ...] = ()

    def fits(self, policy: Any, value: Any) -> bool:
        """Return whether a value suits the policy; an empty list sets nothing and always does."""
        return value == () or all(rule.holds(policy, value) for rule in self.rules)

    def check(self, policy: Any, value: Any, variant: str) -> None:
        """Refuse a value that does not fit.

        Raises:
            MethodError: the value is out of range, or breaks a rule, whose sentence it quotes.
        """
        if value == ():
            return
        if self.choices and value not in self.choices:
            choices = ", ".join(map(str, self.choices))
            raise MethodError(f"attention.{self.name} is {value!r}; known values: {choices}")
        if not self._in_range(value):
            limits = {"at least": self.ge, "above": self.gt, "at most": self.le}
            words = [f"{word} {limit:g}" for word, limit in limits.items() if limit is not None]
            raise MethodError(f"attention.{self.name} is {value}; it must be {' and '.join(words)}")
        for rule in self.rules:
            if not rule.holds(policy, value):
                raise MethodError(rule.sentence.format(variant=variant, value=value))

    def _in_range(self, value: Any) -> bool:
        return (
            (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
        )


def axis(default: Any, meaning: str, *rules: Rule, **limits: Any) -> Any:
    """Declare a field of a policy that is also a key of the attention section.

    Args:
        default: value of the variants that do not set one.
        meaning: purpose of the key, as `show` prints it.
        *rules: conditions on the policy, each with its sentence of refusal.
        **limits: the other fields of `Axis`, such as the values that are possible.

    Returns:
        A dataclass field, which `axes_of` finds.
    """
    return field(default=default, metadata={"axis": Axis(meaning, rules, **limits)})


def axes_of(policy: type) -> dict[str, Axis]:
    """Return {name: declaration} of the axes of a policy class, in their order."""
    # Annotations are strings here; only resolved ones tell the choices of a Literal.
    hints = get_type_hints(policy)
    axes = {}
    for entry in (entry for entry in fields(policy) if "axis" in entry.metadata):
        hint = hints[entry.name]
        choices = get_args(hint) if get_origin(hint) is Literal else ()
        axes[entry.name] = replace(entry.metadata["axis"], name=entry.name, choices=choices)
    return axes
