"""Telemetry of a run: the only place that knows TensorBoard's tags, metrics.jsonl and the console.

The loop hands one StepRecord per step to a Telemetry object, which lives on rank 0 only. Every scalar has
the same name and value in metrics.jsonl and in TensorBoard (x axis: steps).

Tags, and when a record has them:

    loss/train, optim/lr, optim/grad_norm              always
    loss/<term>                                        a term that the model adds to the training loss
    stability/loss_variance                            always; see `Telemetry`
    loss/valid, perplexity/valid,
      perplexity/valid/<source>                        steps after which validation ran
    throughput/tokens_per_second[_per_gpu],
      throughput/model_tflops_per_gpu                  always
    throughput/mfu, throughput/hfu                     when the device's peak FLOP/s is known
    time/step, /data, /forward_backward, /optimizer    always; seconds
    time/checkpoint                                    steps after which a checkpoint was written; seconds
    memory/trainable_parameters, /frozen_parameters    always; numbers of parameters of the whole model
    memory/gradients, memory/optimizer_state           always; bytes, as given in RunFacts
    memory/allocated_peak                              on CUDA; bytes, this process, since its start
    memory/host_rss                                    always; bytes, this process, now
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
from rich.console import Console

from pretrain.runs.metrics_file import MetricsFile, cut_back
from pretrain.telemetry.console import ConsoleProgress
from pretrain.telemetry.event_file import EventFile
from pretrain.telemetry.hparams import FIRST


@dataclass(frozen=True)
class StepRecord:
    """What the loop measured in one optimizer step. Losses are means in nats per token; times are seconds.

    `seconds_step` is the training part alone: data, forward, backward and optimizer, without validation and
    checkpoint. `loss` is the language-model loss alone, `auxiliary` the terms that were trained on besides.
    `validation` maps each source to (sum of token losses, number of tokens).
    """

    step: int
    consumed_samples: int
    consumed_tokens: int
    loss: float
    learning_rate: float
    gradient_norm: float
    seconds_step: float
    seconds_data: float
    seconds_forward_backward: float
    seconds_optimizer: float
    seconds_checkpoint: float | None = None
    auxiliary: Mapping[str, float] = field(default_factory=dict)
    validation: Mapping[str, tuple[float, int]] | None = None


@dataclass(frozen=True)
class RunFacts:
    """What stays the same through a run, unless it changes what it trains (`Telemetry.change_facts`).

    FLOPs are per trained token, forward and backward, of the whole model; `peak_flops_per_device` is None
    where the device's peak is not known. `device_name` is "cpu" or CUDA's name of the device.
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


def throughput_metrics(facts: RunFacts, step_tokens: int, seconds_step: float) -> dict[str, float]:
    """Speed of one step of `step_tokens` tokens on `world_size` devices.

        tokens_per_second         = step_tokens / seconds_step
        tokens_per_second_per_gpu = tokens_per_second / world_size      (a "gpu" is one process's device)
        model_tflops_per_gpu      = tokens_per_second_per_gpu * model_flops_per_token / 1e12
        mfu                       = tokens_per_second_per_gpu * model_flops_per_token / peak_flops_per_device
        hfu                       = tokens_per_second_per_gpu * executed_flops_per_token / (the same)

    `model_flops_per_token` counts the ordinary (vanilla) model of the same shape, whatever is frozen, so
    mfu compares variants by the work an ordinary model would have needed. `executed_flops_per_token` counts
    what this run computes: no weight gradients of frozen projections, and recomputed activations if there
    are any. Freezing therefore lets mfu exceed hfu. Without a known peak both are left out.
    """
    per_second = step_tokens / seconds_step if seconds_step > 0 else math.nan
    per_gpu = per_second / facts.world_size
    metrics = {
        "throughput/tokens_per_second": per_second,
        "throughput/tokens_per_second_per_gpu": per_gpu,
        "throughput/model_tflops_per_gpu": facts.model_flops_per_token * per_gpu / 1e12,
    }
    if facts.peak_flops_per_device is not None:
        metrics["throughput/mfu"] = facts.model_flops_per_token * per_gpu / facts.peak_flops_per_device
        metrics["throughput/hfu"] = facts.executed_flops_per_token * per_gpu / facts.peak_flops_per_device
    return metrics


def validation_metrics(validation: Mapping[str, tuple[float, int]]) -> dict[str, float]:
    """Loss and perplexity over all sources and perplexity of each; empty sources are left out.

    loss = (sum of all token losses) / (number of all tokens), perplexity = exp(loss): a source weighs by
    its tokens.
    """
    sums = {source: (loss, tokens) for source, (loss, tokens) in sorted(validation.items()) if tokens > 0}
    if not sums:
        return {}
    mean = sum(loss for loss, _ in sums.values()) / sum(tokens for _, tokens in sums.values())
    metrics = {"loss/valid": mean, "perplexity/valid": perplexity(mean)}
    for source, (loss, tokens) in sums.items():
        metrics[f"perplexity/valid/{source}"] = perplexity(loss / tokens)
    return metrics


def perplexity(mean_loss: float) -> float:
    """exp(mean loss in nats per token); infinite where that overflows a float64."""
    try:
        return math.exp(mean_loss)
    except OverflowError:
        return math.inf


def memory_metrics(facts: RunFacts) -> dict[str, float]:
    """Parameter counts and bytes; `memory/allocated_peak` only where torch runs on CUDA."""
    metrics: dict[str, float] = {
        "memory/trainable_parameters": facts.trainable_parameters,
        "memory/frozen_parameters": facts.frozen_parameters,
        "memory/gradients": facts.gradient_bytes,
        "memory/optimizer_state": facts.optimizer_state_bytes,
    }
    if facts.device_name != "cpu":
        metrics["memory/allocated_peak"] = torch.cuda.max_memory_allocated()
    metrics["memory/host_rss"] = psutil.Process().memory_info().rss
    return metrics


class Telemetry:
    """Writes RUN/metrics.jsonl and RUN/tensorboard/ and reports on the console. Create it on rank 0 only.

    With `every` > 1 only every `every`-th step is written, and besides those each step with a validation or
    a checkpoint and the last one; a record always describes its own step, not a mean over the steps
    between.

    `stability/loss_variance` at step s is the population variance of the training losses of the regular
    records (steps divisible by `every`) among the last `variance_window` steps, s - variance_window < step
    <= s, and of s itself. It is thus a function of metrics.jsonl alone, and a resumed run, which refills
    the window from there, goes on with the same values as an uninterrupted one, even if a signal caused an
    extra record.

    A run resumed at `resume_step` first drops everything later from both; 0 means from the beginning and
    drops all. To lose no step, call `log` for a step and then `sync` before its checkpoint is declared
    complete; `seconds_checkpoint` is therefore the time up to then.
    """

    def __init__(
        self,
        run_path: Path,
        facts: RunFacts,
        *,
        every: int,
        tensorboard: bool,
        variance_window: int,
        hparams: Mapping[str, str | float | int | bool],
        total_steps: int,
        resume_step: int = 0,
        console: Console | None = None,
        seconds_between_lines: float = 5.0,
    ) -> None:
        run_path.mkdir(parents=True, exist_ok=True)
        self._facts = facts
        self._every = every
        self._variance_window = variance_window
        self._hparams = hparams
        self._total_steps = total_steps
        records = cut_back(run_path / "metrics.jsonl", resume_step, keep=max(1, variance_window))
        self._losses: deque[tuple[int, float]] = deque()
        for record in records:
            if record["step"] % every == 0:
                self._losses.append((record["step"], _number(record["loss/train"])))
        self._last_step = records[-1]["step"] if records else 0
        self._last_tokens = records[-1]["tokens"] if records else 0
        self._metrics_file = MetricsFile(run_path / "metrics.jsonl")
        self._event_file = EventFile(run_path / "tensorboard", resume_step) if tensorboard else None
        self._progress = ConsoleProgress(total_steps, resume_step, console, seconds_between_lines)
        self._closed = False
        self._say_what_is_missing(resume_step)

    def log(self, record: StepRecord) -> None:
        """Take the record of the next step. Raises ValueError unless the step is later than the last one."""
        if record.step <= self._last_step:
            raise ValueError(f"step {record.step} was logged after step {self._last_step}")
        # The mean over the steps since the last record: exact as long as the loop logs each step.
        step_tokens = (record.consumed_tokens - self._last_tokens) // (record.step - self._last_step)
        self._last_step, self._last_tokens = record.step, record.consumed_tokens
        validation = validation_metrics(record.validation) if record.validation is not None else {}
        metrics = {
            "loss/train": record.loss,
            **{f"loss/{name}": term for name, term in record.auxiliary.items()},
            **validation,
            "optim/lr": record.learning_rate,
            "optim/grad_norm": record.gradient_norm,
            "stability/loss_variance": self._loss_variance(record.step, record.loss),
            **throughput_metrics(self._facts, step_tokens, record.seconds_step),
            "time/step": record.seconds_step,
            "time/data": record.seconds_data,
            "time/forward_backward": record.seconds_forward_backward,
            "time/optimizer": record.seconds_optimizer,
        }
        if record.seconds_checkpoint is not None:
            metrics["time/checkpoint"] = record.seconds_checkpoint
        if self._is_written(record):
            metrics.update(memory_metrics(self._facts))
            self._metrics_file.append(record.step, record.consumed_tokens, record.consumed_samples, metrics)
            if self._event_file is not None:
                self._event_file.write_scalars(record.step, metrics)
        self._progress.step(record.step, metrics)
        if validation:
            self._progress.say(self._validation_line(record.step, validation))

    def change_facts(self, facts: RunFacts, why: str) -> None:
        """From the next record on, count with these facts; `why` goes to the console."""
        self._facts = facts
        self.say(why)

    def say(self, message: str) -> None:
        """One line on the console, above the progress bar where there is one."""
        self._progress.say(message)

    def sync(self) -> None:
        """Everything logged so far is on the disk when this returns."""
        self._metrics_file.sync()
        if self._event_file is not None:
            self._event_file.sync()

    def close(self, final: Mapping[str, float] | None = None) -> None:
        """Close the files and the progress bar; further calls do nothing.

        `final`, given when the run is finished, names the results for TensorBoard's HPARAMS page: tags that
        were logged (such as "perplexity/valid"), whose last scalars that page shows.
        """
        if self._closed:
            return
        self._closed = True
        self._progress.close()
        if self._event_file is not None:
            if final is not None:
                self._event_file.write_hparams(self._last_step, self._hparams, final, FIRST)
            self._event_file.close()
        self._metrics_file.close()

    def _is_written(self, record: StepRecord) -> bool:
        return (
            record.step % self._every == 0
            or record.step == self._total_steps
            or record.validation is not None
            or record.seconds_checkpoint is not None
        )

    def _loss_variance(self, step: int, loss: float) -> float:
        while self._losses and self._losses[0][0] <= step - self._variance_window:
            self._losses.popleft()
        losses = [earlier for _, earlier in self._losses] + [loss]
        if step % self._every == 0:
            self._losses.append((step, loss))
        if not all(map(math.isfinite, losses)):
            return math.nan
        mean = math.fsum(losses) / len(losses)
        return math.fsum((value - mean) ** 2 for value in losses) / len(losses)

    def _say_what_is_missing(self, resume_step: int) -> None:
        if self._facts.peak_flops_per_device is None:
            self.say(
                f"telemetry: the peak FLOP/s of device '{self._facts.device_name}' is not known: "
                "throughput/mfu and throughput/hfu are not logged"
            )
        if self._last_step < resume_step:
            self.say(
                f"telemetry: metrics.jsonl ends at step {self._last_step} but the run resumes at step "
                f"{resume_step}: the steps between have no record"
            )

    def _validation_line(self, step: int, metrics: Mapping[str, float]) -> str:
        prefix = "perplexity/valid/"
        sources = ", ".join(
            f"{tag.removeprefix(prefix)} {value:.2f}"
            for tag, value in metrics.items()
            if tag.startswith(prefix)
        )
        return (
            f"step {step}/{self._total_steps}  validation loss {metrics['loss/valid']:.4f}  "
            f"perplexity {metrics['perplexity/valid']:.2f}  ({sources})"
        )


def _number(value: float | None) -> float:
    """A value of metrics.jsonl, where null stands for one that was not finite."""
    return math.nan if value is None else float(value)
