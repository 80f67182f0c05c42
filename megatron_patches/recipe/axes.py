"""Declarations of the axes of the attention policy, each once, at its field of `policy.QKPolicy`.

A declaration gives the meaning of the axis, the range of its values and the variants to which it
applies. The key of the attention section, its refusals, the resolved config, `show` and a
checkpoint's identity follow from the declaration. `policy` and `pretrain.config.attention` read the
declarations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

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
    """

    meaning: str
    rules: tuple[Rule, ...] = ()
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    min_length: int | None = None
    max_length: int | None = None

    def fits(self, policy: Any, value: Any) -> bool:
        """Return whether the policy may have the value.

        An empty list, which sets nothing, always fits.

        Args:
            policy: the policy so far.
            value: the requested value.
        """
        return value == () or all(rule.holds(policy, value) for rule in self.rules)

    def check(self, policy: Any, value: Any, variant: str) -> None:
        """Refuse a value that does not fit.

        Args:
            policy: the policy so far.
            value: the requested value.
            variant: name of the variant.

        Raises:
            MethodError: the sentence of the first rule that is broken.
        """
        if value == ():
            return
        for rule in self.rules:
            if not rule.holds(policy, value):
                raise MethodError(rule.sentence.format(variant=variant, value=value))


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
    return {
        entry.name: entry.metadata["axis"] for entry in fields(policy) if "axis" in entry.metadata
    }
