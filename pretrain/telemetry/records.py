"""Records from the training loop for telemetry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pretrain.runs.position import Position

HeldOutLosses = Mapping[str, tuple[float, int]]
"""{source: (sum of the token losses in nats, number of predictions that count)}"""


@dataclass(frozen=True)
class StepSeconds:
    """Wall-clock seconds of this rank's training step: all of it, and its parts."""

    step: float
    data: float
    forward_backward: float
    optimizer: float


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step, equal on every rank except for the seconds.

    `loss` is the language-model loss alone, mean over the global batch in nats per token;
    `auxiliary` are the terms that were trained on besides. `gradient_norm` is that before clipping.

    Attributes:
        updated: the weights moved.
        measured: {tag: value} of what was measured around the update (`training.update`).
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
    """Seconds of rank 0's part of a checkpoint: to write it, and in all."""

    write: float
    total: float


@dataclass(frozen=True)
class Sample:
    """A prompt and the text that the model added, in so many tokens.

    Attributes:
        ended: the model then ended the document; else it was told to stop.
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
        seconds_stall: seconds in which the training waited for this step's checkpoint; None: no
            checkpoint.
        written: seconds of a checkpoint, of this step or an earlier one, whose writing has just
            ended.
        samples: of telemetry.sample_prompts, in their order, where there was a validation.
        attention: of each layer, where telemetry.attention_every asks for it.
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
    is None where the device's peak is not known. `device_name` is "cpu" or CUDA's name of the
    device.
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
