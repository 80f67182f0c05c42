"""The verbs `try` and `demo`: text to trained models and a page that compares them.

Every step is a command that a user could give: train-tokenizer, tokenize, verify, sweep, compare.
Each redoes nothing that is finished, so a trial that was stopped or killed resumes when it is
started again.
"""

from __future__ import annotations

import hashlib
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatron_patches.recipe.variants import LEADING
from pretrain.errors import UserError
from pretrain.ranks.cores import usable_cores
from pretrain.ranks.output import outlive_output

if TYPE_CHECKING:
    from data_pipeline.sources.discovery import InputFile, Inputs
    from laboratory.sweep.running import SignalRelay

LEAST_BYTES = 200_000
"""With less text hardly a document is held out, and there is nothing to learn beyond the words."""
BATCH, LENGTH = 8, 128
PARAMETERS_TOKENS = 5e9
"""Parameters × tokens that one core of a server trains on in a second, of models of these sizes."""
OTHER_SECONDS = 75.0
"""Seconds of a trial that are not training: imports, tokenizer, shards, the comparison."""
MOST_EPOCHS = 10
SIZES = ((4, 128, 4), (6, 256, 8), (8, 512, 8))
"""(layers, hidden size, heads), by size."""
PLAIN, PACKED = (".txt", ".md", ".jsonl", ".ndjson", ".json"), 3
"""Endings of files that are not packed, and about how many bytes of text are in a byte of the
others."""
MOST_BYTES = 64_000_000
"""Text that is taken of a data set, which may be larger than this machine's disk."""
DESIGNS = "demo_frozen_designs"
"""The grid whose entries are the designs; the first is the baseline."""
SPELLED_OUT, _FACTORS = "monarch_shared_conv4", "optimizer.learning_rate_factors"
"""The entry that is the leading variant, and what else it sets."""
CAUTION = (
    "one run of each variant decides nothing: README's findings say what more seeds and tokens "
    "have shown"
)
"""Sentence above the comparison."""
PROMPTS, PROMPT_TOKENS = 2, 12
PLACES = ("run.name", "run.directory", "data.directory")
"""Settings that follow from --out."""
VOCAB_SIZE = "model.vocab_size"

Out = Annotated[
    Path,
    typer.Option(help="Directory for all that is made; with the same one the command continues."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A setting of all runs; repeatable."),
]


@dataclass(frozen=True)
class Arms:
    """The designs of a trial, of which each differs in one thing from the one before.

    Attributes:
        entries: Entries of a sweep, in that order.
        baseline: Name of the one that the page compares the others with.
        difference: Lines that say what the designs differ in.
    """

    entries: tuple[Mapping[str, Any], ...]
    baseline: str
    difference: str

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the designs, which their runs have too."""
        return tuple(map(_name, self.entries))


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


def try_(
    texts: Annotated[
        list[str],
        typer.Argument(
            help="Files or directories of text (.txt, .md, .jsonl, also packed, .parquet), or a "
            "data set: hf:NAME, a directory of save_to_disk, csv:FILE."
        ),
    ],
    out: Out = Path("trial"),
    minutes: Annotated[
        float, typer.Option(min=1, help="About how long it may take on this machine.")
    ] = 4,
    design: Annotated[
        str,
        typer.Option(help=f"What is tried: {LEADING}, or one of grid {DESIGNS}."),
    ] = LEADING,
    settings: Settings = None,
    text_key: Annotated[
        str, typer.Option(help="Key of the text in a record; of several the first that it has.")
    ] = "text|content|body",
) -> None:
    """Try it on your own text: a tokenizer, models trained side by side, their comparison.

    A variant with adapters is compared with trained queries and keys that have the same adapters,
    beside `vanilla`, which has none.

    Size and length follow from the text, the cores and --minutes, and are said first.

    Example: ora-pretrain try novels/ --minutes 10
    """
    from data_pipeline.sources.discovery import RecordKeys, find_inputs
    from data_pipeline.tokenizing.verbs import refuse_out
    from pretrain.ranks.devices import MACHINE, nvidia_devices

    refuse_out(texts, out / "shards")
    inputs = find_inputs(texts, RecordKeys(text_key))
    if inputs.data_set is not None:
        texts = [str(written_beginning(inputs, text_key, out))]
        inputs = find_inputs(texts)
    files = inputs.files
    read, remarks, tables = survey(files, text_key, named=texts)
    size = sum(file.size * (1 if file.name.lower().endswith(PLAIN) else PACKED) for file in read)
    if size < LEAST_BYTES:
        why = f" ({'; '.join(remarks)})" if remarks else ""
        raise UserError(
            f"{', '.join(texts)}: {size // 1000:,} kB of text are too little{why}; "
            f"give {LEAST_BYTES / 1e3:g} kB at least"
        )
    cores = usable_cores()
    overrides = _parse_settings(settings)
    arms = choose_arms(design)
    jobs = 2 if cores > 1 and not nvidia_devices(MACHINE) else 1
    rounds = -(-len(arms.entries) // jobs)
    planned, *options = plan_sizes(
        size, cores / jobs, _training_seconds(minutes) / rounds, overrides.get(VOCAB_SIZE)
    )
    of_tokenizer, of_shards = ((*words, f"--text-key={text_key}") for words in options)
    # A file that is no text, or damaged, is named and left out.
    of_tokenizer += ("--allow-damaged",)
    of_shards += ("--allow-damaged", "--max-reject-rate=1")
    # The other steps refuse a table without the text's column, so they get the files beside it.
    trial = Trial(
        texts=(str(linked(read, out)),) if tables else tuple(texts),
        name="text",
        arms=arms,
        jobs=jobs,
        local_ranks=1,
        of_tokenizer=of_tokenizer,
        of_shards=of_shards,
        settings=planned | overrides,
    )
    amount = f"{len(read)} file{'s' if len(read) > 1 else ''}, {size / 1e6:,.1f} MB"
    summary = f"{amount}; {cores} cores, about {minutes:g} minutes"
    run_trial(trial, out, "\n".join([summary, *remarks]))


def demo(
    out: Out = Path("demo"),
    training: Annotated[
        bool,
        typer.Option("--training/--no-training", help="Train, or stop when the shards are there."),
    ] = True,
    settings: Settings = None,
) -> None:
    """Do what `try` does with text of this Python installation, on four processes: see README.

    Example: ora-pretrain demo
    """
    from pretrain.config.load import load_config

    overrides = _parse_settings(settings)
    placed = {} if out == Path("demo") else {"data.directory": str(out / "shards")}
    arms = choose_arms(load_config("demo").attention.variant)
    trial = Trial(
        texts=(str(out / "corpus"),),
        name="demo",
        arms=arms,
        jobs=1,
        local_ranks=4,
        of_tokenizer=(f"--vocab-size={overrides.get(VOCAB_SIZE, 4096)}",),
        settings=placed | overrides,
    )
    summary = "the documentation in this Python, 2.4 MB; three minutes on two cores"
    run_trial(trial, out, summary, training)


def _parse_settings(settings: Sequence[str] | None) -> dict[str, Any]:
    """Return {key: value} of --set.

    Raises:
        UserError: a key follows from --out, or the size of the vocabulary is not a number.
    """
    from pretrain.config.sources import parse_overrides

    overrides = dict(parse_overrides(settings or []))
    for key in PLACES:
        if key in overrides:
            raise UserError(f"--set {key}: --out places everything; leave it out")
    if not isinstance(overrides.get(VOCAB_SIZE, 1), int):
        raise UserError(f"--set {VOCAB_SIZE}={overrides[VOCAB_SIZE]}: give a whole number")
    return overrides


def survey(
    files: Sequence[InputFile], text_key: str, named: Sequence[str]
) -> tuple[list[InputFile], list[str], int]:
    """Read the first document of every local file to tell texts from other files.

    Args:
        files: The inputs.
        text_key: Keys of the text in a record.
        named: The inputs as they were given: files, or directories of them.

    Returns:
        The files that hold text, lines that name the keys of it and the other files, and how many
        tables without the column are among these.

    Raises:
        NoTextColumn: a table that was named itself has no such column.
    """
    from data_pipeline.errors import NoTextColumn
    from data_pipeline.io.home import expand_home
    from data_pipeline.sources.discovery import PassedOver, RecordKeys, describe
    from data_pipeline.sources.records import Document, RecordReader

    keys: Counter[str] = Counter()
    lost = {}
    tables = 0
    for file in files:
        why = "no lines"
        try:
            for item in RecordReader(file, RecordKeys(text_key)):
                if isinstance(item, Document):
                    keys[item.key] += 1
                    break
                why = item.detail
            else:
                lost[file.name] = PassedOver(file.name, why)
        except NoTextColumn:
            if any(file.path == expand_home(entry) for entry in named):
                raise
            tables += 1
            lost[file.name] = PassedOver(file.name, "no column of the text")
    key_counts = {f"`{key}`": count for key, count in keys.most_common() if key}
    single = len(key_counts) == 1
    listed = " and ".join(
        key_counts if single else [f"{key} (of {n})" for key, n in key_counts.items()]
    )
    sentences = [f"text is read from the key{'' if single else 's'} {listed}"] if key_counts else []
    read = [file for file in files if file.name not in lost]
    return read, [*sentences, *describe(lost.values())], tables


def written_beginning(inputs: Inputs, text_key: str, out: Path) -> Path:
    """Write the first MOST_BYTES of a data set's text to a file below `out`, and return its path.

    Args:
        text_key: Keys of the text in a record.
        out: Directory of the trial.
    """
    import orjson

    from data_pipeline.io.files import write_atomically
    from data_pipeline.sources.discovery import RecordKeys
    from data_pipeline.sources.records import read_documents

    keys = RecordKeys(text_key)
    version = f"{inputs.root} {inputs.files[0].version}"
    digest = hashlib.sha256(version.encode()).hexdigest()[:8]
    path = out / f"texts-{digest}" / "beginning.jsonl"
    if path.exists():
        return path
    lines: list[bytes] = []
    size = 0
    for file in inputs.files:
        for document in read_documents(file, keys):
            lines.append(orjson.dumps({keys.text_keys[0]: document.text}) + b"\n")
            size += len(lines[-1])
            if size >= MOST_BYTES:
                break
        if size >= MOST_BYTES:
            break
    write_atomically(path, b"".join(lines))
    return path


def linked(files: Sequence[InputFile], out: Path) -> Path:
    """Return a directory below `out` with a link to each file, under the file's name.

    Args:
        files: Files of this machine.
        out: Directory of the trial.
    """
    names = "\n".join(file.name for file in files)
    directory = out / f"texts-{hashlib.sha256(names.encode(errors='replace')).hexdigest()[:8]}"
    for file in files:
        link = directory / file.name
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(Path(str(file.path)).resolve())
    return directory


def _training_seconds(minutes: float) -> float:
    """Return the seconds of a trial's minutes in which it trains."""
    return max(30.0, 60 * minutes - OTHER_SECONDS)


def plan_sizes(
    size: int, cores: float, seconds: float, vocab_size: int | None = None
) -> tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]:
    """Choose sizes for a text.

    The model is the largest of SIZES that sees a token a parameter in the time, or the smallest.

    Args:
        size: Bytes of the text.
        cores: Cores of one run.
        seconds: Seconds to train a run for.
        vocab_size: Tokens of the vocabulary; None: by the size of the text.

    Returns:
        Settings of the runs, options of train-tokenizer, options of tokenize.
    """
    if vocab_size is None:
        vocab_size = 4096 if size >= 1_000_000 else 1024
    documents = size / 16_384  # of texts that are cut; of others there are mostly more
    # About eight documents, so that their loss is more than an accident.
    held_out = min(0.5, max(0.05, 8 / documents))
    # About 3.5 bytes a token with 4,096 pieces, 2.7 with 1,024.
    text_tokens = size * (1 - held_out) / (3.5 if vocab_size >= 4096 else 2.7)
    work = PARAMETERS_TOKENS * cores * seconds
    shapes = [
        (parameters(layers, width, vocab_size), layers, width, heads)
        for layers, width, heads in SIZES
    ]
    epochs = MOST_EPOCHS * text_tokens
    fitting = (shape for shape in shapes if shape[0] <= min(work / shape[0], epochs))
    count, layers, width, heads = max(fitting, default=shapes[0])
    tokens = min(work / count, epochs)
    steps = max(20, round(tokens / (BATCH * LENGTH)))
    settings: dict[str, Any] = {
        "model.num_layers": layers,
        "model.hidden_size": width,
        "model.num_attention_heads": heads,
        "model.vocab_size": vocab_size,
        "data.sequence_length": LENGTH,
        "data.micro_batch_size": BATCH,
        "data.global_batch_size": BATCH,
        "data.validate_every": -(-steps // 4),
        "parallel.tensor_model_parallel_size": 1,
        "schedule.steps": steps,
        "schedule.warmup_steps": steps // 8,
        "checkpoint.every": -(-steps // 4),
    }
    return (
        settings,
        (f"--vocab-size={vocab_size}", "--sample-bytes=20000000"),
        (f"--validation-fraction={held_out:.3f}",),
    )


def parameters(layers: int, width: int, vocab_size: int) -> int:
    """Return the approximate number of parameters, counting the embedding once.

    Args:
        layers: Number of layers.
        width: Width of the residual stream.
        vocab_size: Tokens of the vocabulary.
    """
    return 12 * layers * width**2 + vocab_size * width


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
    against = (f"--baseline={trial.arms.baseline}", f"--out={page}")
    asked = [f"--prompt={text}" for text in prompts]
    step(f"4/4 comparison: {CAUTION}", "pretrain compare", *runs, *against, *asked)


def choose_arms(design: str) -> Arms:
    """Return a design with what it is compared with.

    Args:
        design: LEADING, or the name of an entry of the grid DESIGNS.

    Raises:
        UserError: there is no such design, or it is the baseline itself.
    """
    from pretrain.config.load import load_config
    from pretrain.config.sources import did_you_mean, override_text

    entries = _designs()
    vanilla = next(iter(entries))
    if design == vanilla:
        raise UserError(f"--design {design} is what the others are compared with; choose another")
    if design not in entries:
        hint = did_you_mean(design, entries) or f"; there are {', '.join(entries)}"
        raise UserError(f"--design {design} is none of the grid {DESIGNS}{hint}")
    entry = entries[design]
    overrides = [override_text(key, value) for key, value in entry.items() if key != "name"]
    policy = load_config("demo", overrides).policy
    kind = "trained" if policy.trainable else "frozen"
    rows = f"{design} has {kind} queries and keys of its own kind"
    if not policy.adapters:
        sentence = f"{rows}; {vanilla} trains dense ones"
        return Arms((entries[vanilla], entry), baseline=vanilla, difference=sentence)
    twin = _named(entries, _twin(entry, entries[vanilla], policy.adapters))
    adapters = f"{_name(twin)} is {vanilla} with the adapters {', '.join(policy.adapters)}"
    if twin == entry:
        return Arms((entries[vanilla], entry), baseline=vanilla, difference=adapters)
    sentence = f"{adapters}\n{rows} and the same adapters: the page compares it with {_name(twin)}"
    return Arms((entries[vanilla], twin, entry), baseline=_name(twin), difference=sentence)


def _twin(
    entry: Mapping[str, Any], vanilla: Mapping[str, Any], adapters: Sequence[str]
) -> dict[str, Any]:
    """Return `vanilla` with a design's adapters, their settings and the design's rates."""
    settings_of_adapters = {f"attention.{name}" for name in adapters}
    return {
        **vanilla,
        "name": "_".join([_name(vanilla), *adapters]),
        "attention.adapters": list(adapters),
        **{
            key: value
            for key, value in entry.items()
            if key in settings_of_adapters or not key.startswith(("attention.", "name"))
        },
    }


def _named(
    entries: Mapping[str, Mapping[str, Any]], wanted: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the entry that is the wanted one but for its name, or the wanted one."""
    for entry in entries.values():
        if {**entry, "name": None} == {**wanted, "name": None}:
            return entry
    return wanted


def _name(entry: Mapping[str, Any]) -> str:
    return str(entry.get("name", entry["attention.variant"]))


def _designs() -> dict[str, dict[str, Any]]:
    """Return {name: entry} of the grid DESIGNS, and of the leading variant by its own name."""
    from laboratory.sweep.grid import read_grid

    entries = read_grid(DESIGNS).content.entries or []
    designs = {_name(entry): entry for entry in entries}
    factors = {_FACTORS: designs[SPELLED_OUT][_FACTORS]}
    return designs | {LEADING: {"name": LEADING, "attention.variant": LEADING, **factors}}


def _grid(trial: Trial, out: Path) -> dict[str, Any]:
    """Return the sweep of a trial's runs; refuse a setting that a design has itself."""
    for entry in trial.arms.entries:
        for key in trial.settings.keys() & entry.keys():
            raise UserError(
                f"--set {key}: --design chooses it, or {_name(entry)} has its own; leave it out"
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
    from pretrain.config.sources import dump_yaml
    from pretrain.runs.directory import write_text_atomically

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
