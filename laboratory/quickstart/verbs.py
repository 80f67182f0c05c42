"""The verbs `try` and `demo`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from laboratory.quickstart.arms import DESIGNS, choose_arms
from laboratory.quickstart.sizes import held_out_share, plan_sizes, training_seconds
from laboratory.quickstart.texts import linked, survey, written_beginning
from laboratory.quickstart.trial import VOCAB_SIZE, Trial, run_trial
from megatron_patches.recipe.variants import LEADING
from pretrain.errors import UserError
from pretrain.ranks.cores import usable_cores

LEAST_BYTES = 200_000
"""With less text hardly a document is held out, and there is nothing to learn beyond the words."""
PLAIN, PACKED = (".txt", ".md", ".jsonl", ".ndjson", ".json"), 3
"""Endings of files that are not packed, and about how many bytes of text are in a byte of the
others."""
PLACES = ("run.name", "run.directory", "data.directory")
"""Settings that follow from --out."""

Out = Annotated[
    Path,
    typer.Option(help="Directory for all that is made; with the same one the command continues."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A setting of all runs; repeatable."),
]


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
        typer.Option(help=f"Variant to try: {LEADING}, or one of grid {DESIGNS}."),
    ] = LEADING,
    settings: Settings = None,
    text_key: Annotated[
        str, typer.Option(help="Key of the text in a record; of several the first that it has.")
    ] = "text|content|body",
) -> None:
    """Train models side by side on your own text and compare them, tokenizer and shards included.

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
        size, cores / jobs, training_seconds(minutes) / rounds, overrides.get(VOCAB_SIZE)
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
    amount += f", {100 * held_out_share(size):.0f} % of it held out"
    summary = f"{amount}; {cores} core{'s' if cores > 1 else ''}, about {minutes:g} minutes"
    run_trial(trial, out, "\n".join([summary, *remarks]))


def demo(
    out: Out = Path("demo"),
    training: Annotated[
        bool,
        typer.Option("--training/--no-training", help="Train, or stop when the shards are there."),
    ] = True,
    settings: Settings = None,
) -> None:
    """Do the same with text of this Python installation, offline, on four processes.

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
    summary = "the documentation in this Python, 2.4 MB; four minutes on two cores"
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
