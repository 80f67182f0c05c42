"""The variants of a trial, of which each differs in one thing from the one before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_patches.recipe.variants import LEADING
from pretrain.errors import UserError

DESIGNS = "demo_frozen_designs"
"""The grid whose entries are the designs; the first is the baseline."""
SPELLED_OUT, _FACTORS = "monarch_shared_conv4", "optimizer.learning_rate_factors"
"""The entry that is the leading variant, and what else it sets."""


@dataclass(frozen=True)
class Arms:
    """The designs of a trial, of which each differs in one thing from the one before.

    Attributes:
        entries: Entries of a sweep, in that order.
        baseline: Name of the one that the page compares the others with.
        difference: Lines that say what the designs differ in.
    """

    entries: tuple[Mapping[str, Any], ...]
    baseline: str
    difference: str

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the designs, which their runs have too."""
        return tuple(map(name_of, self.entries))


def choose_arms(design: str) -> Arms:
    """Return a design with what it is compared with.

    Args:
        design: LEADING, or the name of an entry of the grid DESIGNS.

    Raises:
        UserError: there is no such design, or it is the baseline itself.
    """
    from pretrain.config.load import load_config
    from pretrain.config.sources import did_you_mean, override_text

    entries = named_designs()
    vanilla = next(iter(entries))
    if design == vanilla:
        raise UserError(f"--design {design} is what the others are compared with; choose another")
    if design not in entries:
        hint = did_you_mean(design, entries) or f"; there are {', '.join(entries)}"
        raise UserError(f"--design {design} is none of the grid {DESIGNS}{hint}")
    entry = entries[design]
    overrides = [override_text(key, value) for key, value in entry.items() if key != "name"]
    policy = load_config("demo", overrides).policy
    kind = "trained" if policy.trainable else "frozen"
    rows = f"{design} has {kind} queries and keys of its own kind"
    if not policy.adapters:
        sentence = f"{rows}; {vanilla} trains dense ones"
        return Arms((entries[vanilla], entry), baseline=vanilla, difference=sentence)
    twin = _named(entries, _twin(entry, entries[vanilla], policy.adapters))
    adapters = f"{name_of(twin)} is {vanilla} with the adapters {', '.join(policy.adapters)}"
    if twin == entry:
        return Arms((entries[vanilla], entry), baseline=vanilla, difference=adapters)
    sentence = (
        f"{adapters}\n{rows} and the same adapters: the page compares it with {name_of(twin)}"
    )
    return Arms((entries[vanilla], twin, entry), baseline=name_of(twin), difference=sentence)


def _twin(
    entry: Mapping[str, Any], vanilla: Mapping[str, Any], adapters: Sequence[str]
) -> dict[str, Any]:
    """Return `vanilla` with a design's adapters, their settings and the design's rates."""
    settings_of_adapters = {f"attention.{name}" for name in adapters}
    return {
        **vanilla,
        "name": "_".join([name_of(vanilla), *adapters]),
        "attention.adapters": list(adapters),
        **{
            key: value
            for key, value in entry.items()
            if key in settings_of_adapters or not key.startswith(("attention.", "name"))
        },
    }


def _named(
    entries: Mapping[str, Mapping[str, Any]], wanted: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the entry that is the wanted one but for its name, or the wanted one."""
    for entry in entries.values():
        if {**entry, "name": None} == {**wanted, "name": None}:
            return entry
    return wanted


def name_of(entry: Mapping[str, Any]) -> str:
    """Return the name of a grid's entry, which is its variant where it has none."""
    return str(entry.get("name", entry["attention.variant"]))


def named_designs() -> dict[str, dict[str, Any]]:
    """Return {name: entry} of the grid DESIGNS, and of the leading variant by its own name."""
    from laboratory.sweep.grid import read_grid

    entries = read_grid(DESIGNS).content.entries or []
    designs = {name_of(entry): entry for entry in entries}
    factors = {_FACTORS: designs[SPELLED_OUT][_FACTORS]}
    return designs | {LEADING: {"name": LEADING, "attention.variant": LEADING, **factors}}
