"""The stages that train: whole runs by the program's own command."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.gpu.context import StageContext, StageError, StageResult
from data_pipeline.io.files import sha256_file

MAIN_VARIANTS = ("vanilla", "orthogonal", "synthesizer_random", "hybrid")
"""Trained weights, a frozen bank, scores without queries and keys, both kinds of heads."""
PARITY_STEPS = 20
SAME_LOSS = 2e-5
"""Largest difference of losses in nats; CPU and GPU add up in another order in fp32."""
PARITY_RATE = 3e-4
"""A tenth of the demo's. At its own rate single batches in the first 20 steps have gradients of
norm 100, and two threads of a CPU are then 0.07 nats from one; at this rate 1e-6.
"""


def shards(context: StageContext) -> StageResult:
    """Make the demo's corpus, tokenizer and shards offline, from the running Python's own text."""
    corpus, tokenizer = context.work / "corpus", context.work / "tokenizer"
    into = (f"--tokenizer={tokenizer}.model", f"--out={context.shards}", "--name=demo")
    verbs = (
        ["demo-corpus", corpus],
        ["train-tokenizer", corpus, f"--out={tokenizer}", "--vocab-size=4096"],
        ["tokenize", corpus, *into],
    )
    for words in verbs:
        context.run(words[0], [sys.executable, "-m", "data_pipeline", *map(str, words)])
    return StageResult({"manifest": _manifest(context)["fingerprint"]})


def parity(context: StageContext) -> StageResult:
    """Compare the first steps of four variants on CPU and GPU, in fp32 without TF32."""
    variants = MAIN_VARIANTS[1:2] if context.small else MAIN_VARIANTS
    steps = 5 if context.small else PARITY_STEPS
    sides = [(variant, device) for variant in variants for device in ("cpu", "auto")]

    def losses_or_error(side: tuple[str, str]) -> list[float] | str:
        variant, device = side
        name = f"parity-{variant}-{device}"
        settings = [
            f"attention.variant={variant}",
            f"run.device={device}",
            "performance.compile=none",
            f"optimizer.learning_rate={PARITY_RATE}",
        ]
        try:
            train(context, name, [*settings, f"schedule.steps={steps}"])
            return column(context, name, "loss/train")
        # As text, so that other variants still count.
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(context.at_once) as pool:
        curves = dict(zip(sides, pool.map(losses_or_error, sides), strict=True))
    values: dict[str, Any] = {}
    checks: dict[str, bool] = {}
    for variant in variants:
        cpu, gpu = curves[variant, "cpu"], curves[variant, "auto"]
        if isinstance(cpu, str) or isinstance(gpu, str):
            values[variant] = {"cpu": cpu, "gpu": gpu}
            checks[variant] = False
            continue
        apart = [abs(cpu_loss - gpu_loss) for cpu_loss, gpu_loss in zip(cpu, gpu, strict=True)]
        values[variant] = {
            "first": apart[0],
            "largest": max(apart),
            "last": apart[-1],
            "cpu": cpu,
            "gpu": gpu,
        }
        checks[variant] = max(apart) <= SAME_LOSS
    return StageResult(values, checks)


def resume(context: StageContext) -> StageResult:
    """Compare an undisturbed run with one that is killed after a checkpoint and resumed.

    Both with run.deterministic, dropout, and layers compiled as a run's are by default.
    """
    steps, every = (40, 8) if context.small else (240, 40)
    settings = [
        "run.deterministic=true",
        "model.dropout=0.1",
        "data.global_batch_size=8",
        f"schedule.steps={steps}",
        f"checkpoint.every={every}",
        *context.precision,
    ]
    with ThreadPoolExecutor(2) as pool:
        straight = pool.submit(train, context, "resume-straight", settings)
        killed_at = _kill_behind(context, "resume-killed", settings, 2 * every)
        straight.result()
    train(context, "resume-killed", settings, start="again")
    values: dict[str, Any] = {"killed_after_step": killed_at}
    checks = {}
    for tag in ("loss/train", "optim/grad_norm"):
        ours, theirs = (column(context, f"resume-{kind}", tag) for kind in ("killed", "straight"))
        values[f"{tag}: last"] = [ours[-1], theirs[-1]]
        values[f"{tag}: largest difference"] = max(
            abs(a - b) for a, b in zip(ours, theirs, strict=True)
        )
        checks[f"{tag} is the same in all {steps} steps"] = ours == theirs and len(ours) == steps
    digests = [_digests(context.runs / f"resume-{kind}", steps) for kind in ("killed", "straight")]
    checks["the last checkpoint is the same to the bit"] = digests[0] == digests[1] != {}
    checks["it was killed before its end"] = killed_at < steps
    return StageResult(values, checks)


def _kill_behind(context: StageContext, name: str, settings: Sequence[str], step: int) -> int:
    """Start a run, kill it once the checkpoint of `step` is complete, and return its last step."""
    done = context.runs / name / f"checkpoints/step_{step:08d}/COMPLETE"
    with context.started(name, training(context, name, settings)) as process:
        while not done.exists():
            # A run that ends before the checkpoint would make the loop wait until the deadline.
            if process.poll() is not None:
                ended = f"{name} ended with {process.poll()} before it was killed"
                raise StageError(f"{ended}:\n{context.tail(name)}")
            if context.seconds_left <= 0:
                raise StageError("the time of this stage was over")
            time.sleep(0.01)
    return int(records(context, name)[-1]["step"])


def train(context: StageContext, name: str, settings: Sequence[str], start: str = "") -> None:
    """Train to the end, with the output in a log of the run's name.

    Args:
        settings: Overrides of `training`.
        start: Ends the log's name, where a run is started more than once.

    Raises:
        StageError: the run failed or ran out of the stage's time.
    """
    context.run(f"{name}{start and f'-{start}'}", training(context, name, settings))


def training(context: StageContext, name: str, settings: Sequence[str]) -> list[str]:
    """Return the command of a run on one rank.

    Args:
        settings: Overrides of `demo`; the last of a key counts.
    """
    fixed = [
        f"run.name={name}",
        f"run.directory={context.runs}",
        f"data.directory={context.shards}",
        f"model.vocab_size={_manifest(context)['tokenizer']['vocab_size']}",
        "parallel.tensor_model_parallel_size=1",
        "data.validate_every=0",
        "data.validation_samples=16",
        "checkpoint.every=0",
        "schedule.warmup_steps=10",
        "telemetry.tensorboard=false",
    ]
    if context.small:
        fixed += ["model.num_layers=2", "model.hidden_size=32"]
        fixed += ["data.sequence_length=32", "schedule.warmup_steps=2"]
    # The later setting of a key wins, so that a stage overrides what is fixed above.
    last_given = dict(word.split("=", 1) for word in [*fixed, *settings])
    words = [f"{key}={value}" for key, value in last_given.items()]
    return [sys.executable, "-m", "pretrain", "train", "demo", *words]


def _manifest(context: StageContext) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((context.shards / "manifest.json").read_text())
    return manifest


def records(context: StageContext, name: str) -> list[dict[str, Any]]:
    """Return the records of a run by ascending step: whole lines only, the last of each step."""
    # The part after the last newline may be half a record of a killed run.
    lines = (context.runs / name / "metrics.jsonl").read_text().split("\n")[:-1]
    by_step = {entry["step"]: entry for entry in map(json.loads, filter(None, lines))}
    return [by_step[step] for step in sorted(by_step)]


def column(context: StageContext, name: str, tag: str) -> list[float]:
    """Return one quantity, step by step."""
    return [record[tag] for record in records(context, name) if tag in record]


def _digests(run: Path, step: int) -> dict[str, str]:
    files = (run / f"checkpoints/step_{step:08d}").glob("*.safetensors")
    return {file.name: sha256_file(file) for file in files}
