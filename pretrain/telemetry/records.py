"""Records from the training loop for telemetry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pretrain.runs.position import Position

HeldOutLosses = Mapping[str, tuple[float, int]]
"""{source: (sum of the token losses in nats, number of predictions that count)}"""


@dataclass(frozen=True)
class StepSeconds:
    """Wall-clock seconds of this rank's training step, and of its parts."""

    step: float
    data: float
    forward_backward: float
    optimizer: float


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step, equal on every rank except for the seconds.

    `loss` is the language-model loss alone, the mean over the global batch in nats per token;
    `auxiliary` holds the other terms of the training loss. `gradient_norm` is before clipping.

    Attributes:
        updated: Whether the weights moved.
        measured: {tag: value} measured around the update (`training.update`).
    """

    loss: float
    auxiliary: Mapping[str, float]
    gradient_norm: float
    learning_rate: float
    seconds: StepSeconds
    updated: bool = True
    measured: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SaveSeconds:
    """Seconds of rank 0's part of a checkpoint: for writing it, and in total."""

    write: float
    total: float


@dataclass(frozen=True)
class Sample:
    """A prompt, the text that the model added, and the number of tokens of that text.

    Attributes:
        ended: Whether the model ended the document; otherwise the number of tokens was reached.
    """

    prompt: str
    text: str
    tokens: int
    ended: bool


@dataclass(frozen=True)
class AttentionScores:
    """A layer's attention on one sample: means over queries and heads, and the largest score."""

    entropy: float
    scale: float
    largest: float | None


@dataclass(frozen=True)
class StepRecord:
    """A step's result, with the position after it, checkpoint, validation and samples.

    Attributes:
        seconds_stall: Seconds in which the training waited for this step's checkpoint; None: no
            checkpoint.
        written: Seconds of the checkpoint, of this step or an earlier one, whose writing has just
            ended.
        samples: Continuations of telemetry.sample_prompts, in their order, after a validation.
        attention: Scores of each layer, at the steps of telemetry.attention_every.
    """

    position: Position
    result: StepResult
    seconds_stall: float | None = None
    validation: HeldOutLosses | None = None
    written: SaveSeconds | None = None
    samples: tuple[Sample, ...] = ()
    attention: tuple[AttentionScores, ...] = ()


@dataclass(frozen=True)
class RunFacts:
    """Facts that stay the same through a run, or a phase of it (`Telemetry.change_facts`).

    FLOPs are per trained token, forward and backward, of the whole model; `peak_flops_per_device`
    is None if the device's peak is unknown. `device_name` is "cpu" or CUDA's name of the device.
    """

    world_size: int
    device_name: str
    model_flops_per_token: float
    executed_flops_per_token: float
    peak_flops_per_device: float | None
    trainable_parameters: int
    frozen_parameters: int
    gradient_bytes: int
    optimizer_state_bytes: int
