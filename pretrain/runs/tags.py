"""Every metric of a run, declared once: tag, unit, records that have it, TensorBoard chart.

The tags are the keys of metrics.jsonl, in this order, and the names of TensorBoard's scalars. To
add a metric, declare it here and set its value in `telemetry.metrics`; its chart in TensorBoard,
its column in `compare`'s curves, the table in docs/metrics.md and the tests' lists of tags follow
from the declaration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


class When(Enum):
    """Conditions under which a record has a metric."""

    ALWAYS = "always"
    TERM_ADDED = "where the model adds one"
    VALIDATED = "after a validation"
    SAVED = "at a checkpoint"
    OBSERVED = "every `telemetry.attention_every` steps"
    WEIGHED = "every `telemetry.weights_every` steps"
    WRITTEN = "first after a checkpoint is written"
    PEAK_KNOWN = "where the peak is known"
    ON_CUDA = "on CUDA"


class Page(Enum):
    """TensorBoard's groups of charts."""

    QUALITY = "quality"
    THROUGHPUT = "throughput"
    MEMORY = "memory"
    INSIDE = "stability, attention and weights"


@dataclass(frozen=True)
class Metric:
    """A metric, or a family of metrics.

    Attributes:
        tag: Name of the metric; that of a family ends in `/`, followed by a member's own name.
        unit: "" for a pure number.
        chart: Title of the metric's chart in TensorBoard; None: no chart.
        measured: Whether the value is a clock or memory reading. Every other value is the same
            again when a run is repeated.
        member: Noun for the members of a family, such as "layer"; "" for a single metric.
    """

    tag: str
    unit: str
    meaning: str
    chart: str | None
    when: When = When.ALWAYS
    measured: bool = False
    member: str = ""

    @property
    def page(self) -> Page:
        """Return the group of its chart, by the first part of the tag."""
        return _PAGES.get(self.tag.partition("/")[0], Page.QUALITY)

    @property
    def charted(self) -> str:
        """Return the tag that charts show; for bytes, that of TensorBoard's copy in MiB."""
        return MEBIBYTES.format(self.tag) if self.unit == "bytes" else self.tag

    def of(self, name: str) -> str:
        """Return the tag of a family's member."""
        assert self.member, f"{self.tag} is not a family"
        return self.tag + name

    def members(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return {name: value} of a family's members in a record of metrics.jsonl."""
        assert self.member, f"{self.tag} is not a family"
        member_tags = [tag for tag in record if tag.startswith(self.tag) and metric_of(tag) is self]
        return {tag.removeprefix(self.tag): record[tag] for tag in member_tags}


_PAGES = {
    "throughput": Page.THROUGHPUT,
    "time": Page.THROUGHPUT,
    "memory": Page.MEMORY,
    "stability": Page.INSIDE,
    "attention": Page.INSIDE,
    "weights": Page.INSIDE,
}
_PARTS = "parts of a step, in seconds"


def _measured(tag: str, unit: str, meaning: str, chart: str, when: When = When.ALWAYS) -> Metric:
    return Metric(tag, unit, meaning, chart, when=when, measured=True)


LOSS = Metric(
    "loss/train",
    "nats per token",
    "language-model loss alone, mean over the step's predictions",
    "training loss",
)
AUXILIARY_LOSS = Metric(
    "loss/",
    "",
    "another term of the training loss, times its factor",
    None,
    when=When.TERM_ADDED,
    member="term",
)
VALIDATION_LOSS = Metric(
    "loss/valid",
    "nats per token",
    "mean over the held-out tokens of all sources",
    "validation loss",
    when=When.VALIDATED,
)
PERPLEXITY = Metric(
    "perplexity/valid",
    "",
    "exp of the validation loss",
    "validation perplexity, all sources",
    when=When.VALIDATED,
)
PERPLEXITY_OF_SOURCE = Metric(
    "perplexity/valid/",
    "",
    "the same for one source",
    "validation perplexity, by source",
    when=When.VALIDATED,
    member="source",
)
LEARNING_RATE = Metric("optim/lr", "", "the step's learning rate", "learning rate")
GRADIENT_NORM = Metric(
    "optim/grad_norm", "", "norm of the gradient before clipping", "gradient norm"
)
LOSS_VARIANCE = Metric(
    "stability/loss_variance",
    "nats²",
    "variance of the training loss over the last `telemetry.variance_window` steps",
    "loss variance",
)
SKIPPED_STEPS = Metric(
    "stability/skipped_steps",
    "steps",
    "updates left out so far: loss or gradient norm not finite, or a spike",
    "skipped steps",
)
ATTENTION_ENTROPY = Metric(
    "attention/entropy/",
    "nats",
    "entropy of a query's attention, mean over the queries and heads of a layer",
    "attention entropy, by layer",
    when=When.OBSERVED,
    member="layer",
)
ATTENTION_SCALE = Metric(
    "attention/score_scale/",
    "",
    "standard deviation of a query's scores, the same mean",
    "scale of attention scores, by layer",
    when=When.OBSERVED,
    member="layer",
)
LARGEST_SCORE = Metric(
    "attention/largest_score/",
    "",
    "largest score before the softmax in a layer; a synthesizer has none",
    "largest attention score, by layer",
    when=When.OBSERVED,
    member="layer",
)
WEIGHT_NORM = Metric(
    "weights/norm/",
    "",
    "norm of a weight, all layers together, after the update",
    "norms of weights",
    when=When.WEIGHED,
    member="weight",
)
UPDATE_NORM = Metric(
    "weights/update/",
    "",
    "norm of the change by the step's update",
    "norms of updates",
    when=When.WEIGHED,
    member="weight",
)
SPECTRAL_NORM = Metric(
    "weights/spectral_norm/",
    "",
    "largest singular value of a matrix of `telemetry.spectral_norms`, as stored",
    "spectral norms",
    when=When.WEIGHED,
    member="matrix",
)

TOKENS_PER_SECOND = _measured(
    "throughput/tokens_per_second",
    "tokens/s",
    "the step's tokens / its seconds",
    "tokens per second",
)
TOKENS_PER_SECOND_PER_GPU = _measured(
    "throughput/tokens_per_second_per_gpu",
    "tokens/s",
    "the same, divided by the number of processes",
    "tokens per second and GPU",
)
MODEL_TFLOPS_PER_GPU = _measured(
    "throughput/model_tflops_per_gpu",
    "TFLOP/s",
    "operations of the vanilla model of this shape, per second and process",
    "model TFLOP/s per GPU",
)
MFU = _measured(
    "throughput/mfu",
    "share of 1",
    "these operations / the device's peak",
    "utilisation: mfu and hfu",
    when=When.PEAK_KNOWN,
)
HFU = _measured(
    "throughput/hfu",
    "share of 1",
    "executed operations / the device's peak",
    "utilisation: mfu and hfu",
    when=When.PEAK_KNOWN,
)
STEP_SECONDS = _measured(
    "time/step",
    "s",
    "the step without validation and checkpoint",
    "seconds per step",
)
DATA_SECONDS = _measured("time/data", "s", "part of time/step: waiting for the batch", _PARTS)
FORWARD_BACKWARD_SECONDS = _measured(
    "time/forward_backward",
    "s",
    "part of time/step: forward and backward of all micro batches",
    _PARTS,
)
OPTIMIZER_SECONDS = _measured(
    "time/optimizer", "s", "part of time/step: clipping and update", _PARTS
)
CHECKPOINT_STALL_SECONDS = _measured(
    "time/checkpoint_stall",
    "s",
    "training's wait for the checkpoint before, and for copying",
    "seconds per checkpoint",
    when=When.SAVED,
)
CHECKPOINT_WRITE_SECONDS = _measured(
    "time/checkpoint_write",
    "s",
    "writing, hashing and syncing rank 0's part, in the background",
    "seconds per checkpoint",
    when=When.WRITTEN,
)
CHECKPOINT_SECONDS = _measured(
    "time/checkpoint",
    "s",
    "from the end of the step until rank 0's part was on the disk",
    "seconds per checkpoint",
    when=When.WRITTEN,
)

TRAINABLE_PARAMETERS = Metric(
    "memory/trainable_parameters",
    "parameters",
    "trainable parameters of the whole model",
    "parameters",
)
FROZEN_PARAMETERS = Metric(
    "memory/frozen_parameters", "parameters", "frozen parameters of the whole model", "parameters"
)
GRADIENT_BYTES = Metric(
    "memory/gradients",
    "bytes",
    "gradients in the live engine, sum over ranks",
    "MiB of gradients and optimizer state",
)
OPTIMIZER_STATE_BYTES = Metric(
    "memory/optimizer_state",
    "bytes",
    "optimizer state and master weights, likewise",
    "MiB of gradients and optimizer state",
)
DEVICE_BYTES = _measured(
    "memory/allocated_peak",
    "bytes",
    "rank 0's peak on its device since its start",
    "MiB in use",
    when=When.ON_CUDA,
)
HOST_BYTES = _measured(
    "memory/host_rss", "bytes", "resident memory of rank 0's process now", "MiB in use"
)

# Collected from the declarations above, in their order, so that no metric has to be named twice.
METRICS: tuple[Metric, ...] = tuple(
    value for value in tuple(globals().values()) if isinstance(value, Metric)
)
MEBIBYTES = "{}_MiB"
"""TensorBoard's tag for a metric in bytes; it would show bytes unscaled."""
SUMMARY = "summary/{}"
"""Tags of the numbers that only a finished run has, for TensorBoard's HPARAMS page
(`telemetry.hparams`)."""


def metric_of(tag: str) -> Metric:
    """Return the metric with a tag, or the family that the tag belongs to.

    Raises:
        KeyError: no metric has the tag.
    """
    single = [metric for metric in METRICS if not metric.member and metric.tag == tag]
    families = [metric for metric in METRICS if metric.member and tag.startswith(metric.tag)]
    for metric in (*single, *sorted(families, key=lambda family: -len(family.tag))):
        return metric
    raise KeyError(f"no metric '{tag}' is declared in pretrain.runs.tags")


def in_mebibytes(values: Mapping[str, float]) -> dict[str, float]:
    """Return {tag: MiB} of the metrics in bytes of a record."""
    sizes = [metric for metric in METRICS if metric.unit == "bytes" and metric.tag in values]
    return {metric.charted: values[metric.tag] / 2**20 for metric in sizes}
