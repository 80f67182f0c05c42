"""TensorBoard event files, written so that a killed and resumed run reads back as one run.

torch's SummaryWriter queues events for a background thread and names its file by the second. Two
attempts within one second, or on hosts whose clocks differ, may then be read in the wrong order,
and the purge of the older one fails. This file uses TensorBoard's record writer instead: it writes
one event per step with all of its scalars, so that a step is written whole or not at all, hands it
to the operating system at once, and names its file to sort after the older ones. Summaries are
built by torch.utils.tensorboard and TensorBoard's protocol buffers.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import plugin_data_pb2
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import custom_scalars, hparams, text

from data_pipeline.io.files import naming
from data_pipeline.io.words import shown, shown_in_line
from pretrain.runs.removal import remove_file
from pretrain.runs.tags import METRICS, Page
from pretrain.telemetry.records import Sample

FILE_PREFIX = "events.out.tfevents."
SAMPLE_TAG = "samples/{}"
"""Tag of a sample, with the prompt's index in telemetry.sample_prompts."""


def chart_layout() -> dict[str, dict[str, list[str]]]:
    """Return {page: {title of a chart: regular expressions of its tags}}.

    TensorBoard matches an expression from the start of the tag.
    """
    layout: dict[str, dict[str, list[str]]] = {page.value: {} for page in Page}
    for metric in METRICS:
        if metric.chart is not None:
            charts = layout[metric.page.value].setdefault(metric.chart, [])
            charts.append(metric.tag if metric.member else f"{metric.charted}$")
    return layout


class EventFile:
    """The event file of one attempt, in `directory`.

    The file begins with a session start at resume_step + 1, at which TensorBoard discards the
    events of older files from that step on. The first attempt begins with one as well, because
    TensorBoard's slower loader does not count the first session start as a restart. If
    `resume_step` is 0, older event files are removed.
    """

    def __init__(self, directory: Path, resume_step: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        older = list(directory.glob(FILE_PREFIX + "*"))
        if resume_step == 0:
            while older:
                remove_file(older.pop())
        self._path = directory / _next_name(older)
        self._file = self._path.open("xb")
        self._records = RecordWriter(self._file)
        started = time.time()
        start = SessionLog(status=SessionLog.START)
        charts = {
            page: {title: ["Multiline", tags] for title, tags in content.items()}
            for page, content in chart_layout().items()
        }
        self._write(
            Event(wall_time=started, file_version="brain.Event:2"),
            Event(wall_time=started, step=resume_step + 1, session_log=start),
            Event(wall_time=started, summary=custom_scalars(charts)),
        )

    def write_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write all scalars of a step as one event (float32, as TensorBoard keeps scalars).

        Args:
            values: {tag: value}.
        """
        summary = Summary(
            value=[
                Summary.Value(tag=shown_in_line(tag), simple_value=value)
                for tag, value in values.items()
            ]
        )
        self._write(Event(wall_time=time.time(), step=step, summary=summary))

    def write_texts(self, step: int, markdown: Mapping[str, str]) -> None:
        """Write texts for the page TEXT as one event.

        Args:
            markdown: {tag: text}.
        """
        summary = Summary()
        for tag, content in markdown.items():
            (value,) = text(tag, content).value
            value.tag = tag  # torch appends an ending of its own
            summary.value.append(value)
        self._write(Event(wall_time=time.time(), step=step, summary=summary))

    def write_hparams(
        self,
        step: int,
        values: Mapping[str, str | float | int | bool],
        metrics: Mapping[str, float],
        first: Collection[str] = (),
    ) -> None:
        """Write the hyperparameters and the names of the results into this run's directory.

        SummaryWriter.add_hparams would open a sub-directory, which TensorBoard shows as another
        run. The HPARAMS page reads each metric from the scalar of the same name.

        Args:
            step: Last step of the run.
            values: {name: hyperparameter}.
            metrics: {tag: result}.
            first: Names of the columns to show first.
        """
        plain = {
            key: str(value).lower() if isinstance(value, bool) else value
            for key, value in values.items()
        }
        experiment, start, end = hparams(plain, dict(metrics))
        _mark_as_differing(experiment, first)
        for summary in (experiment, start, end):
            self._write(Event(wall_time=time.time(), step=step, summary=summary))

    def sync(self) -> None:
        with naming(self._path):
            self._records.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self.sync()
        self._file.close()

    def _write(self, *events: Event) -> None:
        with naming(self._path):
            for event in events:
                self._records.write(event.SerializeToString())
            self._records.flush()


def _mark_as_differing(experiment: Summary, names: Collection[str]) -> None:
    """Mark columns as differing between runs, because TensorBoard shows such columns first."""
    (value,) = experiment.value
    content = plugin_data_pb2.HParamsPluginData.FromString(value.metadata.plugin_data.content)
    for info in content.experiment.hparam_infos:
        info.differs = info.name in names
    value.metadata.plugin_data.content = content.SerializeToString()


def _next_name(older: list[Path]) -> str:
    """Return a name that sorts after older ones, as TensorBoard reads files in order of names."""
    digits = [path.name.removeprefix(FILE_PREFIX).split(".")[0] for path in older]
    stamp = max([int(time.time()), *(int(part) + 1 for part in digits if part.isdigit())])
    return f"{FILE_PREFIX}{stamp:010d}.{socket.gethostname()}.{os.getpid()}.0"


def sample_pages(samples: Sequence[Sample]) -> dict[str, str]:
    """Return {tag: markdown} of a step's samples, for TensorBoard's page TEXT."""
    return {SAMPLE_TAG.format(number): markdown_of(sample) for number, sample in enumerate(samples)}


def markdown_of(sample: Sample) -> str:
    """Return the prompt and the continuation as markdown that shows a model's text verbatim.

    Both are blocks of code by indentation, which no text can end, as it could a fence of backticks.
    Every line is indented whatever its line ending, since markdown also breaks lines at a lone
    carriage return.
    """
    prompt, text = (
        "\n".join(f"    {shown(line)}" for line in part.splitlines())
        for part in (sample.prompt, sample.text)
    )
    tokens = f"{sample.tokens} {'token' if sample.tokens == 1 else 'tokens'}"
    end = ", then the end of the document" if sample.ended else ""
    return "\n\n".join(["**Prompt**", prompt, f"**Continuation**, {tokens}{end}", text])
