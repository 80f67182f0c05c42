"""The verbs `tokenize` and `merge-manifests`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from data_pipeline.errors import DataError
from data_pipeline.options import (
    Chunks,
    DefaultSource,
    ExcludeSource,
    Inputs,
    OnlySource,
    ShardDirectory,
    SourceKey,
    TextKey,
)
from data_pipeline.sources import RecordKeys, select_inputs

if TYPE_CHECKING:
    from data_pipeline.manifest import Manifest
    from data_pipeline.tokenize import Task

_KEYS = RecordKeys()


def which_task(task: int | None, num_tasks: int | None, environment: Mapping[str, str]) -> Task | None:
    """The task that the options, or a Slurm array's environment, ask for; None without --num-tasks.

    Slurm's count of array tasks is of no use: it is 2 for --array=3,5.

    Raises:
        DataError: --task without --num-tasks, or --num-tasks with nothing that says which.
    """
    from data_pipeline.tokenize import Task

    if num_tasks is None:
        if task is not None:
            raise DataError(f"--task {task} needs --num-tasks: how many tasks share the work")
        return None
    if task is None:
        index = environment.get("SLURM_ARRAY_TASK_ID", "")
        if not index.isdecimal():
            raise DataError(
                f"--num-tasks {num_tasks} needs --task, or a Slurm array (sbatch --array=0-{num_tasks - 1})"
            )
        task = int(index)
    return Task(task, num_tasks)


def tokenize(
    inputs: Inputs,
    tokenizer: Annotated[Path, typer.Option(help="A SentencePiece .model file.")],
    out: Annotated[Path, typer.Option(help="The shard directory to make.")],
    name: Annotated[str, typer.Option(help="First part of the shards' names.")],
    workers: Annotated[int, typer.Option(help="Processes; the result does not depend on it.")] = 1,
    task: Annotated[
        int | None,
        typer.Option(help="Which task of --num-tasks, from 0; default: the Slurm array's id."),
    ] = None,
    num_tasks: Annotated[
        int | None, typer.Option(help="Share the work among this many tasks; then run merge-manifests.")
    ] = None,
    validation_fraction: Annotated[
        float, typer.Option(help="Share of the documents to hold out, by hash.")
    ] = 0.05,
    test_fraction: Annotated[
        float, typer.Option(help="Share of the documents to set aside for a final test, by hash.")
    ] = 0.0,
    files_per_shard: Annotated[int, typer.Option(help="Input files per unit of work.")] = 1,
    range_bytes: Annotated[
        int, typer.Option(help="A larger plain .jsonl is read in parts of this size.")
    ] = 256 << 20,
    max_tokens: Annotated[
        int, typer.Option(help="At most this many, a share from every input by its size; 0 = all.")
    ] = 0,
    source: OnlySource = None,
    exclude_source: ExcludeSource = None,
    chunks: Chunks = "",
    strict: Annotated[
        bool, typer.Option("--strict", help="Stop at the first line that is no document.")
    ] = False,
    text_key: TextKey = _KEYS.text,
    source_key: SourceKey = _KEYS.source,
    default_source: DefaultSource = _KEYS.default_source,
) -> None:
    """Documents to Megatron shards. The same command again continues an interrupted run.

    Example: python -m data_pipeline tokenize data/demo/corpus --tokenizer data/demo/tokenizer.model
    --out data/demo/shards --name demo --workers 2
    """
    from data_pipeline.plan import TokenizeOptions
    from data_pipeline.progress import ProgressLine
    from data_pipeline.tokenize import make_task
    from data_pipeline.tokenize import tokenize as make_shards

    files = select_inputs(inputs, chunks)
    options = TokenizeOptions(
        name=name,
        validation_fraction=validation_fraction,
        files_per_shard=files_per_shard,
        keys=RecordKeys(text_key, source_key, default_source),
        test_fraction=test_fraction,
        max_tokens=max_tokens,
        sources=tuple(source or ()),
        exclude_sources=tuple(exclude_source or ()),
        range_bytes=range_bytes,
    )
    chosen = which_task(task, num_tasks, os.environ)
    with ProgressLine(sum(file.size for file in files)) as line:
        if chosen is None:
            manifest, made = make_shards(files, tokenizer, out, options, workers, line.update, strict)
        else:
            records, made = make_task(files, tokenizer, out, options, workers, line.update, chosen, strict)
    if chosen is None:
        units = len({shard.unit for shard in manifest.shards})
        typer.echo(f"{out}: " + (line.summary() if made else f"already up to date ({units} units)"))
        _show(manifest)
    else:
        what = line.summary() if made else f"already up to date ({len(records)} units)"
        typer.echo(f"{out}: task {chosen.index} of {chosen.count}: {what}")
        typer.echo("  when all tasks are done: python -m data_pipeline merge-manifests " + str(out))


def merge_manifests(directory: ShardDirectory) -> None:
    """Finish a directory that tasks of tokenize have filled: check that all is there, write the manifest.

    Example: python -m data_pipeline merge-manifests data/slimpajama/shards
    """
    from data_pipeline.tokenize import merge_manifests as merge

    manifest = merge(directory)
    typer.echo(f"{directory}: {len(manifest.shards)} shards")
    _show(manifest)


def _show(manifest: Manifest) -> None:
    """Tokens by split, and what was left out."""
    held_out = manifest.tokens("validation")
    test = f", {manifest.tokens('test'):,} test" if manifest.tokens("test") else ""
    typer.echo(f"  {manifest.tokens('train'):,} training{test} and {held_out:,} validation tokens")
    for title, counts in (
        ("left out (see rejects.jsonl)", manifest.rejects),
        ("kept, but unusual (see rejects.jsonl)", manifest.unusual),
        ("documents of sources that are not wanted", manifest.excluded_documents),
    ):
        if counts:
            typer.echo(f"  {title}: " + ", ".join(f"{count:,} {name}" for name, count in counts.items()))
