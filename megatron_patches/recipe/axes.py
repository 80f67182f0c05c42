"""How an axis of the attention policy is declared: once, at the field of `policy.QKPolicy` that holds it.

The declaration says what the axis means, which values are in range and which variants it applies to. The key
of the attention section, its refusals, the resolved config, `show` and a checkpoint's identity follow from
it; `policy` reads it, and so does `pretrain.config.attention`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from megatron_patches.errors import MethodError


@dataclass(frozen=True)
class Rule:
    """What must hold for an axis to be given.

    Attributes:
        holds: of the policy so far and the value that is asked for.
        sentence: the refusal if it does not; `{variant}` and `{value}` are filled in.
    """

    holds: Callable[[Any, Any], bool]
    sentence: str


@dataclass(frozen=True)
class Axis:
    """One declared axis.

    Attributes:
        meaning: what the key of the attention section is for, as `show` prints it.
        rules: all must hold, else the axis does not apply. No rules: it applies to every variant.
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
        """Whether the value may be asked of the policy. An empty list asks for nothing, so it always may."""
        return value == () or all(rule.holds(policy, value) for rule in self.rules)

    def check(self, policy: Any, value: Any, variant: str) -> None:
        """Refuse a value that does not fit.

        Raises:
            MethodError: with the sentence of the first rule that does not hold.
        """
        if value == ():
            return
        for rule in self.rules:
            if not rule.holds(policy, value):
                raise MethodError(rule.sentence.format(variant=variant, value=value))


def axis(
    default: Any,
    meaning: str,
    *rules: Rule,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    min_length: int | None = None,
    max_length: int | None = None,
) -> Any:
    """A field of a policy that is also a key of the attention section; its type is the field's annotation.

    Args:
        default: of a policy that says nothing of it. Other variants' own values are in `policy.VARIANTS`.
    """
    declared = Axis(meaning, rules, ge, gt, le, min_length, max_length)
    return field(default=default, metadata={"axis": declared})


def axes_of(policy: type) -> dict[str, Axis]:
    """{name: declaration} of the axes of a policy class, in their order."""
    return {entry.name: entry.metadata["axis"] for entry in fields(policy) if "axis" in entry.metadata}
