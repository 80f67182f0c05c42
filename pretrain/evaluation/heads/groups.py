"""Which runs are seeds of one another: the same settings but for the seeds; and a name for each group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from pretrain.compare.labels import settings_of
from pretrain.config.keys import KEYS
from pretrain.errors import UserError
from pretrain.runs.finished import FinishedRun

_NOT_THE_METHOD = frozenset(name for name, key in KEYS.items() if not key.method)


def group_names(runs: Sequence[FinishedRun]) -> list[str]:
    """For each run the name of its group: variant+adapters, and the settings in which such groups differ.

    Raises:
        UserError: a run is given twice, or two runs of a group have the same seed.
    """
    if len({run.path.resolve() for run in runs}) < len(runs):
        raise UserError("a run was given twice: give each run directory once")
    settings = [_settings(run) for run in runs]
    methods = ["+".join([run.variant, *(run.config["attention"].get("adapters") or ())]) for run in runs]
    names = []
    for method, own in zip(methods, settings, strict=True):
        namesakes = [other for other, name in zip(settings, methods, strict=True) if name == method]
        differing = sorted(key for key in own if any(other.get(key) != own[key] for other in namesakes))
        told = ", ".join(f"{key.partition('.')[2]}={own[key]}" for key in differing)
        names.append(f"{method} ({told})" if told else method)
    twice = [
        key
        for key, count in Counter((n, r.seed) for n, r in zip(names, runs, strict=True)).items()
        if count > 1
    ]
    if twice:
        raise UserError(
            f"two runs of {twice[0][0]} have the same run.seed={twice[0][1]}; leave one of them out"
        )
    return names


def _settings(run: FinishedRun) -> dict[str, Any]:
    return {key: value for key, value in settings_of(run).items() if key not in _NOT_THE_METHOD}
