"""Steps to log, and what a run directory then holds, for the tests of telemetry."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

from rich.console import Console
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pretrain.runs.directory import RunDirectory
from pretrain.runs.position import Position
from pretrain.runs.tags import HOST_BYTES, METRICS, PERPLEXITY_OF_SOURCE, When
from pretrain.telemetry.records import RunFacts, StepRecord, StepResult, StepSeconds
from pretrain.telemetry.telemetry import Telemetry


def tags_of(*occasions: When) -> set[str]:
    """Return the tags of the single metrics that a record has on these occasions."""
    return {metric.tag for metric in METRICS if metric.when in occasions and not metric.member}


ALWAYS = tags_of(When.ALWAYS)
WITH_PEAK = tags_of(When.PEAK_KNOWN)
WITH_VALIDATION = tags_of(When.VALIDATED) | {
    PERPLEXITY_OF_SOURCE.of(name) for name in ("prose", "topics")
}
WITH_CHECKPOINT = tags_of(When.SAVED)


def make_facts(peak: float | None = 1e12, device_name: str = "cpu") -> RunFacts:
    return RunFacts(
        world_size=4,
        device_name=device_name,
        model_flops_per_token=6e6,
        executed_flops_per_token=5e6,
        peak_flops_per_device=peak,
        trainable_parameters=900_000,
        frozen_parameters=100_000,
        gradient_bytes=3_600_000,
        optimizer_state_bytes=7_200_000,
    )


def make_record(
    step: int,
    loss: float | None = None,
    validated: bool = False,
    seconds_stall: float | None = None,
) -> StepRecord:
    """A record whose every number is a function of the step."""
    result = StepResult(
        loss=5 / math.sqrt(step) + 0.1 * math.sin(step) if loss is None else loss,
        auxiliary={},
        gradient_norm=1 + 0.01 * step,
        learning_rate=1e-3 / step,
        seconds=StepSeconds(
            step=0.5 + 0.001 * step, data=0.01, forward_backward=0.4, optimizer=0.09
        ),
    )
    return StepRecord(
        position=Position(step, 8 * step, 1024 * step),
        result=result,
        seconds_stall=seconds_stall,
        validation={"topics": (30.0, 10), "prose": (100.0, 40)} if validated else None,
    )


def open_telemetry(run_path: Path, **changes: Any) -> Telemetry:
    settings: dict[str, Any] = {
        "facts": make_facts(),
        "every": 1,
        "tensorboard": True,
        "variance_window": 5,
        "hparams": {
            "attention.variant": "orthogonal",
            "optimizer.learning_rate": 1e-3,
            "model.tied": True,
        },
        "total_steps": 20,
        "resume_step": 0,
        "console": Console(file=io.StringIO()),
    }
    settings.update(changes)
    return Telemetry(RunDirectory(run_path), settings.pop("facts"), **settings)


def recorded(run_path: Path, *steps: StepRecord, **changes: Any) -> list[dict[str, Any]]:
    """Log steps from the opening to the end; return the lines of metrics.jsonl."""
    telemetry = open_telemetry(run_path, **changes)
    for step in steps:
        telemetry.log(step)
    telemetry.close()
    return read_strictly(run_path)


def read_strictly(run_path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, refusing NaN and Infinity, which are not JSON."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    lines = (run_path / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def read_scalars(run_path: Path) -> dict[str, list[tuple[int, float]]]:
    """Every scalar TensorBoard shows, tag -> (step, value), the same by both Python loaders."""
    directory = str(run_path / "tensorboard")
    events = EventAccumulator(directory, size_guidance={"scalars": 0}).Reload()
    scalars = {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }
    server = plugin_event_accumulator.EventAccumulator(
        directory, tensor_size_guidance={"scalars": 0}
    ).Reload()
    for tag, steps in scalars.items():
        assert [event.step for event in server.Tensors(tag)] == [step for step, _ in steps]
    return scalars


def deterministic(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records without what the machine decides.

    Times and speeds are the test's own and stay.
    """
    return [
        {key: value for key, value in record.items() if key != HOST_BYTES.tag} for record in records
    ]
