"""Model of a finished run for evaluation: on one process, whatever layout trained it.

    with one_process() as context:
        trained = load_trained_model(Path("runs/orthogonal"), context)

The proof that nothing went wrong on the way is the run's own last validation loss, which the loaded
model must reproduce.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from megatron.core.models.gpt import GPTModel

from laboratory.runs.finished import FinishedRun, read_finished_run
from pretrain.config.tree import Config
from pretrain.data.open import RunData, open_data
from pretrain.errors import UserError
from pretrain.export.trained_run import load_model, open_trained_run
from pretrain.model.build import token_losses
from pretrain.ranks.groups import ParallelContext
from pretrain.runs.directory import RunDirectory
from pretrain.runs.tags import VALIDATION_LOSS
from pretrain.telemetry.metrics import validation_metrics
from pretrain.training.validation import held_out_losses

LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 5e-3}
"""Largest relative difference of the loaded model's validation loss from the run's own: rounding,
no more."""


@dataclass(frozen=True)
class TrainedModel:
    """Finished run with its model and data.

    Attributes:
        model: Model in evaluation mode, in the run's compute dtype.
        validation_loss: nats per prediction, of the loaded model; the run's own up to rounding.
    """

    run: FinishedRun
    config: Config
    model: GPTModel
    data: RunData
    validation_loss: float


@torch.no_grad()
def losses_of(model: GPTModel, data: RunData, blocks: np.ndarray) -> torch.Tensor:
    """Return the loss of every prediction in nats, `[samples, length]` float64 on the CPU.

    Args:
        model: The model, in evaluation mode.
        data: The run's data.
        blocks: Ids `[samples, length + 1]`.
    """
    tokens = torch.from_numpy(blocks).to(next(model.parameters()).device)
    return token_losses(model, tokens, data.boundary).double().cpu()


def load_trained_model(path: Path, context: ParallelContext) -> TrainedModel:
    """Load the model of a finished run, and open its data.

    Args:
        path: Directory of the run.
        context: Process groups of the one process.

    Raises:
        UserError: the run is not finished; its checkpoint is damaged or not of its config; the
            frozen bank or the data is not the one it was trained with; the loaded model does not
            reproduce the run's validation loss.
        DataError: the shards that config.yaml names are missing.
    """
    run = read_finished_run(path)
    trained = open_trained_run(path)
    config = trained.config
    files = RunDirectory(path)
    # Held-out text of other shards may have been trained on.
    if trained.blend.fingerprint != run.data_fingerprint:
        raise UserError(
            f"the shards that {files.config} names are not those the run was trained on (data "
            f"fingerprint {trained.blend.fingerprint[:12]}, in {files.data.name} "
            f"{run.data_fingerprint[:12]}); restore them"
        )
    data = open_data(config.data, trained.blend, seed=config.data_seed)
    model = load_model(trained, context)
    loss = validation_metrics(held_out_losses(model, data, config.data.micro_batch_size, context))[
        VALIDATION_LOSS.tag
    ]
    logged = run.result.validation_loss
    if logged is None or not abs(loss / logged - 1) <= LOSS_TOLERANCE[config.precision.dtype]:
        raise UserError(
            f"the model loaded from {trained.checkpoint} has validation loss {loss:.6f} but run "
            f"'{run.name}' logged {logged}: the weights are not those of that step; restore the "
            "run's directory"
        )
    return TrainedModel(run=run, config=config, model=model.eval(), data=data, validation_loss=loss)
