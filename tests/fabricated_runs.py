"""Finished run directories as `train` leaves them, with chosen numbers, for tests of `compare`.

tests/distributed/test_training.py checks that a real run's files have the same form.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from data_pipeline.shards.manifest import read_manifest
from laboratory.sweep.plan import PlannedRun
from pretrain.config.load import parse_config
from pretrain.runs import tags
from pretrain.runs.directory import FINISHED, MARKER, RunDirectory
from pretrain.runs.environment import git_commit
from pretrain.runs.seals import intact_seals
from pretrain.runs.tags import METRICS, Metric, When

BATCH, LENGTH = 16, 128
_YAML = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
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


def audit_totals(trainable: int, frozen: int) -> dict[str, int]:
    """Totals of the audit at TP 1 x DP 4, fp32, ZeRO-1."""
    return {
        "trainable_elements": 4 * trainable,
        "trainable_bytes": 4 * trainable * 4,
        "frozen_elements": 4 * frozen,
        "frozen_bytes": 4 * frozen * 4,
        "gradient_elements": 4 * trainable,
        "gradient_bytes": 4 * trainable * 4,
        "optimizer_state_bytes": trainable * 12,
        "model_trainable_parameters": trainable,
        "model_frozen_parameters": frozen,
    }


AUDIT_TOTALS = audit_totals(1_313_024, 0)
FROZEN_TOTALS = audit_totals(1_181_952, 131_072)
"""Of vanilla at these sizes, and with frozen W_Q and W_K."""


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
    contradiction: Mapping[str, Any] | None = None,
    checkpoint_bytes: int = 10_000,
) -> Path:
    """Write ROOT/NAME.

    Args:
        loss: validation loss; perplexities are its exponential (None: not finite).
        sources: {source: perplexity}.
        columns: {tag of metrics.jsonl: one value for each step}, in place of the plain ones.
        changes: {"FILE.KEY.KEY": value} for config, environment, data, audit, summary;
            keys may be new.
        contradiction: the same, and nothing else agrees with it.
    """
    perplexity = None if loss is None else 2.718281828459045**loss
    sources = {"prose": perplexity, "topics": 70.0} if sources is None else dict(sources)
    files = _files(name, variant, seed)
    validation = {"loss": loss, "perplexity": perplexity, "perplexity_by_source": sources}
    files["summary"]["validation"] = validation
    columns = dict(columns or {})
    if not any(key.startswith("summary.loss") for key in changes or {}):
        files["summary"]["loss"] = columns.get(tags.LOSS.tag, [4.0])[-1]
    _change(files, changes or {})
    last = {tags.VALIDATION_LOSS.tag: [loss], tags.PERPLEXITY.tag: [perplexity]}
    records = _records(files, last | columns)
    _change(files, contradiction or {})
    path = root / name
    run = RunDirectory(path)
    _write_checkpoints(run, checkpoint_bytes)
    run.config.write_text(yaml.dump(files["config"], Dumper=_YAML, sort_keys=False))
    for stem in ("environment", "data", "audit", "summary"):
        (path / f"{stem}.json").write_text(json.dumps(files[stem], indent=1) + "\n")
    run.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    run.write_state(FINISHED)
    return path


def _change(files: dict[str, Any], changes: Mapping[str, Any]) -> None:
    for key, value in changes.items():
        *parents, last = key.split(".")
        section = files
        for parent in parents:
            section = section[parent]
        section[last] = value


def write_planned_run(run: PlannedRun, shards: Path, loss: float) -> Path:
    """Leave a run of a plan as if trained on `shards` by this commit, in the far future."""
    started = {"started": "2099-01-01T00:00:00+0000", "seals": intact_seals(run.path.parent)}
    start = {"first_step": 1, "changes": {}, **started}
    facts = {"git_commit": git_commit(), **started, "segments": [start]}
    changes: dict[str, Any] = {f"environment.{key}": value for key, value in facts.items()}
    changes["data.fingerprint"] = read_manifest(shards).fingerprint
    steps = run.config.total_steps
    changes["summary.step"] = steps
    changes["summary.tokens"] = steps * run.config.tokens_per_step
    changes["summary.samples"] = steps * run.config.data.global_batch_size
    changes["config.optimizer.learning_rate"] = run.config.optimizer.learning_rate
    seed, variant = run.config.run.seed, run.config.attention.variant
    path = write_run(run.path.parent, run.name, variant, seed=seed, loss=loss, changes=changes)
    RunDirectory(path).config.write_text(run.config.to_yaml())
    return path


def _files(name: str, variant: str, seed: int) -> dict[str, Any]:
    tree = {section: dict(values) for section, values in CONFIG.items()}
    tree["run"].update(name=name, seed=seed)
    tree["attention"]["variant"] = variant
    config = parse_config(tree)
    totals = AUDIT_TOTALS if config.policy.trainable else FROZEN_TOTALS
    return {
        "config": config.as_dict(),
        "environment": {
            "device": "cpu",
            "cpu_kernels": "AVX2",
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
            "validation_bytes": {"prose": 24_000, "topics": 7000},
            "unigram_perplexity": 200.0,
        },
        "audit": {"zero_stage": 1, "frozen_in_zero": 0, "totals": dict(totals), "ranks": []},
        "summary": {
            "step": STEPS,
            "tokens": STEPS * BATCH * LENGTH,
            "samples": STEPS * BATCH,
            "loss": 4.0,
        },
    }


def _records(
    files: Mapping[str, Any], columns: Mapping[str, Sequence[float | None]]
) -> list[dict[str, Any]]:
    """One record for each step; a column shorter than that belongs to the last steps."""
    steps = files["summary"]["step"]
    tokens = files["summary"]["tokens"] // steps
    samples = files["summary"]["samples"] // steps
    totals = files["audit"]["totals"]
    chosen: dict[Metric, Sequence[float | None]] = {
        tags.LOSS: [8.0 - 4.0 * step / steps for step in range(1, steps + 1)],
        tags.LEARNING_RATE: [files["config"]["optimizer"]["learning_rate"]] * steps,
        tags.LOSS_VARIANCE: [0.01] * steps,
        tags.TOKENS_PER_SECOND: [1000.0] * steps,
        tags.TOKENS_PER_SECOND_PER_GPU: [250.0] * steps,
        tags.MODEL_TFLOPS_PER_GPU: [0.01] * steps,
        tags.STEP_SECONDS: [2.0] * steps,
        tags.DATA_SECONDS: [0.1] * steps,
        tags.FORWARD_BACKWARD_SECONDS: [1.5] * steps,
        tags.OPTIMIZER_SECONDS: [0.4] * steps,
        tags.TRAINABLE_PARAMETERS: [totals["model_trainable_parameters"]] * steps,
        tags.FROZEN_PARAMETERS: [totals["model_frozen_parameters"]] * steps,
        tags.GRADIENT_BYTES: [totals["gradient_bytes"]] * steps,
        tags.OPTIMIZER_STATE_BYTES: [totals["optimizer_state_bytes"]] * steps,
        tags.HOST_BYTES: [500_000_000] * steps,
    }
    always = [metric for metric in METRICS if metric.when is When.ALWAYS]
    plain = {metric.tag: chosen.get(metric, [1.0] * steps) for metric in always}
    records = []
    for step in range(1, steps + 1):
        record: dict[str, Any] = {"step": step, "tokens": step * tokens, "samples": step * samples}
        for tag, values in {**plain, **columns}.items():
            index = step - 1 - (steps - len(values))
            if index >= 0:
                record[tag] = values[index]
        records.append(record)
    return records


def _write_checkpoints(run: RunDirectory, size: int) -> None:
    """The newest with `size` bytes and its marker, and an older one that must not be counted."""
    newest = run.checkpoint(100)
    older = run.checkpoint(50)
    (newest / "shard").mkdir(parents=True)
    (newest / "shard" / "weights.pt").write_bytes(bytes(size - 24))
    (newest / MARKER).write_bytes(bytes(24))
    run.latest.write_text(newest.name + "\n")
    older.mkdir()
    (older / "weights.pt").write_bytes(bytes(99_999))


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a file of JSON in place."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
