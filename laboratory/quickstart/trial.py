"""The steps of a trial: train-tokenizer, tokenize, verify, sweep, compare.

Each is a command that a user could give and redoes nothing that is finished, so a trial that was
stopped or killed resumes when it is started again.
"""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from laboratory.quickstart.arms import Arms, name_of
from laboratory.quickstart.sizes import BATCH, LENGTH, parameters
from pretrain.errors import UserError
from pretrain.ranks.output import outlive_output

if TYPE_CHECKING:
    from laboratory.sweep.running import SignalRelay

VOCAB_SIZE = "model.vocab_size"
CAUTION = (
    "one run of each variant decides nothing: README's findings say what more seeds and tokens "
    "have shown"
)
"""Sentence above the comparison."""
PROMPTS, PROMPT_TOKENS = 2, 12


@dataclass(frozen=True)
class Trial:
    """Request for a trial: options of its steps, and settings of all runs on top of `demo`."""

    texts: tuple[str, ...]
    name: str
    arms: Arms
    jobs: int
    local_ranks: int
    of_tokenizer: tuple[str, ...]
    of_shards: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)


def run_trial(trial: Trial, out: Path, what: str, training: bool = True) -> None:
    """Print the plan, then run the steps that are not finished.

    Args:
        out: Directory of everything.
        what: Line that says what will be done.
        training: Whether to train, or to stop before the runs.

    Raises:
        UserError: a package or a design is missing, or `out` holds another trial.
        typer.Exit: a step failed, which has said why, or was stopped.
    """
    import laboratory.study.packages  # noqa: F401
    from laboratory.sweep.running import SignalRelay
    from pretrain.config.sources import override_text

    grid = _grid(trial, out)
    sentence = _training_sentence(trial, grid)
    plan = _write_grid(grid, out)
    typer.echo(f"text: {what}\n{sentence}\nCtrl-C stops; the same command continues in {out}/")
    texts = trial.texts
    shards = str(out / "shards")
    prefix = out / "tokenizer"
    # A closed terminal must not end a trial that can go on.
    outlive_output()
    step = partial(_step, SignalRelay().install())
    if trial.name == "demo":
        step("text", "data_pipeline demo-corpus", *texts)
    tokenizer_options = (f"--out={prefix}", *trial.of_tokenizer)
    step(
        "1/4 tokenizer",
        "data_pipeline train-tokenizer",
        *texts,
        *tokenizer_options,
        remedy=f"another size is given by --set {VOCAB_SIZE}=N, with another --out",
    )
    into = (f"--tokenizer={prefix}.model", f"--out={shards}", f"--name={trial.name}", "--workers=2")
    step("2/4 tokens", "data_pipeline tokenize", *texts, *into, *trial.of_shards)
    step("", "data_pipeline verify", shards)
    if not training:
        return
    prompts = _prompts(out / "shards")
    spread = (f"--jobs={trial.jobs}", f"--local-ranks={trial.local_ranks}")
    samples = [override_text("telemetry.sample_prompts", prompts)] if trial.name == "demo" else []
    step("3/4 training", "pretrain sweep", str(plan), *samples, *spread)
    page = out / "comparison"
    runs = [str(out / "runs" / name) for name in trial.arms.names]
    against = ("--by=names", f"--baseline={trial.arms.baseline}", f"--out={page}")
    asked = [f"--prompt={text}" for text in prompts]
    step(f"4/4 comparison: {CAUTION}", "pretrain compare", *runs, *against, *asked)


def _grid(trial: Trial, out: Path) -> dict[str, Any]:
    """Return the sweep of a trial's runs; refuse a setting that a design has itself."""
    for entry in trial.arms.entries:
        for key in trial.settings.keys() & entry.keys():
            raise UserError(
                f"--set {key}: --design chooses it, or {name_of(entry)} has its own; leave it out"
            )
    settings = {"data.directory": str(out / "shards"), **trial.settings} if trial.settings else {}
    return {
        "base": "demo",
        "directory": str(out / "runs"),
        "set": settings,
        "list": list(trial.arms.entries),
    }


def _write_grid(grid: Mapping[str, Any], out: Path) -> Path:
    """Write OUT/sweep.yaml and return its path; refuse a file of another trial."""
    from data_pipeline.io.files import write_text_atomically
    from pretrain.config.sources import dump_yaml

    path = out / "sweep.yaml"
    text = dump_yaml(grid)
    try:
        if path.is_file() and path.read_text() != text:
            raise UserError(
                f"{path} is of another size of text, variant, setting, time or number of cores; "
                f"give another --out, or delete {out}"
            )
        out.mkdir(parents=True, exist_ok=True)
        write_text_atomically(path, text)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--out {out} cannot be used: {error}; give another") from error
    return path


def _training_sentence(trial: Trial, grid: Mapping[str, Any]) -> str:
    """Return the designs, their difference, and the sizes that will be trained."""
    from pretrain.config.load import load_config
    from pretrain.config.sources import override_text

    overrides = [override_text(key, value) for key, value in grid["set"].items()]
    config = load_config(grid["base"], overrides)
    model, tokens = config.model, config.data.global_batch_size * config.data.sequence_length
    count = parameters(model.num_layers, model.hidden_size, model.vocab_size)
    return (
        f"{' beside '.join(trial.arms.names)}:\n{trial.arms.difference}\n"
        f"{model.num_layers} layers of {model.hidden_size}, "
        f"about {count / 1e6:.1f} M parameters, {config.total_steps:,} steps of {tokens:,} tokens"
    )


def _prompts(shards: Path) -> list[str]:
    """Return the first words of a few held-out documents.

    Raises:
        UserError: none is held out.
    """
    import numpy as np

    from data_pipeline.shards.documents import Documents
    from data_pipeline.shards.manifest import read_manifest
    from data_pipeline.tokenizer.tokenizer import open_tokenizer

    manifest = read_manifest(shards)
    if manifest.tokens("validation") <= LENGTH or manifest.tokens("train") <= BATCH * LENGTH:
        raise UserError(
            f"{shards} has {manifest.tokens('train'):,} training and "
            f"{manifest.tokens('validation'):,} held-out tokens, which are too few; give more "
            "text, or more documents (a long .txt is cut), and another --out"
        )
    documents = Documents(manifest, "validation")
    begins = documents.addresses[:-1][np.diff(documents.addresses) > PROMPT_TOKENS][:PROMPTS]
    tokenizer = open_tokenizer(manifest.tokenizer_path)
    rows = documents.read(documents.in_order(), begins, PROMPT_TOKENS)
    texts = [tokenizer.decode(row.tolist()).replace("\0", "") for row in rows]
    return [text for text in texts if text.strip()]


def _step(signals: SignalRelay, title: str, verb: str, *arguments: str, remedy: str = "") -> None:
    """Run `python -m VERB ARGUMENTS`; a signal is passed on to it, and ends the trial with it.

    Args:
        signals: Signals to pass on.
        title: Line above the step's output; "": none.
        verb: Package and verb.
        remedy: Clause for a step that failed.
    """
    from pretrain.ranks.launch import prepare_child

    if title:
        typer.echo(f"\n{title}")
    command = [sys.executable, "-m", *verb.split(), *arguments]
    process = subprocess.Popen(command, preexec_fn=prepare_child)
    while process.poll() is None:
        signals.pass_on([process])
        time.sleep(0.05)
    if signals.received:
        stopped_by = signal.Signals(signals.received[0]).name
        typer.echo(f"{stopped_by}: stopped; the same command continues from here")
        raise typer.Exit(128 + signals.received[0])
    if process.returncode:
        sentence = f"this step failed: python {shlex.join(command[1:])}"
        typer.echo(f"{sentence}; {remedy}" if remedy else sentence, err=True)
        raise typer.Exit(process.returncode if process.returncode > 0 else 1)
