"""Groups of runs that are seeds of one another, and the group that each is compared with.

Members of a group have one method (variant and adapters) and the same settings but for the seeds;
where two groups have one method, the settings in which they differ are in their names. `group_runs`
takes the settings of the attention and names groups `orthogonal construction=svd`, or takes the
names that the user gave the runs; `group_by_settings` takes settings of the caller's and names them
`orthogonal (construction=svd)`.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import laboratory.study.packages  # noqa: F401
from laboratory.study.sealed import arm_of
from megatron_patches.recipe.variants import VARIANTS
from pretrain.config.attention import named_variant
from pretrain.config.keys import KEYS, by_section
from pretrain.errors import UserError
from pretrain.reporting.text import setting_text


class Member(Protocol):
    """Member of a group: a finished run or a model. `config` is {section: {key: value}}."""

    @property
    def path(self) -> Path: ...
    @property
    def name(self) -> str: ...
    @property
    def variant(self) -> str: ...
    @property
    def seed(self) -> int | None: ...
    @property
    def config(self) -> Mapping[str, Any]: ...


R = TypeVar("R", bound=Member)
Result = TypeVar("Result")

_NOT_IN_A_LABEL = {name.removeprefix("attention.") for name, key in KEYS.items() if not key.label}
_NOT_THE_METHOD = frozenset(name for name, key in KEYS.items() if not key.method)


@dataclass(frozen=True)
class Group(Generic[R]):
    """Runs that are seeds of one another.

    Attributes:
        label: Name of the method.
        stratum: Values of the subject as text; "" if no subject was named.
        runs: Runs by ascending seed.
    """

    label: str
    stratum: str
    runs: tuple[R, ...]

    @property
    def name(self) -> str:
        """Return label and stratum: unique among the groups."""
        return " ".join(part for part in (self.label, self.stratum) if part)


@dataclass(frozen=True)
class Groups(Generic[R]):
    """Groups, and the group that each is compared with.

    Attributes:
        baseline: Name of the baseline.
        groups: Every group.
        compared_with: {name of a group: name of its baseline's group}; a baseline's is itself.
    """

    baseline: str
    groups: tuple[Group[R], ...]
    compared_with: Mapping[str, str]

    @property
    def runs(self) -> list[R]:
        """Return every run, group by group."""
        return [run for group in self.groups for run in group.runs]

    def named(self, name: str) -> Group[R]:
        """Return the group of that name."""
        return next(group for group in self.groups if group.name == name)

    def baseline_of(self, group: Group[R]) -> Group[R]:
        """Return the group that `group` is compared with."""
        return self.named(self.compared_with[group.name])

    def name_of(self, run: R) -> str:
        """Return the name of the run's group."""
        return next(g.name for g in self.groups if run.path in {member.path for member in g.runs})


def by_group(results: Iterable[Result]) -> dict[str, list[Result]]:
    """Return {group: its results}, groups and results in the order given; each has a `group`."""
    groups: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        groups[result.group].append(result)  # type: ignore[attr-defined]
    return dict(groups)


def refuse_twice(paths: Iterable[Path], what: str = "run", place: str = "run directory") -> None:
    """Refuse a path that is given twice.

    Args:
        paths: Paths as the user gave them.
        what: Noun for a path in the message.
        place: Noun for the target of a path in the message.

    Raises:
        UserError: two paths name the same directory.
    """
    listed = [path.resolve() for path in paths]
    if len(set(listed)) < len(listed):
        raise UserError(f"a {what} was given twice: give each {place} once")


def named_apart(members: Sequence[R]) -> list[R]:
    """Return the members, with their path as name where several share one."""
    names = [member.name for member in members]
    alone = [names.count(name) == 1 for name in names]
    return [
        member if is_unique else replace(member, name=str(member.path))  # type: ignore[type-var]
        for member, is_unique in zip(members, alone, strict=True)
    ]


def settings_of(run: Member) -> dict[str, Any]:
    """Return {section.key: value} of the run's config."""
    return {
        f"{section}.{key}": value
        for section, content in by_section(run.config).items()
        if isinstance(content, Mapping)
        for key, value in content.items()
    }


def method_of(run: Member) -> str:
    """Return variant and adapters, such as `orthogonal+low_rank`, without the variant's own.

    A combination that has a name of its own is called by it.
    """
    attention = run.config.get("attention", {})
    adapters = list(attention.get("adapters") or [])
    variant = named_variant(run.variant, attention)
    default_adapters = list(VARIANTS[variant].adapters) if variant in VARIANTS else []
    return "+".join([variant, *([] if adapters == default_adapters else adapters or ["none"])])


def group_runs(
    runs: Sequence[R],
    baseline: str,
    subjects: Mapping[str, Sequence[Any]] | None = None,
    *,
    labels: Sequence[str] | None = None,
) -> Groups[R]:
    """Group runs by method, settings of the attention and values of the subjects.

    Args:
        runs: Members of the groups.
        baseline: A label, a label with its stratum, or the name of one run, which then stands for
            its group.
        subjects: {setting: its value in each of `runs`}; None where the user cannot name any.
        labels: Labels of `runs`; None: by their settings.

    Returns:
        The groups, strata in the order of the subject's values, the baseline first in each, all
        else in the order given.

    Raises:
        UserError: no such baseline, a stratum without one, two runs of a group with one seed, or
            runs that a given label calls seeds of one another and that are not.
    """
    by_name = labels is not None
    if labels is None:
        methods = [method_of(run) for run in runs]
        attention = [run.config["attention"] for run in runs]
        telling = _telling_settings(methods, attention, _NOT_IN_A_LABEL)
        labels = [" ".join([m, *texts]) for m, texts in zip(methods, telling, strict=True)]
        names = _names_of_grid(runs, labels)
        labels = [names.get(label, label) for label in labels]
        baseline = names.get(baseline, baseline)
    strata = _strata(subjects or {}, len(runs))
    groups = _collect(runs, labels, strata, may_name_subject=subjects is not None)
    if by_name:
        _refuse_other_settings(groups)
    label, compared_with = _find_baseline(groups, baseline)
    first = _first_positions(subjects or {}, strata)
    order = sorted(groups, key=lambda g: (first[g.stratum], compared_with[g.name] != g.name))
    return Groups(label, tuple(order), compared_with)


def group_by_settings(
    members: Sequence[R],
    methods: Sequence[str],
    settings: Sequence[Mapping[str, Any]],
    baseline: str | None = None,
) -> Groups[R]:
    """Group members by method and settings, in the order given.

    Args:
        members: Members of the groups.
        methods: Method of each member.
        settings: {name: value} of each member; a name may have a section before it.
        baseline: The name of a group, its variant, or the name of a member; None: the first
            member's group.

    Raises:
        UserError: no such baseline, or two members of a group with one seed.
    """
    telling = _telling_settings(methods, settings)
    names = [
        f"{m} ({', '.join(texts)})" if texts else m
        for m, texts in zip(methods, telling, strict=True)
    ]
    groups = _collect(members, names, [""] * len(members))
    label, compared_with = _find_baseline(groups, names[0] if baseline is None else baseline)
    return Groups(label, tuple(groups), compared_with)


def group_by_method(runs: Sequence[R]) -> Groups[R]:
    """Group finished runs by all settings that decide training, except seeds.

    Raises:
        UserError: a run is given twice, or two runs of a group have the same seed.
    """
    refuse_twice(run.path for run in runs)
    settings = [_method_settings(run) for run in runs]
    return group_by_settings(runs, [method_of(run) for run in runs], settings)


def _telling_settings(
    methods: Sequence[str], settings: Sequence[Mapping[str, Any]], left_out: Collection[str] = ()
) -> list[list[str]]:
    """Return, for each member, the settings that differ within its method as `key=value`."""
    differing: dict[str, list[str]] = {}
    for method in dict.fromkeys(methods):  # once each: its members may be thousands
        alike = [other for name, other in zip(methods, settings, strict=True) if name == method]
        keys = sorted({key for other in alike for key in other}.difference(left_out))
        differing[method] = [
            key for key in keys if len({setting_text(o.get(key)) for o in alike}) > 1
        ]
    return [
        [f"{key.rpartition('.')[2]}={setting_text(values.get(key))}" for key in differing[method]]
        for method, values in zip(methods, settings, strict=True)
    ]


def _names_of_grid(runs: Sequence[Member], labels: Sequence[str]) -> dict[str, str]:
    """Return {label: name} of the labels of several words that a grid has one name for.

    The name is the first part of the runs' names, as with labels by names.
    """
    pairs: set[tuple[str, str]] = set()
    for run, label in zip(runs, labels, strict=True):
        name = run.config.get("run", {}).get("name", "")  # a model of transformers has none
        pairs.add((label, arm_of(name) if name.endswith(f"-seed_{run.seed}") else label))
    of_label, of_name = map(Counter, zip(*pairs, strict=True))
    return {
        label: name
        for label, name in pairs
        if {"+", " "} & {*label} and of_label[label] == of_name[name] == 1 and name not in labels
    }


def _collect(
    runs: Sequence[R],
    labels: Sequence[str],
    strata: Sequence[str],
    *,
    may_name_subject: bool = False,
) -> list[Group[R]]:
    members: dict[tuple[str, str], list[R]] = defaultdict(list)
    for run, label, stratum in zip(runs, labels, strata, strict=True):
        members[label, stratum].append(run)
    groups = []
    for (label, stratum), group_members in members.items():
        by_seed = sorted(group_members, key=lambda run: -1 if run.seed is None else run.seed)
        groups.append(Group(label, stratum, tuple(by_seed)))
        _refuse_one_seed_twice(groups[-1], may_name_subject)
    return groups


def _refuse_one_seed_twice(group: Group[Any], may_name_subject: bool) -> None:
    for first, second in pairwise(group.runs):
        if first.seed == second.seed:
            keys = _differing(settings_of(first), settings_of(second))
            differing = [key for key in keys if not key.startswith("run.")]
            remedy = "give one of them"
            if differing and may_name_subject:
                remedy += f", or say --subject {differing[0]} if that is what is compared"
            raise UserError(
                f"{first.path} and {second.path} are both '{group.name}' with "
                f"run.seed={first.seed}: {remedy}"
            )


def _refuse_other_settings(groups: Sequence[Group[Any]]) -> None:
    """Refuse runs of one label and stratum that differ in more than their seeds."""
    for group in groups:
        first = _method_settings(group.runs[0])
        for other in group.runs[1:]:
            if differing := _differing(first, _method_settings(other)):
                raise UserError(
                    f"{group.runs[0].path} and {other.path} are both '{group.name}' by their "
                    f"names, but differ in {differing[0]}: leave one out, leave out --by names, "
                    f"or say --subject {differing[0]} if that is what is compared"
                )


def _method_settings(run: Member) -> dict[str, Any]:
    settings = settings_of(run)
    return {key: settings[key] for key in settings.keys() - _NOT_THE_METHOD}


def _differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    keys = sorted(first.keys() | second.keys())
    return [key for key in keys if setting_text(first.get(key)) != setting_text(second.get(key))]


def _strata(subjects: Mapping[str, Sequence[Any]], count: int) -> list[str]:
    """Return `key=value` of every subject for each run, keys without section unless ambiguous."""
    last = [name.rpartition(".")[2] for name in subjects]
    short = last if len(set(last)) == len(last) else list(subjects)
    pairs = list(zip(short, subjects.values(), strict=True))
    return [
        " ".join(f"{key}={setting_text(values[i])}" for key, values in pairs) for i in range(count)
    ]


def _first_positions(
    subjects: Mapping[str, Sequence[Any]], strata: Sequence[str]
) -> dict[str, int]:
    """Return the position of each stratum, by the subject's values if they can be sorted."""
    order: Sequence[int] = range(len(strata))
    with contextlib.suppress(TypeError):  # a mapping, or numbers beside None
        order = sorted(order, key=lambda i: tuple(values[i] for values in subjects.values()))
    return {strata[i]: position for position, i in reversed(list(enumerate(order)))}


def _find_baseline(groups: Sequence[Group[Any]], baseline: str) -> tuple[str, dict[str, str]]:
    """Return the baseline's name, and {group: the group it is compared with}."""
    of_variant = {group.label for group in groups if group.runs[0].variant == baseline}
    if baseline in {group.label for group in groups}:
        return baseline, _by_stratum(groups, baseline)
    for group in groups:
        if baseline == group.name:
            return baseline, {other.name: baseline for other in groups}
        if baseline in {run.name for run in group.runs}:
            return group.label, _by_stratum(groups, group.label)
    if len(of_variant) == 1:
        label = of_variant.pop()
        return label, _by_stratum(groups, label)
    problem = (
        "is the variant of several groups of runs"
        if of_variant
        else "is none of the variants and runs given"
    )
    present = ", ".join(f"'{group.name}'" for group in groups)
    raise UserError(f"--baseline {baseline} {problem}; give one of these: {present}")


def _by_stratum(groups: Sequence[Group[Any]], label: str) -> dict[str, str]:
    baselines = {group.stratum: group.name for group in groups if group.label == label}
    for group in groups:
        if group.stratum not in baselines:
            raise UserError(
                f"there is no run of the baseline {label} with {group.stratum}, which "
                f"'{group.name}' has: add one, or give one variant for all, such as "
                f"--baseline '{next(iter(baselines.values()))}'"
            )
    return {group.name: baselines[group.stratum] for group in groups}
