"""Which runs are samples of one variant, and which variant each is compared with.

A label is the variant, its adapters and, only where runs would otherwise share it, the attention settings in
which they differ: `orthogonal`, `orthogonal+low_rank`, `orthogonal construction=svd`. Runs of one label with
different `run.seed` are its samples. If settings are named as the subject, runs are compared within equal
values of them, each stratum with a baseline of its own.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from pretrain.config.keys import KEYS
from pretrain.errors import UserError
from pretrain.reporting.text import setting_text


class Labelled(Protocol):
    """What a group is made of: a finished run, or an exported model. `config` has the section `attention`."""

    @property
    def path(self) -> Path: ...
    @property
    def name(self) -> str: ...
    @property
    def variant(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def config(self) -> Mapping[str, Any]: ...


R = TypeVar("R", bound=Labelled)

_NOT_IN_A_LABEL = {name.removeprefix("attention.") for name, key in KEYS.items() if not key.label}


@dataclass(frozen=True)
class Group(Generic[R]):
    """The runs of one variant in one stratum, by ascending seed.

    `label` is the variant's own, `stratum` the subject's values ("" if no subject was named).
    """

    label: str
    stratum: str
    runs: tuple[R, ...]

    @property
    def name(self) -> str:
        """Label and stratum: unique in a comparison."""
        return " ".join(part for part in (self.label, self.stratum) if part)

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(run.seed for run in self.runs)


@dataclass(frozen=True)
class Groups(Generic[R]):
    """Every group and, by name, the group that it is compared with; a baseline's is itself."""

    baseline: str
    groups: tuple[Group[R], ...]
    compared_with: Mapping[str, str]

    def named(self, name: str) -> Group[R]:
        """The group of that name."""
        return next(group for group in self.groups if group.name == name)

    def baseline_of(self, group: Group[R]) -> Group[R]:
        """The group that `group` is compared with."""
        return self.named(self.compared_with[group.name])


def settings_of(run: Labelled) -> dict[str, Any]:
    """{section.key: value} of the run's config."""
    return {
        f"{section}.{key}": value
        for section, content in run.config.items()
        if isinstance(content, Mapping)
        for key, value in content.items()
    }


def group_runs(runs: Sequence[R], baseline: str, subjects: Mapping[str, Sequence[Any]]) -> Groups[R]:
    """Sort runs into groups: strata by the subject's values, the baseline first, else in the order given.

    Args:
        baseline: a label, a label with its stratum, or the name of one run, which then stands for its group.
        subjects: {setting: its value in each of `runs`}.

    Raises:
        UserError: no such baseline, a stratum without one, or two runs of a group with one seed.
    """
    labels = _labels(runs)
    members: dict[tuple[str, str], list[R]] = defaultdict(list)
    strata = _strata(subjects, len(runs))
    for run, label, stratum in zip(runs, labels, strata, strict=True):
        members[label, stratum].append(run)
    groups = [
        Group(label, stratum, tuple(sorted(members[label, stratum], key=lambda run: run.seed)))
        for label, stratum in members
    ]
    for group in groups:
        _refuse_one_seed_twice(group)
    label, compared_with = _find_baseline(groups, baseline)
    first = _first_positions(subjects, strata)
    order = sorted(groups, key=lambda g: (first[g.stratum], compared_with[g.name] != g.name))
    return Groups(label, tuple(order), compared_with)


def _strata(subjects: Mapping[str, Sequence[Any]], count: int) -> list[str]:
    """`key=value` of every subject for each run; the key without its section unless that is ambiguous."""
    last = [name.rpartition(".")[2] for name in subjects]
    short = last if len(set(last)) == len(last) else list(subjects)
    given = list(zip(short, subjects.values(), strict=True))
    return [" ".join(f"{key}={setting_text(values[i])}" for key, values in given) for i in range(count)]


def _first_positions(subjects: Mapping[str, Sequence[Any]], strata: Sequence[str]) -> dict[str, int]:
    """Where each stratum stands: by the subject's values if they can be sorted, else as first given."""
    order: Sequence[int] = range(len(strata))
    with contextlib.suppress(TypeError):  # a mapping, or numbers beside None
        order = sorted(order, key=lambda i: tuple(values[i] for values in subjects.values()))
    return {strata[i]: position for position, i in reversed(list(enumerate(order)))}


def _labels(runs: Sequence[Labelled]) -> list[str]:
    plain = ["+".join([run.variant, *(run.config["attention"].get("adapters") or ())]) for run in runs]
    labels = []
    for run, label in zip(runs, plain, strict=True):
        alike = [other for other, name in zip(runs, plain, strict=True) if name == label]
        labels.append(" ".join([label, *_telling_settings(run, alike)]))
    return labels


def _telling_settings(run: Labelled, alike: Sequence[Labelled]) -> list[str]:
    """`key=value` for each attention setting in which the runs of one plain label differ."""
    keys = sorted({key for other in alike for key in other.config["attention"]} - _NOT_IN_A_LABEL)
    return [
        f"{key}={setting_text(run.config['attention'].get(key))}"
        for key in keys
        if len({setting_text(other.config["attention"].get(key)) for other in alike}) > 1
    ]


def _refuse_one_seed_twice(group: Group[Any]) -> None:
    for first, second in zip(group.runs, group.runs[1:], strict=False):
        if first.seed == second.seed:
            ours, theirs = settings_of(first), settings_of(second)
            differing = [
                key
                for key in sorted(ours.keys() | theirs.keys())
                if ours.get(key) != theirs.get(key) and not key.startswith("run.")
            ]
            remedy = "give one of them"
            if differing:
                remedy += f", or say --subject {differing[0]} if that is what is compared"
            raise UserError(
                f"{first.path} and {second.path} are both '{group.name}' with run.seed={first.seed}: {remedy}"
            )


def _find_baseline(groups: Sequence[Group[Any]], baseline: str) -> tuple[str, dict[str, str]]:
    """The baseline's name, and {group: the group it is compared with}."""
    of_variant = {group.label for group in groups if group.runs[0].variant == baseline}
    if baseline in {group.label for group in groups}:
        return baseline, _by_stratum(groups, baseline)
    for group in groups:
        if baseline == group.name or baseline in {run.name for run in group.runs}:
            return group.name, {other.name: group.name for other in groups}
    if len(of_variant) == 1:
        label = of_variant.pop()
        return label, _by_stratum(groups, label)
    found = (
        "is the variant of several groups of runs" if of_variant else "is none of the variants and runs given"
    )
    present = ", ".join(f"'{group.name}'" for group in groups)
    raise UserError(f"--baseline {baseline} {found}; give one of these: {present}")


def _by_stratum(groups: Sequence[Group[Any]], label: str) -> dict[str, str]:
    own = {group.stratum: group.name for group in groups if group.label == label}
    for group in groups:
        if group.stratum not in own:
            raise UserError(
                f"there is no run of the baseline {label} with {group.stratum}, which '{group.name}' has: "
                f"add one, or give one variant for all, such as --baseline '{next(iter(own.values()))}'"
            )
    return {group.name: own[group.stratum] for group in groups}
