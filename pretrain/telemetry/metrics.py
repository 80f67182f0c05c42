"""The values of a step's metrics, {tag: value}; `runs.tags` declares the tags."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import psutil
import torch

from pretrain.reporting.text import perplexity
from pretrain.runs import tags
from pretrain.telemetry.records import (
    AttentionScores,
    HeldOutLosses,
    RunFacts,
    SaveSeconds,
    StepRecord,
)


def step_metrics(
    record: StepRecord, facts: RunFacts, step_tokens: int, loss_variance: float
) -> dict[str, float]:
    """Return all metrics of a step except those of memory, which are read when it is written.

    Args:
        facts: Facts to compute speeds and sizes with.
        step_tokens: Tokens of the step, over all ranks.
        loss_variance: Result of `LossWindow.variance` for the step.
    """
    result, seconds = record.result, record.result.seconds
    metrics = {
        tags.LOSS.tag: result.loss,
        **{tags.AUXILIARY_LOSS.of(name): term for name, term in result.auxiliary.items()},
        **(validation_metrics(record.validation) if record.validation is not None else {}),
        tags.LEARNING_RATE.tag: result.learning_rate,
        tags.GRADIENT_NORM.tag: result.gradient_norm,
        tags.LOSS_VARIANCE.tag: loss_variance,
        tags.SKIPPED_STEPS.tag: record.position.skipped_steps,
        **attention_metrics(record.attention),
        **result.measured,
        **throughput_metrics(facts, step_tokens, seconds.step),
        tags.STEP_SECONDS.tag: seconds.step,
        tags.DATA_SECONDS.tag: seconds.data,
        tags.FORWARD_BACKWARD_SECONDS.tag: seconds.forward_backward,
        tags.OPTIMIZER_SECONDS.tag: seconds.optimizer,
    }
    if record.seconds_stall is not None:
        metrics[tags.CHECKPOINT_STALL_SECONDS.tag] = record.seconds_stall
    return metrics


def attention_metrics(layers: Sequence[AttentionScores]) -> dict[str, float]:
    """Return entropy, scale and largest score of each measured layer, numbered from 0."""
    metrics: dict[str, float] = {}
    for number, layer in enumerate(layers):
        name = f"{number:02d}"
        metrics[tags.ATTENTION_ENTROPY.of(name)] = layer.entropy
        metrics[tags.ATTENTION_SCALE.of(name)] = layer.scale
        if layer.largest is not None:
            metrics[tags.LARGEST_SCORE.of(name)] = layer.largest
    return metrics


def save_metrics(written: SaveSeconds | None) -> dict[str, float]:
    """Return the metrics of a written checkpoint; empty without one."""
    if written is None:
        return {}
    return {
        tags.CHECKPOINT_WRITE_SECONDS.tag: written.write,
        tags.CHECKPOINT_SECONDS.tag: written.total,
    }


def throughput_metrics(facts: RunFacts, step_tokens: int, seconds_step: float) -> dict[str, float]:
    """Return the speed of one step of `step_tokens` tokens on `world_size` devices.

        tokens_per_second         = step_tokens / seconds_step
        tokens_per_second_per_gpu = tokens_per_second / world_size  (of one process's device)
        model_tflops_per_gpu      = tokens_per_second_per_gpu * model_flops_per_token / 1e12
        mfu                       = tokens_per_second_per_gpu * model_flops_per_token / peak_flops
        hfu                       = the same with executed_flops_per_token

    `model_flops_per_token` counts the ordinary (vanilla) model of the same shape, whatever is
    frozen, so mfu compares variants by the work of an ordinary model. `executed_flops_per_token`
    counts the operations of this run: without weight gradients of frozen projections, with two
    small products where projections are structured, and with recomputed activations. Freezing
    therefore lets mfu exceed hfu. Without a known peak both are left out.

    Args:
        facts: Number of devices, FLOPs per token and peak FLOP/s.
        step_tokens: Tokens of the step, over all ranks.
        seconds_step: Seconds of the step.
    """
    per_second = step_tokens / seconds_step if seconds_step > 0 else math.nan
    per_gpu = per_second / facts.world_size
    metrics = {
        tags.TOKENS_PER_SECOND.tag: per_second,
        tags.TOKENS_PER_SECOND_PER_GPU.tag: per_gpu,
        tags.MODEL_TFLOPS_PER_GPU.tag: facts.model_flops_per_token * per_gpu / 1e12,
    }
    if facts.peak_flops_per_device is not None:
        metrics[tags.MFU.tag] = facts.model_flops_per_token * per_gpu / facts.peak_flops_per_device
        metrics[tags.HFU.tag] = (
            facts.executed_flops_per_token * per_gpu / facts.peak_flops_per_device
        )
    return metrics


def validation_metrics(validation: HeldOutLosses) -> dict[str, float]:
    """Return loss and perplexity over all sources, and the perplexity of each source with tokens.

    loss = (sum of all token losses) / (number of all tokens), perplexity = exp(loss), so each
    source is weighted by its tokens.
    """
    sums = {
        source: (loss, tokens)
        for source, (loss, tokens) in sorted(validation.items())
        if tokens > 0
    }
    if not sums:
        return {}
    mean = sum(loss for loss, _ in sums.values()) / sum(tokens for _, tokens in sums.values())
    metrics = {tags.VALIDATION_LOSS.tag: mean, tags.PERPLEXITY.tag: perplexity(mean)}
    for source, (loss, tokens) in sums.items():
        metrics[tags.PERPLEXITY_OF_SOURCE.of(source)] = perplexity(loss / tokens)
    return metrics


def memory_metrics(facts: RunFacts) -> dict[str, float]:
    """Return parameter counts and bytes; the device's peak only where torch runs on CUDA."""
    metrics: dict[str, float] = {
        tags.TRAINABLE_PARAMETERS.tag: facts.trainable_parameters,
        tags.FROZEN_PARAMETERS.tag: facts.frozen_parameters,
        tags.GRADIENT_BYTES.tag: facts.gradient_bytes,
        tags.OPTIMIZER_STATE_BYTES.tag: facts.optimizer_state_bytes,
    }
    if facts.device_name != "cpu":
        metrics[tags.DEVICE_BYTES.tag] = torch.cuda.max_memory_allocated()
    metrics[tags.HOST_BYTES.tag] = psutil.Process().memory_info().rss
    return metrics


class LossWindow:
    """The losses of the regular records (steps divisible by `every`) among the last `length` steps.

    The window is refilled from metrics.jsonl, so a resumed run continues with the variances of an
    uninterrupted one, even if a signal caused an extra record.
    """

    def __init__(self, length: int, every: int, records: Iterable[Mapping[str, Any]]) -> None:
        self._length = length
        self._every = every
        self._losses: deque[tuple[int, float]] = deque()
        for record in records:
            if record["step"] % every == 0:
                loss = record[tags.LOSS.tag]  # null: the loss was not finite
                self._losses.append((record["step"], math.nan if loss is None else float(loss)))

    def variance(self, step: int, loss: float) -> float:
        """Add the loss of a step and return the variance of the window.

        Args:
            loss: Training loss in nats per token.

        Returns:
            The population variance of the losses in (`step - length`, `step`]; NaN if one of them
            is not finite.
        """
        while self._losses and self._losses[0][0] <= step - self._length:
            self._losses.popleft()
        losses = [earlier for _, earlier in self._losses] + [loss]
        if step % self._every == 0:
            self._losses.append((step, loss))
        if not all(map(math.isfinite, losses)):
            return math.nan
        mean = math.fsum(losses) / len(losses)
        return math.fsum((value - mean) ** 2 for value in losses) / len(losses)
