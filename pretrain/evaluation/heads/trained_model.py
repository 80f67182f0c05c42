"""Model of a finished run for evaluation: on one process, whatever layout trained it.

    with one_process() as context:
        trained = load_trained_model(Path("runs/orthogonal"), context)

The model is built from the run's config.yaml without parallelism, its frozen bank regenerated and compared
with the digests in checkpoint.json, and its weights taken from the newest complete checkpoint. The proof that
nothing went wrong on the way is the run's own last validation loss, which the loaded model must reproduce.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron.core.models.gpt import GPTModel

from pretrain.checkpoint.bank_digests import bank_digests
from pretrain.checkpoint.format import read_about
from pretrain.checkpoint.identity import check_bank, run_identity
from pretrain.checkpoint.loading import load_weights
from pretrain.checkpoint.verify import verify
from pretrain.config.load import load_config
from pretrain.config.phases import phase_at
from pretrain.config.tree import Config
from pretrain.data.inputs import read_blend
from pretrain.data.open import RunData, open_data
from pretrain.errors import UserError
from pretrain.model.build import build_model
from pretrain.ranks.groups import ParallelContext
from pretrain.ranks.single_process import ONE_PROCESS
from pretrain.runs.directory import RunDirectory, step_of
from pretrain.runs.finished import FinishedRun, read_finished_run
from pretrain.runs.tags import VALIDATION_LOSS
from pretrain.telemetry.metrics import validation_metrics
from pretrain.training.held_out import held_out_losses

LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 5e-3}
"""Largest relative difference of the loaded model's validation loss from the run's own: rounding, no more."""


@dataclass(frozen=True)
class TrainedModel:
    """Finished run with its model and data.

    Attributes:
        config: the run's own, but for ONE_PROCESS.
        model: in evaluation mode, in the run's compute dtype.
        validation_loss: nats per prediction, of the loaded model; equal to the run's own up to rounding.
    """

    run: FinishedRun
    config: Config
    model: GPTModel
    data: RunData
    validation_loss: float


def load_trained_model(path: Path, context: ParallelContext) -> TrainedModel:
    """Load the model of the finished run in `path`, and open its data.

    Raises:
        UserError: `path` is no finished run; its checkpoint is damaged or not of its config; the frozen bank
            or the data is not the one it was trained with; the loaded model does not reproduce the run's
            validation loss.
        DataError: the shards that config.yaml names are not there.
    """
    run = read_finished_run(path)
    config = load_config(str(RunDirectory(path).config), ONE_PROCESS)
    data = _open_run_data(run, config)
    checkpoint = _newest_checkpoint(path)
    step = step_of(checkpoint)
    model = build_model(config, context, phase_at(config, step).number)
    live = run_identity(config, bank_digests(model, context), data.blend)
    check_bank(str(checkpoint), read_about(checkpoint).frozen_bank, live["frozen_bank"])
    load_weights(checkpoint, model)
    loss = validation_metrics(held_out_losses(model, data, config, context))[VALIDATION_LOSS.tag]
    model.eval()
    _check_loss(run, checkpoint, loss, LOSS_TOLERANCE[config.precision.dtype])
    return TrainedModel(run, config, model, data, loss)


def _open_run_data(run: FinishedRun, config: Config) -> RunData:
    blend = read_blend(config)
    if blend.fingerprint != run.data_fingerprint:
        files = RunDirectory(run.path)
        raise UserError(
            f"the shards that {files.config} names are not those the run was trained on (data fingerprint "
            f"{blend.fingerprint[:12]}, in {files.data.name} {run.data_fingerprint[:12]}); restore them"
        )
    return open_data(config, blend)


def _newest_checkpoint(path: Path) -> Path:
    newest = RunDirectory(path).newest_checkpoint()
    if newest is None:
        raise UserError(f"{path} has no complete checkpoint; resume the run to write one")
    verify(newest, by_hash=True)
    return newest


def _check_loss(run: FinishedRun, checkpoint: Path, loss: float, tolerance: float) -> None:
    logged = run.result.validation_loss
    if logged is None or not abs(loss / logged - 1) <= tolerance:
        raise UserError(
            f"the model loaded from {checkpoint} has validation loss {loss:.6f} but run '{run.name}' logged "
            f"{logged}: the weights are not those of that step; restore the run's directory"
        )
