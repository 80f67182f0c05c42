"""Rank functions of tests/laboratory/evaluation/test_runs.py: load what any layout trained."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from laboratory.evaluation.heads.approximation import (
    Grid,
    Regressor,
    kernel_regression,
    run_grid,
)
from laboratory.evaluation.heads.trained_model import load_trained_model
from pretrain.config.tree import Config
from pretrain.errors import UserError
from pretrain.ranks.groups import ParallelContext
from pretrain.ranks.single_process import one_process
from pretrain.runs.directory import RunDirectory
from tests.distributed.workers.runs import train_all


def evaluate_all(payload: dict[str, Any]) -> dict[str, Any]:
    """On one rank: train its runs, load those and others, spoil copies, and regress."""
    states = train_all(payload)
    paths = [Path(path) for path in payload["load"]]
    tiny = Grid(("vanilla", "orthogonal"), (8, 16), (1,), seeds=1, steps=25, learning_rate=5e-3)
    with one_process() as context:
        losses = {}
        for path in paths:
            trained = load_trained_model(path, context)
            losses[path.name] = (trained.validation_loss, trained.run.result.validation_loss)
        moved = [_moved_by_order(tiny.config(name, 16, 1, 1), context) for name in tiny.variants]
        refusals = {
            name: _refusal(paths[0], Path(payload["spoilt"]) / name, spoil, context)
            for name, spoil in SPOILS.items()
        }
    trials = [[asdict(trial) for trial in run_grid(tiny)] for _ in range(2)]
    try:
        run_grid(replace(tiny, learning_rate=1e30, steps=3))
    except UserError as error:
        refusals["diverged"] = str(error)
    return {
        "states": states,
        "losses": losses,
        "refusals": refusals,
        "trials": trials,
        "moved_by_order": moved,
    }


def _moved_by_order(config: Config, context: ParallelContext) -> float:
    """By how much the last output moves where the inputs before it change places."""
    regressor = Regressor(config, context).eval()
    features = kernel_regression(7, sequences=2)[0].to(context.device)
    order = [*reversed(range(features.size(1) - 1)), features.size(1) - 1]
    with torch.no_grad():
        outputs = [regressor(inputs)[:, -1] for inputs in (features, features[:, order])]
    return float((outputs[1] - outputs[0]).abs().max())


def _another_bank(run: Path) -> None:
    file = RunDirectory(run).complete_checkpoints()[0] / "checkpoint.json"
    saved = json.loads(file.read_text())
    saved["frozen_bank"]["sha256"]["layer=1 role=key"] = "0" * 64
    text = json.dumps(saved, indent=1)
    file.write_text(text)
    _mark_again(file.parent)


def _other_weights(run: Path) -> None:
    """Every rank's slice of one weight turned round, with the hashes that belong to that."""
    checkpoint = RunDirectory(run).complete_checkpoints()[0]
    for file in checkpoint.glob("*.safetensors"):
        tensors = load_file(file)
        key = "master/embedding.word_embeddings.weight"
        tensors[key] = tensors[key].flip(0).contiguous()
        save_file(tensors, file)
    _mark_again(checkpoint)


def _mark_again(checkpoint: Path) -> None:
    files = {
        file.name: {
            "bytes": file.stat().st_size,
            "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        }
        for file in checkpoint.iterdir()
        if file.name not in ("COMPLETE", "PROVEN")
    }
    (checkpoint / "COMPLETE").write_text(json.dumps(files))


def _flipped_byte(run: Path) -> None:
    file = RunDirectory(run).complete_checkpoints()[0] / "rank_00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


def _other_shape(run: Path) -> None:
    config = run / "config.yaml"
    text = config.read_text()
    assert "ffn_hidden_size: 128" in text
    config.write_text(text.replace("ffn_hidden_size: 128", "ffn_hidden_size: 64"))


SPOILS = {
    "bank": _another_bank,
    "weights": _other_weights,
    "shape": _other_shape,
    "flipped": _flipped_byte,
}


def _refusal(run: Path, copy: Path, spoil: Any, context: ParallelContext) -> str:
    shutil.copytree(run, copy)
    spoil(copy)
    try:
        load_trained_model(copy, context)
    except UserError as error:
        return str(error)
    return "not refused"
