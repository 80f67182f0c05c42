"""The plan of a sweep: every run's configuration checked, and the state of its directory."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import cache, reduce
from operator import getitem
from pathlib import Path
from typing import Any, Literal

from data_pipeline.errors import DataError
from data_pipeline.io.files import sha256_file
from laboratory.study.hypothesis import Hypothesis
from laboratory.study.seal import Seal, write_seal
from laboratory.study.sealed import Measure, design_of, design_settings, seed_settings
from laboratory.sweep.grid import Grid, expand, select
from megatron_patches.errors import MethodError
from pretrain.config.keys import KEYS
from pretrain.config.load import config_from_draft, parse_config
from pretrain.config.resolved import file_digests, resolve
from pretrain.config.sources import locate, place_value, read_yaml
from pretrain.config.tree import Config
from pretrain.config.types import OnResume
from pretrain.data.open import check_inputs, read_blend
from pretrain.errors import UserError

Standing = Literal["new", "partial", "finished"]
"""State of a run directory before the sweep starts: nothing, a part or all of the run is there."""
SHOWN_DIFFERENCES = 5


@dataclass(frozen=True)
class PlannedRun:
    """A run of a sweep.

    Attributes:
        base: First argument of `python -m pretrain train` for it, a config or YAML file.
        overrides: The other arguments, section.key=value.
        config: Configuration as resolved and checked.
        standing: State of its directory.
    """

    name: str
    base: str
    overrides: tuple[str, ...]
    config: Config
    standing: Standing

    @property
    def path(self) -> Path:
        """Return the run directory."""
        return self.config.run_path

    @property
    def log(self) -> Path:
        """Return the file of the run's output, one attempt after the other."""
        return self.config.run.directory / "logs" / f"{self.name}.log"


def plan_sweep(
    grid: Grid,
    base: str | None,
    overrides: Sequence[tuple[str, Any]],
    ranks_of: Callable[[Config], int],
    check_data: bool,
    only: Sequence[str] = (),
) -> list[PlannedRun]:
    """Return the runs of a grid, each with its checked configuration; nothing is written.

    Two entries that are one run on another base than the grid's own, whose value one of them gives,
    are planned once.

    Args:
        grid: The grid file.
        base: A config or YAML file; None: the grid's own.
        overrides: (key, value) of every run.
        ranks_of: Function that returns the number of ranks of a run.
        check_data: Also read the manifests of the data.
        only: Patterns of the names of the runs that are asked for, and checked; none: all of them.

    Raises:
        UserError: a configuration is refused, two runs are the same, a directory holds another run,
            or a pattern is the name of none.
    """
    moved = base not in (None, grid.content.base)
    base = base or grid.content.base
    planned: list[PlannedRun] = []
    seen: dict[str, str] = {}
    read_base = cache(lambda: read_yaml(*locate(base)))  # once for all runs
    for run in select(expand(grid, overrides), only, grid.source):
        try:
            draft = deepcopy(read_base())
            for choice in run.choices:
                place_value(draft, tuple(choice.key.split(".")), choice.value, choice.origin)
            config = config_from_draft(draft)
            (check_inputs if check_data else resolve)(config, ranks_of(config))
            standing = standing_of(config)
        except (UserError, DataError, MethodError) as error:
            raise UserError(f"grid {grid.source}, run {run.name}: {error}") from None
        twin = seen.setdefault(_identity(config), run.name)
        if twin != run.name and moved:
            continue
        if twin != run.name:
            raise UserError(
                f"grid {grid.source}: {twin} and {run.name} are the same run under two names; "
                "remove one"
            )
        overridden = tuple(run.overrides())
        planned.append(PlannedRun(run.name, base, overridden, config, standing=standing))
    return planned


def seal_plan(
    grid: Grid,
    base: str | None,
    overrides: Sequence[tuple[str, Any]],
    runs: Sequence[PlannedRun],
    hypotheses: Sequence[Hypothesis],
    stopping_rule: str,
    measure: Measure,
    seeds: Sequence[int] | None = None,
) -> Seal | None:
    """Seal hypotheses about the planned runs, beside them.

    Args:
        grid: The grid file of the runs.
        base: A config or YAML file; None: the grid's own.
        overrides: (key, value) of every run.
        hypotheses: Hypotheses to seal.
        stopping_rule: Stopping rule as a clause.
        measure: Measure that decides the hypotheses.
        seeds: Seeds that the runs may grow to; None: exactly those of `runs`.

    Returns:
        The seal; None where a run, or the trunk that it branches from, has begun unsealed.

    Raises:
        UserError: a hypothesis names a design that is not of these runs, or cannot be judged by
            them.
    """
    configs: dict[str, list[Config]] = defaultdict(list)
    for run in runs:
        configs[design_of(run.name, run.config.run.seed)].append(run.config)
    settings = {
        name: design_settings(design_configs[-1].as_dict())
        for name, design_configs in configs.items()
    }
    claimed = {name for claim in hypotheses for name in (claim.design, claim.baseline)}
    if unknown := sorted(claimed - settings.keys()):
        raise UserError(
            f"the hypothesis names '{unknown[0]}', which is none of {', '.join(settings)}"
        )
    if seeds is None:
        _refuse_unlike(configs, hypotheses, measure)
    blends = {repr((run.config.data.directory, run.config.data.blend)): run.config for run in runs}
    content = {
        "hypotheses": [asdict(claim) for claim in hypotheses],
        "stopping_rule": stopping_rule,
        "fixed_n": seeds is None,
        "grid": {
            "file": str(grid.path.resolve()),
            "sha256": sha256_file(grid.path),
            "base": base,
            "set": [*overrides],
        },
        "seeds": sorted({run.config.run.seed for run in runs}) if seeds is None else [*seeds],
        "settings": settings,
        "other_seeds": {
            name: seed_settings([config.values for config in design_configs])
            for name, design_configs in configs.items()
        },
        "contents": {name: file_digests(of_seeds[-1]) for name, of_seeds in configs.items()},
        "data": sorted({read_blend(config.data).fingerprint for config in blends.values()}),
        "measure": measure.model_dump(),
    }
    begun = [run.name for run in runs if run.standing != "new"]
    return write_seal(runs[0].config.run.directory, content, [*begun, *_of_earlier_trunks(runs)])


def _of_earlier_trunks(runs: Sequence[PlannedRun]) -> list[str]:
    """Return the names of branches whose trunk exists outside the plan."""
    planned = {run.path.resolve() for run in runs}
    trunks = {run.name: run.config.schedule.branch_from for run in runs}
    return [
        name
        for name, trunk in trunks.items()
        if trunk is not None and trunk.resolve() not in planned and trunk.exists()
    ]


def _refuse_unlike(
    configs: Mapping[str, Sequence[Config]], hypotheses: Sequence[Hypothesis], measure: Measure
) -> None:
    """Refuse hypotheses that pairs of these runs cannot decide by the measure."""
    for name in measure.subjects:
        if name.startswith("attention.") or name not in (*KEYS, "tokens", "data.fingerprint"):
            raise UserError(
                f"--subject {name} is nothing that runs are compared by; give a config key "
                "(section.key) outside of attention, tokens, or data.fingerprint"
            )
    seeds = {config.run.seed for design_configs in configs.values() for config in design_configs}
    for name, design_configs in configs.items():
        if lacking := sorted(seeds - {config.run.seed for config in design_configs}):
            raise UserError(
                f"a sealed hypothesis is judged by pairs of runs of one seed, but {name} has none "
                f"of seed {lacking[0]}; give all variants the same `seeds`"
            )
    for claim in hypotheses:
        both = (*configs[claim.design], *configs[claim.baseline])
        tokens = {config.total_steps * config.tokens_per_step for config in both}
        if len(tokens) > 1 and measure.match == "tokens":
            raise UserError(
                f"'{claim}' compares runs of {min(tokens):,} and {max(tokens):,} tokens; name runs "
                "of one length, or add --match flops"
            )


def _identity(config: Config) -> str:
    values = config.as_dict()
    del values["run"]["name"]
    return json.dumps(values, sort_keys=True)


def standing_of(config: Config) -> Standing:
    """Return whether the run directory holds nothing, a part or all of this run.

    Raises:
        UserError: the directory holds another run.
    """
    run = config.run_directory
    if not run.config.is_file():
        return "new"
    remedy = "choose another `directory` in the grid file"
    if not run.is_finished():
        remedy = f"delete it, or {remedy}"
    try:  # keys that are newer than the file stand at their defaults
        earlier = parse_config(read_yaml(run.config, str(run.config)).values)
    except (UserError, MethodError) as error:
        raise UserError(
            f"{run.config} is not a configuration of this version ({error}); {remedy}"
        ) from None
    differences = list(_differences(_compared(earlier), _compared(config)))
    if differences:
        more = len(differences) - SHOWN_DIFFERENCES
        shown = "; ".join(differences[:SHOWN_DIFFERENCES]) + (
            f"; and {more} more" if more > 0 else ""
        )
        raise UserError(f"{run.path} holds another run: {shown}; {remedy}")
    return "finished" if run.is_finished() else "partial"


def _compared(config: Config) -> dict[str, dict[str, Any]]:
    """Return the values that distinguish runs, with absolute paths.

    Another value of the others changes no number, as those that the job scripts set, or is a matter
    of the machine.
    """
    values = config.as_dict()
    for name, record in KEYS.items():
        *sections, key = name.split(".")
        content: dict[str, Any] = reduce(getitem, sections, values)
        value = reduce(getattr, [*sections, key], config)
        tells = name == "schedule.branch_from" or sections == ["data"]
        if name == "run.device" or (record.on_resume is OnResume.NO_EFFECT and not tells):
            del content[key]
        elif isinstance(value, Path):
            content[key] = str(value.resolve())
    for member in values["data"]["blend"] or ():
        member["directory"] = str(Path(member["directory"]).resolve())
    return values


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield `key is OLD there and NEW in the grid` for every leaf that is not the same."""
    for key in [*new, *(key for key in old if key not in new)]:
        was = old.get(key)
        now = new.get(key)
        if isinstance(was, Mapping) and isinstance(now, Mapping):
            yield from _differences(was, now, f"{prefix}{key}.")
        elif was != now:
            yield f"{prefix}{key} is {was} there and {now} in the grid"
