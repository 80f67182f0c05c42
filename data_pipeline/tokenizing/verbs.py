"""Verbs `tokenize` and `merge-manifests`."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from data_pipeline.errors import DataError
from data_pipeline.io.home import expand_home
from data_pipeline.sources.discovery import PassedOver, RecordKeys, describe, find_inputs
from data_pipeline.tokenizing.rejects import Limits, notes

Inputs = Annotated[
    list[str],
    typer.Argument(
        help="Files or directories (.jsonl, .json, .txt, .md, also packed: .zst, .gz, .xz; "
        ".parquet); or one data set: hf:NAME[:CONFIG[:SPLIT]][@REVISION], a directory of "
        "save_to_disk, or READER:FILES (csv, arrow, webdataset, ...)."
    ),
]
TextKey = Annotated[
    str, typer.Option(help="Key of the text in a JSON record; a dot goes one object down.")
]
SourceKey = Annotated[str, typer.Option(help="Key of the source's name in a JSON record.")]
OnlySource = Annotated[
    list[str] | None, typer.Option("--source", help="Take this source only (repeatable).")
]
ExcludeSource = Annotated[
    list[str] | None, typer.Option(help="Leave this source out (repeatable).")
]
DefaultSource = Annotated[str, typer.Option(help="Source of the records that name none.")]
ShardDirectory = Annotated[Path, typer.Argument(help="A directory that tokenize made.")]


if TYPE_CHECKING:
    from data_pipeline.shards.manifest import Manifest
    from data_pipeline.tokenizing.plan import Task

_KEYS = RecordKeys()
_LIMITS = Limits()
# Exit code of a command that has finished everything except damaged inputs.
DAMAGED_INPUTS = 3

MaxRejectRate = Annotated[
    float, typer.Option(help="Stop if more of the lines than this share are not documents.")
]
AllowDamaged = Annotated[
    bool,
    typer.Option("--allow-damaged", help="Exit code 0 although inputs are cut short or damaged."),
]


def which_task(
    task: int | None, num_tasks: int | None, environment: Mapping[str, str]
) -> Task | None:
    """Return the task that the options, or the environment of a Slurm array, name.

    Slurm's count of array tasks cannot replace --num-tasks: it is 2 for --array=3,5.

    Args:
        task: Value of the option --task.
        num_tasks: Value of the option --num-tasks.

    Returns:
        Task; None without --num-tasks.

    Raises:
        DataError: If only one of the two is known, or there is no such task.
    """
    from data_pipeline.tokenizing.plan import Task

    if num_tasks is None:
        if task is not None:
            raise DataError(f"--task {task} needs --num-tasks: how many tasks share the work")
        return None
    if task is None:
        index = environment.get("SLURM_ARRAY_TASK_ID", "")
        if not index.isdecimal():
            raise DataError(
                f"--num-tasks {num_tasks} needs --task, or a Slurm array (sbatch "
                f"--array=0-{num_tasks - 1})"
            )
        task = int(index)
    return Task(task, num_tasks)


verbs = typer.Typer()


@verbs.command()
def tokenize(
    inputs: Inputs,
    tokenizer: Annotated[Path, typer.Option(help="A SentencePiece .model, or tokenizer.json.")],
    out: Annotated[Path, typer.Option(help="The shard directory to make.")],
    name: Annotated[str, typer.Option(help="First part of the shards' names.")],
    workers: Annotated[int, typer.Option(help="Processes; the result does not depend on it.")] = 1,
    task: Annotated[
        int | None,
        typer.Option(help="Which task of --num-tasks, from 0; default: the Slurm array's id."),
    ] = None,
    num_tasks: Annotated[
        int | None,
        typer.Option(help="Share the work among this many tasks; then run merge-manifests."),
    ] = None,
    validation_fraction: Annotated[
        float, typer.Option(help="Share of the documents to hold out, by hash.")
    ] = 0.05,
    test_fraction: Annotated[
        float, typer.Option(help="Share of the documents to set aside for a final test, by hash.")
    ] = 0.0,
    files_per_shard: Annotated[int, typer.Option(help="Input files per work item.")] = 1,
    source: OnlySource = None,
    exclude_source: ExcludeSource = None,
    shard_bytes: Annotated[
        int, typer.Option(help="Whole units make a shard up to this size.")
    ] = 1_000_000_000,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict", help="Stop at the first line that is not a document, or entry not read."
        ),
    ] = False,
    max_reject_rate: MaxRejectRate = _LIMITS.max_reject_rate,
    allow_damaged: AllowDamaged = False,
    engine: Annotated[
        str, typer.Option(help="auto, gigatoken or sentencepiece: the ids are the same.")
    ] = "auto",
    allow_lossy: Annotated[
        bool,
        typer.Option(
            "--allow-lossy", help="Take a tokenizer that may lose text, and count the losses."
        ),
    ] = False,
    eod_token: Annotated[
        str, typer.Option(help="What ends documents; default: what the tokenizer names.")
    ] = "",
    text_key: TextKey = _KEYS.text,
    source_key: SourceKey = _KEYS.source,
    default_source: DefaultSource = _KEYS.default_source,
) -> None:
    """Write documents as Megatron shards; the same command continues an interrupted run.

    Example: python -m data_pipeline tokenize data/demo/corpus --tokenizer data/demo/tokenizer.model
    --out data/demo/shards --name demo --workers 2
    """
    from data_pipeline.io.progress import ProgressLine
    from data_pipeline.tokenizer.encoder import why_not_fast
    from data_pipeline.tokenizing.plan import Task, TokenizeOptions, at_planned_revision
    from data_pipeline.tokenizing.run import Run

    refuse_out(inputs, out)
    keys = RecordKeys(text_key, source_key, default_source)
    selected = find_inputs(at_planned_revision(inputs, out), keys)
    options = TokenizeOptions(
        name=name,
        validation_fraction=validation_fraction,
        files_per_shard=files_per_shard,
        keys=keys,
        test_fraction=test_fraction,
        sources=tuple(source or ()),
        exclude_sources=tuple(exclude_source or ()),
        shard_bytes=shard_bytes,
        allow_lossy=allow_lossy,
        eod_token=eod_token,
    )
    chosen_task = which_task(task, num_tasks, os.environ)
    with ProgressLine() as line:
        run = Run(
            selected,
            tokenizer,
            out,
            options,
            workers=workers,
            report=line.update,
            limits=Limits(strict, max_reject_rate),
            engine=engine,
        )
        share = chosen_task or Task(0, 1)
        line.total_bytes = run.input_bytes(share)
        result = run.make(share)
        manifest = run.finish() if chosen_task is None else None
    summary = line.summary("\n  ") if result.now else f"already up to date ({result.units} units)"
    if chosen_task is not None:
        typer.echo(f"{out}: task {chosen_task.index} of {chosen_task.count}: {summary}")
        show_passed_over(selected.passed_over)
        _show_damage(result.damaged)  # merge-manifests ends with the exit code for it
        merge = f"python -m data_pipeline merge-manifests {shlex.quote(str(out))}"
        typer.echo(f"  when all tasks are done: {merge}")
        return
    assert manifest is not None
    typer.echo(f"{out}: {summary}")
    _show(manifest)
    if result.now and (reason := why_not_fast(tokenizer, engine)):
        typer.echo(f"  not encoded by gigatoken: {reason}")
    show_passed_over(selected.passed_over)
    end_with_damage(manifest.damaged, allow_damaged)


def refuse_out(inputs: list[str], out: Path) -> None:
    """Refuse an --out that lies below the inputs or is not on this machine.

    Raises:
        DataError: If --out is such a path.
    """
    if re.match("[a-z0-9]+:/", str(out)):  # Path has dropped the second slash of a URL
        raise DataError(
            f"--out {out} is not a directory of this machine; shards are memory-mapped files"
        )
    for entry in (expand_home(re.sub("^[a-z0-9]+:(?!//)", "", entry)) for entry in inputs):
        if os.path.isdir(entry) and out.resolve().is_relative_to(entry.resolve()):
            raise DataError(f"--out {out} lies inside the input directory {entry}; choose another")


def show_passed_over(passed_over: Sequence[PassedOver]) -> None:
    """Print the entries that are not read; on stderr those that may have been meant to be read."""
    for expected in (False, True):
        for line in describe(entry for entry in passed_over if entry.expected is expected):
            typer.echo(f"  {line}", err=not expected)


def _show_damage(damaged: Sequence[str]) -> None:
    for entry in damaged:
        typer.echo(f"damaged input {entry}", err=True)


def end_with_damage(damaged: Sequence[str], allowed: bool) -> None:
    """Print the damaged inputs; unless damage is allowed, exit with DAMAGED_INPUTS.

    Args:
        damaged: Damaged inputs, each with what was lost.
        allowed: Whether the command exits with 0 in spite of damage.
    """
    _show_damage(damaged)
    if damaged and not allowed:
        typer.echo(
            f"error: {len(damaged)} inputs are damaged, everything else is finished; restore them "
            f"and choose another --out, or give --allow-damaged",
            err=True,
        )
        raise typer.Exit(DAMAGED_INPUTS)


@verbs.command("merge-manifests")
def merge_manifests(
    directory: ShardDirectory,
    workers: Annotated[int, typer.Option(help="Threads that make shards.")] = 1,
    max_reject_rate: MaxRejectRate = _LIMITS.max_reject_rate,
    allow_damaged: AllowDamaged = False,
) -> None:
    """Finish a directory that tasks of tokenize have filled: make the shards and the manifest.

    Example: python -m data_pipeline merge-manifests data/slimpajama/shards
    """
    from data_pipeline.io.progress import ProgressLine
    from data_pipeline.tokenizing.run import finish

    limits = Limits(max_reject_rate=max_reject_rate)
    with ProgressLine() as line:
        manifest = finish(directory, workers, line.update, limits)
    typer.echo(f"{directory}: {len(manifest.shards)} shards")
    _show(manifest)
    end_with_damage(manifest.damaged, allow_damaged)


def _show(manifest: Manifest) -> None:
    """Print tokens by split, and the lines and documents that were left out."""
    held_out = manifest.tokens("validation")
    test = f", {manifest.tokens('test'):,} test" if manifest.tokens("test") else ""
    typer.echo(f"  {manifest.tokens('train'):,} training{test} and {held_out:,} validation tokens")
    if not held_out and manifest.tokens("train"):
        typer.echo(
            "  no document was held out: with few documents give a larger --validation-fraction"
        )
    for title, counts in (
        ("left out (see rejects.jsonl)", manifest.rejects),
        ("kept, but unusual (see rejects.jsonl)", manifest.unusual),
        ("documents of sources that are not wanted", manifest.excluded_documents),
    ):
        if counts:
            typer.echo(
                f"  {title}: " + ", ".join(f"{count:,} {name}" for name, count in counts.items())
            )
    if lossy := manifest.encoding.get("lossy_documents"):
        typer.echo(f"  documents that lost text by the tokenizer (--allow-lossy): {lossy:,}")
    for note in notes(manifest):
        typer.echo(f"  {note}")
