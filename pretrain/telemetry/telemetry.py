"""Telemetry of a run: records become metrics.jsonl, TensorBoard's scalars, console lines.

The loop hands one StepRecord per step to a Telemetry object, which exists on rank 0 only. Every
scalar has the same name and value in metrics.jsonl and in TensorBoard (x axis: steps). TensorBoard
also has a copy in MiB of the metrics in bytes; `runs.tags` declares them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from pretrain.runs.directory import RunDirectory
from pretrain.runs.metrics_file import MetricsFile, cut_back
from pretrain.runs.tags import HFU, MFU, SUMMARY, in_mebibytes
from pretrain.telemetry.console import StepDisplay
from pretrain.telemetry.event_file import EventFile, sample_pages
from pretrain.telemetry.hparams import FIRST, HParam, in_front
from pretrain.telemetry.metrics import LossWindow, memory_metrics, save_metrics, step_metrics
from pretrain.telemetry.records import RunFacts, SaveSeconds, StepRecord
from pretrain.telemetry.weights_and_biases import WandbRun


class Telemetry:
    """The writer of metrics.jsonl, tensorboard/ and console lines; on rank 0 only.

    With `wandb` the same scalars go to Weights & Biases.

    With `every` > 1 only every `every`-th step is written, and also the last step and each step
    with a validation, a checkpoint, measured attention or no update. A record always describes its
    own step, not a mean over the steps between. `variance_window` is in steps, see `LossWindow`.

    A run resumed at `resume_step` first drops all later records from both files; 0 drops all. With
    `summarised` its event files have the results already. To lose no step, call `log` for a step
    and then `sync` before its checkpoint is declared complete. The moment at which a checkpoint is
    written depends on speed, so it does not decide which steps have records: its seconds wait for
    the next record.
    """

    def __init__(
        self,
        run: RunDirectory,
        facts: RunFacts,
        *,
        every: int,
        tensorboard: bool,
        variance_window: int,
        hparams: Mapping[str, HParam],
        total_steps: int,
        resume_step: int = 0,
        summarised: bool = False,
        wandb: bool = False,
        console: Console | None = None,
        seconds_between_lines: float = 5.0,
    ) -> None:
        run.path.mkdir(parents=True, exist_ok=True)
        self._facts = facts
        self._every = every
        self._hparams = hparams
        self._total_steps = total_steps
        self._summarised = summarised
        records = cut_back(run.metrics, resume_step, keep=max(1, variance_window))
        self._metrics_file = MetricsFile(run.metrics)
        self._losses = LossWindow(variance_window, every, records)
        last = records[-1] if records else {"step": 0, "tokens": 0}
        self._last_step, self._last_tokens = last["step"], last["tokens"]
        self._event_file = EventFile(run.tensorboard, resume_step) if tensorboard else None
        self._display = StepDisplay(total_steps, resume_step, console, seconds_between_lines)
        self._written: SaveSeconds | None = None
        self._wandb = WandbRun(run.path, resume_step, hparams, self.say) if wandb else None
        self._closed = False
        self._say_what_is_missing(run.metrics, resume_step)

    def log(self, record: StepRecord) -> None:
        """Write the record of the next step, if it is due.

        Raises:
            ValueError: the step is not later than the last one.
        """
        position = record.position
        if position.step <= self._last_step:
            raise ValueError(f"step {position.step} was logged after step {self._last_step}")
        # A mean over the steps since the last record, which is exact while the loop logs each step.
        step_tokens = (position.consumed_tokens - self._last_tokens) // (
            position.step - self._last_step
        )
        self._last_step, self._last_tokens = position.step, position.consumed_tokens
        variance = self._losses.variance(position.step, record.result.loss)
        metrics = step_metrics(record, self._facts, step_tokens, variance)
        self._written = record.written or self._written
        if self._is_written(record):
            metrics |= save_metrics(self._written) | memory_metrics(self._facts)
            self._written = None
            self._metrics_file.append(position, metrics)
            if self._event_file is not None:
                self._event_file.write_scalars(position.step, metrics | in_mebibytes(metrics))
                if record.samples:
                    self._event_file.write_texts(position.step, sample_pages(record.samples))
            if self._wandb is not None:
                self._wandb.write_scalars(position.step, metrics)
        self._display.step(position.step, metrics)

    def change_facts(self, facts: RunFacts, why: str) -> None:
        """Use other facts from the next record on.

        Args:
            facts: Facts to compute speeds and sizes with.
            why: Line for the console.
        """
        self._facts = facts
        self.say(why)

    def say(self, message: str) -> None:
        """Print one line on the console, above the progress bar if there is one."""
        self._display.say(message)

    def sync(self) -> None:
        """Make all records so far durable."""
        self._metrics_file.sync()
        if self._event_file is not None:
            self._event_file.sync()

    def close(self, final: Mapping[str, float] | None = None, *, failed: bool = False) -> None:
        """Close the files and the progress bar; further calls do nothing.

        Args:
            final: Results of a finished run for TensorBoard's HPARAMS page. The page shows a tag's
                last scalar, so results that were not logged are written here.
            failed: Whether an error ends the run.
        """
        if self._closed:
            return
        self._closed = True
        self._display.close()
        if self._wandb is not None:
            self._wandb.close(failed=failed)
        if self._event_file is not None:
            if final is not None and not self._summarised:
                summary = {
                    tag: value for tag, value in final.items() if tag.startswith(SUMMARY.format(""))
                }
                self._event_file.write_scalars(self._last_step, summary)
                row = {**self._hparams, **in_front(final)}
                self._event_file.write_hparams(self._last_step, row, final, FIRST)
            self._event_file.close()
        self._metrics_file.close()

    def _is_written(self, record: StepRecord) -> bool:
        return (
            record.position.step % self._every == 0
            or record.position.step == self._total_steps
            or record.validation is not None
            or record.seconds_stall is not None
            or not record.result.updated
            or bool(record.attention)
            or bool(record.result.measured)
        )

    def _say_what_is_missing(self, metrics: Path, resume_step: int) -> None:
        if self._facts.peak_flops_per_device is None:
            self.say(
                f"telemetry: the peak FLOP/s of device '{self._facts.device_name}' is not known: "
                f"{MFU.tag} and {HFU.tag} are not logged"
            )
        if self._last_step < resume_step:
            self.say(
                f"telemetry: {metrics.name} ends at step {self._last_step} but the run resumes at "
                f"step {resume_step}: the steps between have no record"
            )
