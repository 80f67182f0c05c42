"""A trained run opened for reading: its checkpoint and its model, checked against each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel

from data_pipeline.shards.blend import Blend
from pretrain.checkpoint.format import read_about
from pretrain.checkpoint.identity import bank_digests, check_bank, phases_without_at
from pretrain.checkpoint.loading import StoredCheckpoint
from pretrain.checkpoint.verify import verify
from pretrain.config.foreign import load_foreign
from pretrain.config.tree import Config
from pretrain.data.open import read_blend
from pretrain.data.prompts import encode_prompts
from pretrain.errors import UserError
from pretrain.model.build import build_model
from pretrain.ranks.groups import ParallelContext
from pretrain.ranks.single_process import ONE_PROCESS, one_process
from pretrain.runs.directory import RunDirectory, step_of
from pretrain.runs.metrics_file import read_metrics
from pretrain.runs.tags import VALIDATION_LOSS
from pretrain.training.validation import continue_prompts


@dataclass(frozen=True)
class TrainedRun:
    """A run that has a checkpoint, finished or not.

    Attributes:
        checkpoint: Directory of the checkpoint.
        frozen_bank: Recipe and digests of the bank, as the checkpoint states them.
    """

    path: Path
    config: Config
    checkpoint: Path
    frozen_bank: Mapping[str, Any]
    blend: Blend

    @property
    def step(self) -> int:
        return step_of(self.checkpoint)

    @cached_property
    def record(self) -> dict[str, Any]:
        """Return this step's record in metrics.jsonl; empty if there is none."""
        metrics = RunDirectory(self.path).metrics
        if not metrics.is_file():
            return {}
        return next((record for record in read_metrics(metrics) if record["step"] == self.step), {})

    @property
    def validation_loss(self) -> float | None:
        """Return the validation loss of these weights, nats per token; None if not validated."""
        loss: float | None = self.record.get(VALIDATION_LOSS.tag)
        return loss


def open_trained_run(path: Path, step: int | None = None) -> TrainedRun:
    """Open a run at one of its checkpoints.

    Args:
        step: Step of the checkpoint; None: the newest one.

    Raises:
        UserError: the run or the complete checkpoint does not exist, the checkpoint is damaged, or
            config.yaml describes another model.
        DataError: the shards that config.yaml names are missing.
    """
    run = RunDirectory(path)
    run.require_run()
    checkpoint = run.find_checkpoint(step)
    verify(checkpoint, by_hash=True)
    about = read_about(checkpoint)
    config = load_foreign(run.config, ONE_PROCESS)
    _check_settings(checkpoint, about.keys, config)
    return TrainedRun(
        path=path,
        config=config,
        checkpoint=checkpoint,
        frozen_bank=about.frozen_bank,
        blend=read_blend(config.data),
    )


def load_model(run: TrainedRun, context: ParallelContext) -> GPTModel:
    """Load a run's model in evaluation mode and in its compute dtype, and check its frozen bank.

    Raises:
        UserError: the bank is not that of the training, or the weights are those of another model.
    """
    model = build_model(run.config, context, run.config.phase_at(run.step).number)
    StoredCheckpoint(run.checkpoint).give_weights(model)
    recipe = run.config.recipe
    live = {"recipe": recipe.as_dict() if recipe else None, "sha256": bank_digests(model, context)}
    check_bank(str(run.checkpoint), run.frozen_bank, live)
    return model.eval()


def _check_settings(checkpoint: Path, keys: Mapping[str, Any], config: Config) -> None:
    """Check that config.yaml describes the checkpoint's model, which weights show only in part."""
    resolved = config.as_dict()
    for key, was in keys.items():
        section, _, name = key.partition(".")
        # Initial weights matter no more once training began; a frozen bank has digests of its own.
        if section not in ("model", "attention") or name == "initial_weights":
            continue
        now = resolved[section].get(name, was)
        if name == "phases":  # extending a run changes the fractions `at`, not their steps
            was = phases_without_at(was)
            now = phases_without_at(now)
        if now != was:
            raise UserError(
                f"checkpoint {checkpoint} was written with {key}={was} but config.yaml has "
                f"{now}; restore the run's own config.yaml"
            )


TEMPERATURE = 0.8


def model_texts(
    runs: Sequence[Path], prompts: Sequence[str], tokens: int
) -> Mapping[Path, tuple[str, ...]]:
    """Return texts of several runs, sampled at TEMPERATURE with one seed.

    Characters that do not print become a middle dot, so that the text looks the same everywhere.

    Args:
        prompts: Beginnings of the texts.
        tokens: Number of tokens after each prompt.

    Returns:
        {run: text after each prompt}.

    Raises:
        UserError: as `open_trained_run`, `load_model` and `encode_prompts`.
        DataError: the shards of a run are missing.
    """
    texts = {}
    with one_process() as context:
        for path in runs:
            run = open_trained_run(path)
            prompts_by_option = [(f"--prompt {text!r}", text) for text in prompts]
            length = run.config.data.sequence_length
            encoded = encode_prompts(
                prompts_by_option, ("--sample-tokens", tokens), length, run.blend
            )
            draws = torch.Generator(context.device).manual_seed(0)

            def draw(logits: torch.Tensor, draws: torch.Generator = draws) -> torch.Tensor:
                return torch.multinomial(
                    torch.softmax(logits.double() / TEMPERATURE, -1), 1, generator=draws
                )[:, 0]

            boundary = run.blend.eod_id if run.config.data.reset_at_document_end else None
            model = load_model(run, context)
            samples = continue_prompts(
                model, encoded, run.config, boundary=boundary, context=context, draw=draw
            )
            texts[path] = tuple(_printable(sample.text) for sample in samples)
    return texts


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "·" for letter in text)
