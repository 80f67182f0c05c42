"""Grid files: the runs of a sweep, as a base configuration, fixed values, and values that vary.

    base: demo                                  # a shipped config or a YAML file
    directory: runs/positions                   # run.directory of every run
    set: {schedule.steps: 600}                  # in every run
    list:                                       # one of these ...
      - {attention.variant: vanilla}
      - {name: low_rank, attention.variant: orthogonal, attention.adapters: [low_rank]}
    grid:                                       # ... times one value of each of these ...
      model.position_embedding: [rope, learned]
    seeds: [1, 2, 3]                            # ... times a run.seed

`schedule.branch_from` may be the name of an entry of `list`: its run with the same other values and
seed. The runs come seed by seed, so that a sweep that is cut short has whole comparisons.
"""

from __future__ import annotations

import difflib
import fnmatch
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, field_validator

from data_pipeline.io.home import expand_home
from laboratory.sweep.names import NamedValues, run_names
from pretrain.config.load import validation_sentence
from pretrain.config.sources import (
    OVERRIDE,
    KeyPath,
    did_you_mean,
    locate,
    override_text,
    read_yaml,
)
from pretrain.config.types import SEED_MAX, LargeInt, PathLike, Section
from pretrain.errors import UserError

GRIDS = ("laboratory.grids", "*/*.yaml")
"""Package of the shipped grids, and the pattern of their paths in it."""
_TRUNK = "schedule.branch_from"
OWN_KEYS = {
    "run.name": "the sweep names its runs; an entry of `list` may have a `name`",
    "run.directory": "give `directory` instead",
}


class GridFile(Section):
    """Grid file as written."""

    base: str = Field(default="demo", min_length=1, description="A shipped config or a YAML file.")
    directory: PathLike = Field(description="Directory that holds the runs.")
    fixed: dict[str, Any] = Field(
        default_factory=dict, alias="set", description="Values of every run."
    )
    entries: list[dict[str, Any]] | None = Field(
        default=None,
        alias="list",
        min_length=1,
        description="Sets of values; each run has one of them.",
    )
    grid: dict[str, Annotated[list[Any], Field(min_length=1)]] = Field(
        default_factory=dict, description="Values of a key; runs have all combinations."
    )
    seeds: list[Annotated[LargeInt, Field(ge=0, le=SEED_MAX)]] | None = Field(
        default=None, min_length=1, description="Values of run.seed; unset: the base's."
    )

    @field_validator("fixed", "grid", mode="before")
    @classmethod
    def _nothing_is_empty(cls, value: Any) -> Any:
        return {} if value is None else value


@dataclass(frozen=True)
class Grid:
    """Grid file after reading.

    Attributes:
        source: Name of the grid in messages.
        content: Keys of the file.
        lines: {key: FILE:LINE where it stands}.
    """

    source: str
    content: GridFile
    lines: Mapping[KeyPath, str]
    path: Path


@dataclass(frozen=True)
class Choice:
    """A value of a key, and where it was written (`FILE:LINE`)."""

    key: str
    value: Any
    origin: str


@dataclass(frozen=True)
class GridRun:
    """A run of a grid: its name and its values beyond the base, those that vary last."""

    name: str
    choices: tuple[Choice, ...]

    def overrides(self) -> list[str]:
        """Return the values as `section.key=value`, as `python -m pretrain train` takes them."""
        return [override_text(choice.key, choice.value) for choice in self.choices]


def read_grid(name_or_path: str) -> Grid:
    """Read a shipped grid by name, or a grid file by path.

    Raises:
        UserError: no such file, not YAML, unknown or impossible keys, or a key given twice.
    """
    path, shown_as = locate(name_or_path, "grid", *GRIDS)
    draft = read_yaml(path, shown_as, "grid")
    keys = [info.alias or name for name, info in GridFile.model_fields.items()]
    for key in draft.values:
        if key not in keys:
            hint = did_you_mean(str(key), keys, cutoff=0.6) or f"; known: {', '.join(keys)}"
            raise UserError(f"grid {shown_as}: unknown key '{key}'{hint}")
    try:
        content = GridFile.model_validate(draft.values)
    except ValidationError as error:
        raise UserError(f"grid {shown_as}: {validation_sentence(error, draft)}") from None
    grid = Grid(shown_as, content, draft.origins, path)
    _check_keys(grid)
    return grid


def _check_keys(grid: Grid) -> None:
    """Refuse keys that are not `section.key` or are given in two places, and impossible names."""
    content = grid.content
    names = [entry["name"] for entry in content.entries or [] if "name" in entry]
    for number, name in enumerate(names):
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_+=][A-Za-z0-9._+=-]*", name):
            raise UserError(
                f"grid {grid.source}: {name!r} is not a name for an entry of `list`; "
                "use letters, digits and ._+=-"
            )
        if name.casefold() in (other.casefold() for other in names[:number]):
            raise UserError(
                f"grid {grid.source}: two entries of `list` are called '{name}'; rename one"
            )
    listed = {key: None for entry in content.entries or [] for key in entry if key != "name"}
    seeds = ["run.seed"] if content.seeds is not None else []
    places = {"set": content.fixed, "list": listed, "grid": content.grid, "seeds": seeds}
    for section, keys in places.items():
        for key in keys:
            if key.count(".") < 1 or not all(key.split(".")):
                raise UserError(
                    f"grid {grid.source}: '{key}' in `{section}` is not of the form section.key, "
                    "such as attention.variant"
                )
            if key in OWN_KEYS:
                raise UserError(f"grid {grid.source}: '{key}' in `{section}`: {OWN_KEYS[key]}")
    for (first, keys), (second, other_keys) in itertools.combinations(places.items(), 2):
        for key, other in itertools.product(keys, other_keys):
            if (first, second) != ("set", "list") and _overlap(key, other):
                raise UserError(
                    f"grid {grid.source}: '{other}' is given in `{first}` and in `{second}`; "
                    "give it once"
                )


def _overlap(key: str, other: str) -> bool:
    """Return whether two keys are equal, or one is inside the other (deepspeed.overrides.x)."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


def expand(grid: Grid, overrides: Sequence[tuple[str, Any]] = ()) -> list[GridRun]:
    """Return the runs of a grid: by seed, then by entry of the list, then by combination.

    Args:
        overrides: (key, value) from the command line; they win over `set`.

    Raises:
        UserError: an override is of a key that varies or that is the sweep's own, or two runs would
            have the same name and values.
    """
    content = grid.content
    varied = list(_varied(grid))
    keys = {choice.key for choices, _ in varied for choice in choices}
    for key, _ in overrides:
        if clash := next((other for other in sorted(keys) if _overlap(key, other)), None):
            raise UserError(
                f"override '{key}': grid {grid.source} varies {clash}; change the grid file"
            )
        if key == "run.name":
            raise UserError(f"override '{key}': {OWN_KEYS[key]}")
    fixed = [Choice("run.directory", str(content.directory), _origin(grid, "directory"))]
    fixed += [Choice(key, value, _origin(grid, "set", key)) for key, value in content.fixed.items()]
    fixed += [Choice(key, value, OVERRIDE) for key, value in overrides]
    placed_at = {choice.key: choice.value for choice in fixed}["run.directory"]
    # What is no path at all is refused with the rest of its configuration.
    directory = expand_home(placed_at) if isinstance(placed_at, str) else content.directory
    names = run_names([values for _, values in varied], grid.source)
    named_runs = list(zip(names, varied, strict=True))
    trunks = {
        values.beside(values.label): str(directory / name)
        for name, (_, values) in named_runs
        if values.label
    }

    labels = sorted({values.label for _, (_, values) in named_runs if values.label})

    def placed(choice: Choice, values: NamedValues) -> Choice:
        if choice.key != _TRUNK or not isinstance(choice.value, str):
            return choice
        trunk = trunks.get(values.beside(choice.value))
        if trunk is not None:
            return replace(choice, value=trunk)
        if "/" not in choice.value and not Path(choice.value).is_dir():
            raise UserError(
                f"{choice.origin}: {_TRUNK}={choice.value} is neither an entry of `list` nor a "
                f"run directory{did_you_mean(choice.value, labels)}"
            )
        return choice

    runs = []
    for name, (choices, values) in named_runs:
        run_choices = [placed(choice, values) for choice in (*fixed, *choices)]
        runs.append(GridRun(name, (Choice("run.name", name, grid.source), *run_choices)))
    return runs


def select(runs: Sequence[GridRun], patterns: Sequence[str], source: str) -> list[GridRun]:
    """Return the runs whose name fits a pattern, in order.

    Args:
        runs: Runs of a grid.
        patterns: Patterns of the shell; without any, all runs are returned.
        source: Name of the grid, for messages.

    Raises:
        UserError: no run's name fits a pattern.
    """
    names = [run.name for run in runs]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            close = difflib.get_close_matches(pattern, names, n=3)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            hint = f"they are {', '.join(names[:3])}{more}"
            if close:
                hint = f"close to it: {', '.join(close)}"
            raise UserError(
                f"grid {source}: --only '{pattern}' is the name of none of its runs; {hint}"
            )
    chosen = {name for pattern in patterns for name in fnmatch.filter(names, pattern)}
    return [run for run in runs if not patterns or run.name in chosen]


def _varied(grid: Grid) -> Iterator[tuple[list[Choice], NamedValues]]:
    """Yield for every run, in order, the values that vary, and the values it is named by.

    The last key of `grid` varies fastest.
    """
    content = grid.content
    seeds: list[int | None] = [*content.seeds] if content.seeds else [None]
    combinations = list(itertools.product(*content.grid.values()))
    for seed, entry, values in itertools.product(seeds, content.entries or [{}], combinations):
        choices = [
            Choice(key, value, _origin(grid, "list"))
            for key, value in entry.items()
            if key != "name"
        ]
        labelled = len(choices)
        pairs = zip(content.grid, values, strict=True)
        choices += [Choice(key, value, _origin(grid, "grid", key)) for key, value in pairs]
        if seed is not None:
            choices.append(Choice("run.seed", seed, _origin(grid, "seeds")))
        name_values = tuple((choice.key, choice.value) for choice in choices)
        yield choices, NamedValues(name_values, entry.get("name"), labelled)


def _origin(grid: Grid, *path: str) -> str:
    return grid.lines.get(path, grid.source)
