"""A step to be made again: its settings, the checkpoint to begin from, the start of the ranks.

The run is only read. Its steps are made in a directory of their own, whose checkpoint is a folder
of links.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import Field, FiniteFloat, TypeAdapter
from typing_extensions import NotRequired, TypedDict

from data_pipeline.io.files import write_json, write_text_atomically
from data_pipeline.io.forms import Count
from pretrain.checkpoint.branching import take_records
from pretrain.config.foreign import load_foreign
from pretrain.config.keys import KEYS
from pretrain.config.load import load_config
from pretrain.config.removed import present_key
from pretrain.config.sources import override_text
from pretrain.data.open import check_inputs
from pretrain.errors import UserError
from pretrain.ranks.launch import launch_local_ranks
from pretrain.ranks.signals import CONTINUE_LATER, STOP
from pretrain.runs.directory import GOOD, RunDirectory, step_of
from pretrain.runs.facts import read_facts, read_form
from pretrain.runs.metrics_file import read_metrics

LAYOUT = ("parallel.", "deepspeed.", "performance.", "data.micro_batch_size", "run.device")
"""Settings that may be overridden: they change how a step is computed, not what it is."""
MOST_THREADS = 1024
"""More CPU threads than that no rank has had."""
_OF_A_SEGMENT = {
    "parallel.tensor_model_parallel_size": "tensor_model_parallel_size",
    "parallel.sequence_parallel": "sequence_parallel",
    "data.micro_batch_size": "micro_batch_size",
}
"""{setting: key of a start in environment.json}: a later start may have had another layout."""


class _Document(TypedDict):
    """A document of the batch; None for what is not finite."""

    document: str
    samples: list[Count]
    loss: FiniteFloat | None
    tokens: Count
    share: FiniteFloat | None
    text: str


_Step = Annotated[list[FiniteFloat | None], Field(min_length=3, max_length=3)]


class _Answer(TypedDict):
    """Answer of `replay.__main__`; its documents and norms are of the step that was asked for."""

    begins_after: Count
    trace: Annotated[list[_Step], Field(min_length=1)]
    documents: NotRequired[list[_Document]]
    gradient_norms: NotRequired[dict[str, FiniteFloat | None]]


_ANSWER = TypeAdapter(_Answer)


@dataclass(frozen=True)
class Past:
    """A step of a run as its directory has it.

    Attributes:
        run: Directory of the run.
        step: Number of the step.
        settings: section.key=value that put back what later starts of the run have changed.
        segment: The start of the run that made the step, from environment.json.
        record: Record of the step in metrics.jsonl; {} where the step was not recorded.
        checkpoint: The nearest one before the step; None: the run's start, or its trunk.
    """

    run: RunDirectory
    step: int
    settings: tuple[str, ...]
    segment: Mapping[str, Any]
    record: Mapping[str, Any]
    checkpoint: Path | None


def look_up(path: Path, step: int, below_step: int | None = None) -> Past:
    """Find the settings, checkpoint and record to repeat a step of a run.

    Args:
        path: Run directory.
        step: Number of the step.
        below_step: Exclusive upper bound on the step of the checkpoint; None: `step`.

    Raises:
        UserError: there is no such run, or no such step of it; the run was given other settings
            after its nearest checkpoint.
    """
    run = RunDirectory(path)
    run.require_run()
    records = {r["step"]: r for r in read_metrics(run.metrics)} if run.metrics.is_file() else {}
    last = max(records, default=0)
    if not 1 <= step <= last:
        raise UserError(f"{path} has no step {step}: its records go from 1 to {last}")
    environment = read_facts(run.environment)
    segments = environment.get("segments") or [environment]
    if step < segments[0].get("first_step", 1):
        trunk = segments[0].get("branched_from", {}).get("run", "which its files do not name")
        raise UserError(
            f"{path} is a branch that begins later; replay step {step} of its trunk, {trunk}"
        )
    number = _segment_of(segments, step)
    below_step = below_step or step
    earlier = (folder for folder in run.complete_checkpoints() if step_of(folder) < below_step)
    checkpoint = next(earlier, None)
    since, changed = _settings_since(segments, number)
    if changed and since > 1 + (0 if checkpoint is None else step_of(checkpoint)):
        raise UserError(
            f"{path} changed {', '.join(changed)} at step {since} and has no complete checkpoint "
            f"from there, so step {step} cannot be repeated; restore {run.checkpoint(since - 1)}"
        )
    return Past(
        run=run,
        step=step,
        settings=_settings_then(run, segments[number], segments[number + 1 :]),
        segment=segments[number],
        record=records.get(step, {}),
        checkpoint=checkpoint,
    )


def first_own_step(path: Path, step: int = 1) -> int:
    """Return the first step of a run, not its trunk, that had the settings of `step`.

    Without changes in between it is 1, but for a branch.

    Args:
        path: Run directory.
        step: Step whose settings count; 1: the first ones.

    Raises:
        UserError: there is no such run.
    """
    run = RunDirectory(path)
    run.require_run()
    segments = read_facts(run.environment).get("segments") or [{}]
    return _settings_since(segments, _segment_of(segments, step))[0]


def _segment_of(segments: Sequence[Mapping[str, Any]], step: int) -> int:
    """Return the index of the start that made a step: the last start at or before it.

    Starts are in order of time. One that fell back begins before those that it replaces end.
    """
    begun = [n for n, segment in enumerate(segments) if segment.get("first_step", 1) <= step]
    return begun[-1] if begun else 0


def _settings_since(segments: Sequence[Mapping[str, Any]], number: int) -> tuple[int, list[str]]:
    """Return the first step with the settings of a start, and the settings that changed there."""
    since: int = segments[number].get("first_step", 1)
    for segment in reversed(segments[1 : number + 1]):
        since = min(since, segment["first_step"])
        changes = [key for key in map(present_key, segment.get("changes", {})) if key in KEYS]
        changed = [key for key in changes if KEYS[key].method or KEYS[key].trunk]
        if changed:
            return since, changed
    return min(since, segments[0].get("first_step", 1)), []


def _settings_then(
    run: RunDirectory, segment: Mapping[str, Any], later: Sequence[Mapping[str, Any]]
) -> tuple[str, ...]:
    """Return overrides that undo the changes of later starts of the run."""
    was: dict[str, Any] = {}
    for later_segment in reversed(later):  # so that the earliest change wins
        changes = {
            present_key(key): change for key, change in later_segment.get("changes", {}).items()
        }
        was |= {key: change["was"] for key, change in changes.items() if key in KEYS}
    was |= {key: segment[name] for key, name in _OF_A_SEGMENT.items() if name in segment}
    if "zero_stage" in segment and load_config(str(run.config)).deepspeed.config == "auto":
        was["deepspeed.config"] = f"zero{segment['zero_stage']}"  # what auto chose then
    return tuple(override_text(key, value) for key, value in was.items())


@contextmanager
def replayed(
    past: Past, overrides: Sequence[str] = (), ranks: int = 0, keep: Sequence[int] = ()
) -> Iterator[tuple[RunDirectory, dict[str, Any]]]:
    """Repeat a step on ranks of this machine.

    Args:
        past: The step.
        overrides: section.key=value of another layout.
        ranks: Number of ranks; 0: as many as the run had.
        keep: Steps up to this one after which the replay saves a checkpoint.

    Yields:
        The replay's directory, which lasts as long as the context, and the answer of
        `replay.__main__`.

    Raises:
        UserError: an override is not one of the layout, the replay is refused, or a rank failed.
        typer.Exit: a signal asked for an end.
    """
    for text in overrides:
        if not text.startswith(LAYOUT):
            raise UserError(
                f"'{text}' would change the step itself; override only {', '.join(LAYOUT)}"
            )
    # The order of reductions, and so the last bits, depends on the number of ranks.
    ranks = ranks or int(past.segment.get("world_size", 1))
    with tempfile.TemporaryDirectory(prefix="replay-") as temporary:
        directory = Path(temporary)
        resolved = directory / "resolved.yaml"
        run = _prepare(past, overrides, ranks=ranks, directory=directory, resolved=resolved)
        answer = directory / "answer.json"
        threads = past.segment.get("cpu_threads")
        if isinstance(threads, int) and 1 <= threads <= MOST_THREADS:
            # With other threads the same numbers are summed in another order.
            os.environ["OMP_NUM_THREADS"] = str(threads)
        words = (resolved, answer, past.step, *keep)
        command = [sys.executable, "-m", "laboratory.replay", *map(str, words)]
        code = launch_local_ranks(command, ranks)
        if code - 128 in STOP + CONTINUE_LATER:  # which the launcher has told
            raise typer.Exit(code)
        if code or not answer.is_file():
            raise UserError(
                f"the replay of {past.run.path} ended with exit code {code}; its words are above"
            )
        yield run, read_form(answer, _ANSWER)


def _prepare(
    past: Past, overrides: Sequence[str], *, ranks: int, directory: Path, resolved: Path
) -> RunDirectory:
    """Write the configuration of the step and a run directory to repeat it in."""
    config = load_foreign(past.run.config, [*past.settings, *overrides], directory)
    write_text_atomically(resolved, config.to_yaml())
    check_inputs(config, ranks)
    run = RunDirectory(config.run_path)
    if past.checkpoint is not None:
        linked = run.checkpoint(step_of(past.checkpoint))
        linked.mkdir(parents=True)
        for file in past.checkpoint.iterdir():
            if file.name != GOOD:
                (linked / file.name).symlink_to(file.resolve())
        (linked / GOOD).touch()  # a link would be followed, to wherever the run's own leads
        take_records(past.run, run, step_of(past.checkpoint))
        write_text_atomically(run.config, config.to_yaml())  # as of an earlier start
        for record in (run.environment, run.audit):
            write_json(record, {})
    return run
