"""A run's record of its training so far, read from its files before a start rewrites them.

These files are the only record of what earlier starts trained with. A damaged file is refused, or
kept aside if `checkpoint.fall_back` is set; a missing file is reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, TypeAdapter
from typing_extensions import NotRequired, TypedDict

from data_pipeline.io.forms import Count
from pretrain.checkpoint.resuming import Start
from pretrain.config.keys import missing_settings
from pretrain.config.tree import Config
from pretrain.errors import UserError
from pretrain.runs.directory import DAMAGED_SUFFIX, RunDirectory, free_name
from pretrain.runs.facts import Segment, read_form


class _Phase(TypedDict):
    phase: Count


class _Audit(TypedDict):
    phases: NotRequired[list[_Phase]]


class _Environment(TypedDict):
    segments: NotRequired[list[Segment]]
    deepspeed_config_sha256: NotRequired[str | None]
    initial_weights_sha256: NotRequired[str | None]


def _with_all_settings(settings: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    missing = missing_settings(settings)
    if missing:
        raise ValueError(f"it has lost '{missing[0]}'")
    return settings


_FORMS: dict[str, TypeAdapter[Any]] = {
    "config": TypeAdapter(Annotated[dict[str, dict[str, Any]], AfterValidator(_with_all_settings)]),
    "environment": TypeAdapter(_Environment),
    "audit": TypeAdapter(_Audit),
}
_UNKNOWN = {
    "config": "which settings it had is not known",
    "environment": "what earlier starts have changed is not known",
    "audit": "what earlier phases trained is not known",
}


@dataclass(frozen=True)
class Earlier:
    """Record of a run's training up to the step where it starts now; empty at step 0.

    Attributes:
        settings: Content of config.yaml.
        environment: Content of environment.json.
        audit: Content of audit.json.
        lost: Names of the files that are missing or damaged.
        notes: Lines for the user.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    audit: Mapping[str, Any] = field(default_factory=dict)
    lost: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def read_earlier(config: Config, start: Start) -> Earlier:
    """Read the record of earlier steps from the files of the run, or of its trunk.

    Raises:
        UserError: a file is damaged, and checkpoint.fall_back is not set.
    """
    run = start.trunk or config.run_directory
    if not start.position.step:
        return Earlier()
    contents: dict[str, Any] = {}
    damaged: list[Path] = []
    notes: list[str] = []
    for path in _described(run):
        unknown = f"{_UNKNOWN[path.stem]} from before step {start.position.step + 1}"
        if not path.exists():
            notes.append(f"{path} is missing: {unknown}")
            continue
        try:
            contents[path.stem] = read_form(path, _FORMS[path.stem])
        except UserError as error:
            problem = str(error).rpartition("; ")[0]
            if start.trunk is not None or not config.checkpoint.fall_back:
                raise UserError(
                    f"{problem}; restore it, or set checkpoint.fall_back=true to keep it aside and "
                    "continue without it"
                ) from None
            damaged.append(path)
            notes.append(f"kept aside as {free_name(path, DAMAGED_SUFFIX).name}: {problem}")
            notes.append(unknown)
    # Only after every file was read: a refusal above must leave all of them in place.
    for path in damaged:
        path.rename(free_name(path, DAMAGED_SUFFIX))
    return Earlier(
        settings=contents.get("config", {}),
        environment=contents.get("environment", {}),
        audit=contents.get("audit", {}),
        lost=tuple(path.name for path in _described(run) if path.stem not in contents),
        notes=tuple(notes),
    )


def _described(run: RunDirectory) -> tuple[Path, ...]:
    return run.config, run.environment, run.audit
