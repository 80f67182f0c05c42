"""A step to be made again: the settings it had, the checkpoint to begin from, and the start of the ranks.

The run is only read. Its steps are made in a directory of their own, whose checkpoint is a folder of links.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pretrain.checkpoint.branching import take_records
from pretrain.config.keys import KEYS
from pretrain.config.load import load_config
from pretrain.config.sources import override_text
from pretrain.config.tree import Config
from pretrain.data.open import check_inputs
from pretrain.errors import UserError
from pretrain.ranks.launch import launch_local_ranks
from pretrain.runs.directory import GOOD, RunDirectory, step_of, write_json, write_text_atomically
from pretrain.runs.facts import read_facts
from pretrain.runs.metrics_file import read_metrics

LAYOUT = ("parallel.", "deepspeed.", "performance.", "data.micro_batch_size", "run.device")
"""Settings that may be overridden: they change how a step is computed, and what it is only up to rounding."""
_OF_A_SEGMENT = {
    "parallel.tensor_model_parallel_size": "tensor_model_parallel_size",
    "parallel.sequence_parallel": "sequence_parallel",
    "data.micro_batch_size": "micro_batch_size",
}
"""{setting: key of a start in environment.json}: a later start may have had another layout."""
_QUIET = [
    *("telemetry.tensorboard=false", "telemetry.wandb=false", "telemetry.profile=null"),
    *("telemetry.sample_prompts=[]", "checkpoint.every=0", "checkpoint.keep_last=1000"),
    *("checkpoint.export_at_end=false", "checkpoint.fall_back=false"),
]


@dataclass(frozen=True)
class Past:
    """A step of a run as its directory has it.

    Attributes:
        settings: section.key=value that put back what later starts of the run have changed.
        segment: the start of the run that made the step, from environment.json.
        record: of the step in metrics.jsonl; {} where the step was not recorded.
        checkpoint: the nearest one before the step; None: the run's start, or its trunk.
    """

    run: RunDirectory
    step: int
    settings: tuple[str, ...]
    segment: Mapping[str, Any]
    record: Mapping[str, Any]
    checkpoint: Path | None

    @property
    def ranks(self) -> int:
        return int(self.segment.get("world_size", 1))


def look_up(path: Path, step: int, before: int | None = None) -> Past:
    """Find what is needed to make a step of a run again.

    `before`: the checkpoint to begin from is of a step before this one; None: before `step`. Raises
    UserError: there is no such run, or no such step of it.
    """
    run = RunDirectory(path)
    run.require_run()
    records = list(read_metrics(run.metrics)) if run.metrics.is_file() else []
    last = max((int(record["step"]) for record in records), default=0)
    if not 1 <= step <= last:
        raise UserError(f"{path} has no step {step}: its records go from 1 to {last}")
    environment = read_facts(run.environment)
    segments = environment.get("segments") or [environment]
    if step < segments[0].get("first_step", 1):
        trunk = segments[0].get("branched_from")
        raise UserError(
            f"{path} is a branch that begins later; replay step {step} of its trunk, {trunk}"
        )
    then = [own for own in segments if own.get("first_step", 1) <= step]
    later = [own.get("changes", {}).items() for own in reversed(segments[len(then) :])]
    was = {key: change["was"] for changes in later for key, change in changes if key in KEYS}
    was |= {key: then[-1][name] for key, name in _OF_A_SEGMENT.items() if name in then[-1]}
    if "zero_stage" in then[-1] and load_config(str(run.config)).deepspeed.config == "auto":
        was["deepspeed.config"] = f"zero{then[-1]['zero_stage']}"  # what auto chose then
    settings = tuple(override_text(key, value) for key, value in was.items())
    checkpoints = [own for own in run.complete_checkpoints() if step_of(own) < (before or step)]
    record = next((record for record in records if record["step"] == step), {})
    return Past(run, step, settings, then[-1], record, next(iter(checkpoints), None))


@contextmanager
def replayed(
    past: Past, overrides: Sequence[str] = (), ranks: int = 0, keep: Sequence[int] = ()
) -> Iterator[tuple[RunDirectory, dict[str, Any]]]:
    """Make the step again on ranks of this machine; the directory of the replay lasts as long as the context.

    `ranks`: 0: as many as the run had. `keep`: steps up to this one after which the replay saves a
    checkpoint. Returns the replay's directory, and what `replay.__main__` found out. Raises UserError: an
    override is not one of the layout, the replay is refused, or a rank failed.
    """
    for text in overrides:
        if not text.startswith(LAYOUT):
            raise UserError(
                f"'{text}' would change the step itself; override only {', '.join(LAYOUT)}"
            )
    ranks = ranks or past.ranks
    with tempfile.TemporaryDirectory(prefix="replay-") as place:
        config = _configure(past, overrides, Path(place))
        check_inputs(config, ranks)
        run = RunDirectory(config.run_path)
        if past.checkpoint is not None:
            linked = run.checkpoint(step_of(past.checkpoint))
            linked.mkdir(parents=True)
            for file in past.checkpoint.iterdir():
                (linked / file.name).symlink_to(file.resolve())
            (linked / GOOD).touch()  # else the replay would mark the run's own
            take_records(past.run, run, step_of(past.checkpoint))
        request, answer = Path(place, "request.json"), Path(place, "answer.json")
        write_json(
            request,
            {"config": str(Path(place, "resolved.yaml")), "step": past.step, "keep": [*keep]},
        )
        if threads := past.segment.get("cpu_threads"):
            os.environ["OMP_NUM_THREADS"] = str(threads)  # other sums of the same numbers otherwise
        command = [sys.executable, "-m", "pretrain.replay", str(request), str(answer)]
        code = launch_local_ranks(command, ranks)
        if code or not answer.is_file():
            raise UserError(
                f"the replay of {past.run.path} ended with exit code {code}; its words are above"
            )
        yield run, json.loads(answer.read_text())


def _configure(past: Past, overrides: Sequence[str], place: Path) -> Config:
    """Write and read the configuration that the step had, in a directory of the replay's own."""
    was = load_config(str(past.run.config), past.settings)
    values = yaml.safe_load(was.to_yaml())
    values["run"]["directory"] = str(place / "runs")
    values["data"]["cache_directory"] = str(was.sample_cache)
    write_text_atomically(place / "replay.yaml", yaml.safe_dump(values))
    config = load_config(str(place / "replay.yaml"), [*_QUIET, *overrides])
    write_text_atomically(place / "resolved.yaml", config.to_yaml())
    return config
