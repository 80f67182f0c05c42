"""Finished run directories in the form that `train` leaves them, with chosen numbers, for tests of `compare`.

tests/distributed/test_training.py checks that a real run's files have the same form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from pretrain.config.load import parse_config

BATCH, LENGTH = 16, 128
STEPS = 100
CONFIG: dict[str, dict[str, Any]] = {
    "run": {"name": "vanilla", "directory": "runs", "seed": 1},
    "model": {
        "num_layers": 4,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "vocab_size": 4096,
        "position_embedding": "rope",
        "dropout": 0.0,
    },
    "attention": {"variant": "vanilla"},
    "optimizer": {"learning_rate": 1e-3},
    "schedule": {"steps": STEPS, "kind": "cosine", "warmup_steps": 5},
    "data": {
        "directory": "data/demo",
        "sequence_length": LENGTH,
        "micro_batch_size": 4,
        "global_batch_size": BATCH,
        "validate_every": 50,
        "validation_samples": 64,
    },
    "precision": {"dtype": "fp32"},
    "checkpoint": {"every": 50},
}
AUDIT_TOTALS = {  # vanilla at these sizes on TP 1 x DP 4, fp32, ZeRO-1
    "trainable_elements": 4 * 1_313_024,
    "trainable_bytes": 4 * 1_313_024 * 4,
    "frozen_elements": 0,
    "frozen_bytes": 0,
    "gradient_elements": 4 * 1_313_024,
    "gradient_bytes": 4 * 1_313_024 * 4,
    "optimizer_state_bytes": 1_313_024 * 12,
    "model_trainable_parameters": 1_313_024,
    "model_frozen_parameters": 0,
}
FROZEN_TOTALS = {  # the same with frozen W_Q and W_K
    "trainable_elements": 4 * 1_181_952,
    "trainable_bytes": 4 * 1_181_952 * 4,
    "frozen_elements": 4 * 131_072,
    "frozen_bytes": 4 * 131_072 * 4,
    "gradient_elements": 4 * 1_181_952,
    "gradient_bytes": 4 * 1_181_952 * 4,
    "optimizer_state_bytes": 1_181_952 * 12,
    "model_trainable_parameters": 1_181_952,
    "model_frozen_parameters": 131_072,
}


def write_run(
    root: Path,
    name: str,
    variant: str = "vanilla",
    *,
    seed: int = 1,
    loss: float | None = 4.0,
    sources: Mapping[str, float | None] | None = None,
    columns: Mapping[str, Sequence[float | None]] | None = None,
    changes: Mapping[str, Any] | None = None,
    checkpoint_bytes: int = 10_000,
) -> Path:
    """Write ROOT/NAME.

    Args:
        loss: validation loss; perplexities are its exponential (None: not finite).
        sources: {source: perplexity}.
        columns: {tag of metrics.jsonl: one value for each step}, in place of the plain ones.
        changes: {"FILE.KEY.KEY": value} for config, environment, data, audit, summary; keys may be new.
    """
    perplexity = None if loss is None else 2.718281828459045**loss
    sources = {"prose": perplexity, "topics": 70.0} if sources is None else dict(sources)
    files = _files(name, variant, seed, loss, perplexity, sources)
    for key, value in (changes or {}).items():
        *parents, last = key.split(".")
        place = files
        for parent in parents:
            place = place[parent]
        place[last] = value
    path = root / name
    _write_checkpoints(path / "checkpoints", checkpoint_bytes)
    (path / "config.yaml").write_text(yaml.safe_dump(files["config"], sort_keys=False))
    for stem in ("environment", "data", "audit", "summary"):
        (path / f"{stem}.json").write_text(json.dumps(files[stem], indent=1) + "\n")
    records = _records(files, {"loss/valid": [loss], "perplexity/valid": [perplexity]} | dict(columns or {}))
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (path / "state").write_text("finished\n")
    return path


def _files(
    name: str,
    variant: str,
    seed: int,
    loss: float | None,
    perplexity: float | None,
    sources: Mapping[str, Any],
) -> dict[str, Any]:
    tree = {section: dict(values) for section, values in CONFIG.items()}
    tree["run"].update(name=name, seed=seed)
    tree["attention"]["variant"] = variant
    config = parse_config(tree)
    totals = AUDIT_TOTALS if config.policy().trainable else FROZEN_TOTALS
    return {
        "config": config.resolved(),
        "environment": {
            "device": "cpu",
            "world_size": 4,
            "tensor_model_parallel_size": 1,
            "data_parallel_size": 4,
        },
        "data": {
            "directory": "data/demo",
            "fingerprint": "f" * 64,
            "sequence_length": LENGTH,
            "parts": [],
            "train_tokens": 400_000,
            "validation_tokens": {"prose": 6000, "topics": 2000},
            "unigram_perplexity": 200.0,
        },
        "audit": {"zero_stage": 1, "frozen_in_zero": 0, "totals": dict(totals), "ranks": []},
        "summary": {
            "step": STEPS,
            "tokens": STEPS * BATCH * LENGTH,
            "samples": STEPS * BATCH,
            "loss": 4.0,
            "validation": {"loss": loss, "perplexity": perplexity, "perplexity_by_source": dict(sources)},
        },
    }


def _records(files: Mapping[str, Any], columns: Mapping[str, Sequence[float | None]]) -> list[dict[str, Any]]:
    """One record for each step; a column shorter than that belongs to the last steps."""
    steps = files["summary"]["step"]
    tokens, samples = files["summary"]["tokens"] // steps, files["summary"]["samples"] // steps
    plain: dict[str, Sequence[float | None]] = {
        "loss/train": [8.0 - 4.0 * step / steps for step in range(1, steps + 1)],
        "optim/lr": [1e-3] * steps,
        "optim/grad_norm": [1.0] * steps,
        "stability/loss_variance": [0.01] * steps,
        "throughput/tokens_per_second": [1000.0] * steps,
        "throughput/tokens_per_second_per_gpu": [250.0] * steps,
        "throughput/model_tflops_per_gpu": [0.01] * steps,
        "time/step": [2.0] * steps,
        "time/data": [0.1] * steps,
        "time/forward_backward": [1.5] * steps,
        "time/optimizer": [0.4] * steps,
        "memory/trainable_parameters": [1_313_024] * steps,
        "memory/frozen_parameters": [0] * steps,
        "memory/gradients": [4 * 1_313_024 * 4] * steps,
        "memory/optimizer_state": [1_313_024 * 12] * steps,
        "memory/host_rss": [500_000_000] * steps,
    }
    records = []
    for step in range(1, steps + 1):
        record: dict[str, Any] = {"step": step, "tokens": step * tokens, "samples": step * samples}
        for tag, values in {**plain, **columns}.items():
            place = step - 1 - (steps - len(values))
            if place >= 0:
                record[tag] = values[place]
        records.append(record)
    return records


def _write_checkpoints(directory: Path, size: int) -> None:
    """The newest with `size` bytes and its marker, and an older one that must not be counted."""
    newest = directory / "step_00000100"
    (newest / "shard").mkdir(parents=True)
    (newest / "shard" / "weights.pt").write_bytes(bytes(size - 24))
    (newest / "COMPLETE").write_bytes(bytes(24))
    (directory / "latest").write_text("step_00000100\n")
    older = directory / "step_00000050"
    older.mkdir()
    (older / "weights.pt").write_bytes(bytes(99_999))
