"""What a run's files say of its training so far, read before a start writes them anew.

These files are the only record of what earlier starts trained with. One that is damaged is refused,
or kept aside where `checkpoint.fall_back` asks for that; one that is missing is told.
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
    """What is known of a run's training up to where it starts now; nothing, from step 0.

    Attributes:
        settings: content of config.yaml.
        environment: content of environment.json.
        audit: content of audit.json.
        lost: names of those of the three files that are missing or damaged.
        notes: lines for the user.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    audit: Mapping[str, Any] = field(default_factory=dict)
    lost: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def read_earlier(directory: RunDirectory, start: Start, fall_back: bool) -> Earlier:
    """Read what the run's files, or its trunk's, say of the steps before.

    Args:
        directory: of the run.
        start: where the run starts from.
        fall_back: keep a damaged file of the run aside, and continue without it.

    Raises:
        UserError: a file is damaged, and none is to be kept aside for that.
    """
    run = start.trunk or directory
    if not start.position.step:
        return Earlier()
    found: dict[str, Any] = {}
    damaged: list[Path] = []
    notes: list[str] = []
    for path in _described(run):
        unknown = f"{_UNKNOWN[path.stem]} from before step {start.position.step + 1}"
        if not path.exists():
            notes.append(f"{path} is missing: {unknown}")
            continue
        try:
            found[path.stem] = read_form(path, _FORMS[path.stem])
        except UserError as error:
            problem = str(error).rpartition("; ")[0]
            if start.trunk is not None or not fall_back:
                raise UserError(
                    f"{problem}; restore it, or set checkpoint.fall_back=true to keep it aside and "
                    "continue without it"
                ) from None
            damaged.append(path)
            notes.append(f"kept aside as {free_name(path, DAMAGED_SUFFIX).name}: {problem}")
            notes.append(unknown)
    for path in damaged:
        path.rename(free_name(path, DAMAGED_SUFFIX))
    return Earlier(
        settings=found.get("config", {}),
        environment=found.get("environment", {}),
        audit=found.get("audit", {}),
        lost=tuple(path.name for path in _described(run) if path.stem not in found),
        notes=tuple(notes),
    )


def _described(run: RunDirectory) -> tuple[Path, ...]:
    return run.config, run.environment, run.audit
