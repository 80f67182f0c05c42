"""The attention section: the variant, its seed, and a key for each axis of the policy.

The keys and their meanings follow from the declarations in `megatron_patches.recipe.policy`; this
module adds how their values are written in YAML, and their records as configuration keys.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

from pydantic import BeforeValidator, Field, create_model

from megatron_patches.bank.orthonormal import BankRecipe
from megatron_patches.recipe.axes import Axis
from megatron_patches.recipe.phases import PhaseStart
from megatron_patches.recipe.policy import AXES, QKPolicy
from megatron_patches.recipe.variants import VARIANTS
from pretrain.config.types import (
    SEED_MAX,
    Int,
    LargeInt,
    Layers,
    LayerShares,
    Names,
    OnResume,
    Section,
    Setting,
    as_tuple,
    setting,
)

BANK_KEYS = frozenset(field.name for field in fields(BankRecipe))
"""Keys with these names are compared at a resume as parts of the frozen bank's recipe."""

_REFUSED = Setting(OnResume.REFUSED, noted=False, hparam=True)


class PhaseEntry(Section):
    """An entry of attention.phases."""

    at: float = Field(
        gt=0, lt=1, description="It takes effect once this fraction of the steps is done."
    )
    freeze: Layers | None = Field(
        default=None,
        description="Layers whose query and key rows freeze as they are: all, 4, 4-7 or 50%-100%, "
        "counted from 0; unset: none.",
    )
    train: Layers | None = Field(
        default=None,
        description="Frozen layers that begin to train, in the same form; unset: none.",
    )
    learning_rate_factor: float = Field(
        default=1.0,
        gt=0,
        description="Factor of the learning rate from there on; it replaces the one before.",
    )
    decay_steps: Int | None = Field(
        default=None,
        ge=1,
        description="Steps before it over which the learning rate of the rows that freeze falls to "
        "zero; unset: it does not.",
    )


FORMER_PHASES = "attention.unfreeze"
"""Name of attention.phases in earlier versions; its entries were {at, layers, …} and only train."""


def phases_of_unfreeze(entries: Any) -> Any:
    """Return the value of the former key attention.unfreeze as attention.phases has it.

    Anything but a list of mappings is returned unchanged.
    """
    if not isinstance(entries, (list, tuple)):
        return entries
    return [
        {"train" if key == "layers" else key: value for key, value in entry.items()}
        if isinstance(entry, Mapping)
        else entry
        for entry in entries
    ]


def _same(value: Any) -> Any:
    return value


def _shown_phase(entry: PhaseStart) -> dict[str, Any]:
    """Return the keys of an entry that are set."""
    return {key: value for key, value in asdict(entry).items() if value is not None}


@dataclass(frozen=True)
class _Form:
    """The written form of a type of the policy.

    Attributes:
        written: Type in the section.
        read: Turns the section's value into the policy's.
        shown: Turns the policy's value into plain values for config.yaml; None for an empty one.
    """

    written: Any
    read: Callable[[Any], Any] = _same
    shown: Callable[[Any], Any] = _same


_FORMS: dict[Any, _Form] = {
    int: _Form(Int),
    tuple[str, ...]: _Form(Names, shown=list),
    tuple[tuple[str, float], ...]: _Form(
        LayerShares,
        read=lambda shares: tuple(shares.items()),
        shown=lambda shares: dict(shares) or None,
    ),
    tuple[PhaseStart, ...]: _Form(
        Annotated[tuple[PhaseEntry, ...], BeforeValidator(as_tuple)],
        read=lambda entries: tuple(PhaseStart(**entry.model_dump()) for entry in entries),
        shown=lambda entries: [_shown_phase(entry) for entry in entries] or None,
    ),
}
"""{type of the policy: its written form}; other types are written as they are."""


@cache
def _form(name: str) -> _Form:
    hint = get_type_hints(QKPolicy)[name]
    if type(None) in get_args(hint):  # `float | None`: every key of the section may be unset anyway
        (hint,) = (part for part in get_args(hint) if part is not type(None))
    return _FORMS.get(hint, _Form(hint))


def _key(name: str, axis: Axis) -> tuple[Any, Any]:
    """Return type and field of the key for an axis; if unset, the variant decides."""
    shown_in_name = name != "adapters"  # adapters are in a run's name anyway
    record = replace(
        _REFUSED, identity=name not in BANK_KEYS, method=shown_in_name, label=shown_in_name
    )
    limits = {key: getattr(axis, key) for key in ("ge", "gt", "le", "min_length", "max_length")}
    described = setting(None, axis.meaning, record, **limits)
    return _form(name).written | None, described


_SectionType = TypeVar("_SectionType", bound=type[Section])


def _with_axes(section: _SectionType) -> _SectionType:
    """Return the section with a key for each axis of the policy, after the section's own keys.

    A decorator, so that the type checker still sees the class as it is written below.
    """
    keys: dict[str, Any] = {name: _key(name, axis) for name, axis in AXES.items()}
    with_axes: Any = create_model(
        section.__name__, __base__=section, __module__=section.__module__, **keys
    )
    return with_axes


@_with_axes
class AttentionSection(Section):
    """Queries and keys: a variant, its seed, and what you change of it."""

    variant: str = setting(
        ...,
        "Query/Key policy: a name in megatron_patches.recipe.variants.VARIANTS.",
        replace(_REFUSED, identity=True, method=True),
    )
    seed: LargeInt | None = setting(
        None,
        "Seed of the Query/Key bank; unset: run.seed.",
        replace(_REFUSED, identity="seed" not in BANK_KEYS),
        ge=0,
        le=SEED_MAX,
    )

    def given_axes(self) -> dict[str, Any]:
        """Return {axis: value} of the axes that are set, as `policy_for` takes them."""
        axis_values = {name: getattr(self, name) for name in AXES}
        return {
            name: _form(name).read(value)
            for name, value in axis_values.items()
            if value is not None
        }


def named_variant(variant: str, section: Mapping[str, Any]) -> str:
    """Return the name of the variant that has all of a section's values; `variant` if none has.

    Args:
        section: Plain values of the section, those that follow from the variant filled in.
    """
    if variant not in VARIANTS:
        return variant
    values = {name: section.get(name) for name in AXES}
    return _names().get(_fingerprint(VARIANTS[variant], values), variant)


def _fingerprint(policy: QKPolicy, values: Mapping[str, Any]) -> str:
    """Return a text that differs between policies, from plain values of the axes."""
    fixed = [policy.init, policy.scores, policy.trains_factors, policy.trainable]
    return json.dumps([fixed, values], sort_keys=True, default=str)


@cache
def _names() -> dict[str, str]:
    return {_fingerprint(policy, written_axes(policy)): name for name, policy in VARIANTS.items()}


def written_axes(policy: QKPolicy) -> dict[str, Any]:
    """Return {axis: plain value} of every axis; None for one that does not apply."""
    values = {name: getattr(policy, name) for name in AXES}
    return {
        name: _form(name).shown(value) if AXES[name].fits(policy, value) else None
        for name, value in values.items()
    }
