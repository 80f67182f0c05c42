"""What the ranks of test_export.py do: train under a layout; export on one rank, and look at the files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from data_pipeline.errors import DataError
from megatron_patches.errors import MethodError
from pretrain.config.load import load_config
from pretrain.errors import UserError
from pretrain.export.export import export_run
from pretrain.ranks.alone import one_process
from pretrain.ranks.signals import StopSignals
from pretrain.training.loop import train


def train_all(payload: dict[str, Any]) -> list[str]:
    """Final state of every run."""
    return [train(load_config("demo", overrides), StopSignals()) for overrides in payload["runs"]]


def export_all(payload: dict[str, Any]) -> dict[str, Any]:
    """On one rank: train its runs, then {name: export.json, or the refusal} of every export."""
    states = train_all(payload)
    found: dict[str, Any] = {"states": states}
    with one_process() as context:
        for name, (run, options) in payload["exports"].items():
            try:
                found[name] = export_run(Path(run), Path(payload["out"]) / name, context, **options)
            except (UserError, DataError, MethodError) as error:
                found[name] = str(error)
    return found
