"""TensorBoard event files, written so that a killed and resumed run reads back as one run.

torch's SummaryWriter queues events for a background thread and names its file by the second, so two
attempts within one second, or on hosts whose clocks differ, may be read in the wrong order and the
purge of the older one fails. Here the records go through TensorBoard's own record writer instead:
one event per step with all of its scalars (a step is there whole or not at all), handed to the
operating system at once, in a file whose name always sorts after the older ones. Summaries are
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
"""With the prompt's place in telemetry.sample_prompts, from 0."""


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

    It begins with a session start at resume_step + 1, at which TensorBoard discards what older
    files hold from that step on. The first attempt begins with one too: TensorBoard's slower loader
    takes the first session start it meets for no restart. With `resume_step` 0, a run from the
    beginning, older event files are removed.
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
            step: of the optimizer.
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
            step: of the optimizer.
            markdown: {tag: text}.
        """
        summary = Summary()
        for tag, content in markdown.items():
            (value,) = text(tag, content).value
            value.tag = tag  # without torch's own ending
            summary.value.append(value)
        self._write(Event(wall_time=time.time(), step=step, summary=summary))

    def write_hparams(
        self,
        step: int,
        values: Mapping[str, str | float | int | bool],
        metrics: Mapping[str, float],
        first: Collection[str] = (),
    ) -> None:
        """Write the hyperparameters and the names of the results, in this run's own directory.

        SummaryWriter.add_hparams would open a sub-directory, which TensorBoard shows as another
        run. The HPARAMS page reads each metric from the scalar of the same name.

        Args:
            step: the last one.
            values: {name: hyperparameter}.
            metrics: {tag: result}.
            first: names of the columns to show first.
        """
        plain = {
            key: str(own).lower() if isinstance(own, bool) else own for key, own in values.items()
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
    """Mark columns as differing between runs: TensorBoard shows these first."""
    (value,) = experiment.value
    content = plugin_data_pb2.HParamsPluginData.FromString(value.metadata.plugin_data.content)
    for info in content.experiment.hparam_infos:
        info.differs = info.name in names
    value.metadata.plugin_data.content = content.SerializeToString()


def _next_name(older: list[Path]) -> str:
    """Return a name after every older one: TensorBoard reads a run's files in order of names."""
    digits = [path.name.removeprefix(FILE_PREFIX).split(".")[0] for path in older]
    stamp = max([int(time.time()), *(int(own) + 1 for own in digits if own.isdigit())])
    return f"{FILE_PREFIX}{stamp:010d}.{socket.gethostname()}.{os.getpid()}.0"


def sample_pages(samples: Sequence[Sample]) -> dict[str, str]:
    """Return {tag: markdown} of a step's samples, for TensorBoard's page TEXT."""
    return {SAMPLE_TAG.format(number): markdown_of(sample) for number, sample in enumerate(samples)}


def markdown_of(sample: Sample) -> str:
    """Write the prompt and then the continuation as markdown in which a model's text stays text.

    Both are blocks of code by their indentation, which no text can end; a fence of backticks it
    could. Every line is indented, by whatever it ends: markdown takes a lone carriage return for an
    end too.
    """
    prompt, text = (
        "\n".join(f"    {shown(line)}" for line in part.splitlines())
        for part in (sample.prompt, sample.text)
    )
    tokens = f"{sample.tokens} {'token' if sample.tokens == 1 else 'tokens'}"
    end = ", then the end of the document" if sample.ended else ""
    return "\n\n".join(["**Prompt**", prompt, f"**Continuation**, {tokens}{end}", text])
