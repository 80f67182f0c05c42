"""Command line `python -m data_pipeline VERB`: text to tokenised shards. See docs/data.md."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

try:
    import typer
except ModuleNotFoundError:
    print(
        f"error: {sys.executable} has no typer; `make demo` installs what is needed into .venv, "
        "then `source .venv/bin/activate`",
        file=sys.stderr,
    )
    sys.exit(2)

from data_pipeline.errors import DataError
from data_pipeline.io.home import expand_arguments, unset_empty_variables
from data_pipeline.io.limits import limit_sentence
from data_pipeline.io.words import guard_output, output_or_refusal, shown_in_line
from data_pipeline.sources.discovery import RecordKeys, find_inputs
from data_pipeline.sources.hub import SOURCES
from data_pipeline.tokenizing.verbs import (
    AllowDamaged,
    DefaultSource,
    ExcludeSource,
    Inputs,
    OnlySource,
    ShardDirectory,
    SourceKey,
    TextKey,
    end_with_damage,
    show_passed_over,
    verbs,
)

app = typer.Typer(
    help="Text to tokens: build a corpus, train a tokenizer, write Megatron shards, check them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_KEYS = RecordKeys()
# What typer makes of Ctrl-C, without a word.
_INTERRUPTED = 130


@app.command("demo-corpus")
def demo_corpus(
    directory: Annotated[Path, typer.Argument(help="Where the *.jsonl.zst files go.")],
    files: Annotated[int, typer.Option(help="Number of files.")] = 8,
) -> None:
    """Build a small corpus of English prose from this Python installation, offline.

    Example: python -m data_pipeline demo-corpus data/demo/corpus
    """
    from data_pipeline.demo_corpus import build_corpus

    corpus = build_corpus(directory, files)
    typer.echo(f"{directory}: " + ("built" if corpus.built else "already up to date"))
    for source, size in corpus.bytes_per_source.items():
        typer.echo(
            f"  {source}: {corpus.documents_per_source[source]:,} documents, {size / 1e6:.2f} MB"
        )


@app.command("train-tokenizer")
def train_tokenizer(
    inputs: Inputs,
    out: Annotated[Path, typer.Option(help="Prefix: PREFIX.model and PREFIX.json are written.")],
    vocab_size: Annotated[
        int, typer.Option(help="Number of tokens, the 256 bytes and 3 reserved ids included.")
    ] = 32_000,
    model_type: Annotated[str, typer.Option(help="bpe or unigram.")] = "bpe",
    sample_bytes: Annotated[
        int, typer.Option(help="Train on about this much text, spread over all inputs.")
    ] = 100_000_000,
    seed: Annotated[
        int, typer.Option(help="Chooses the documents, and those held out for the check.")
    ] = 0,
    source: OnlySource = None,
    exclude_source: ExcludeSource = None,
    allow_damaged: AllowDamaged = False,
    text_key: TextKey = _KEYS.text,
    source_key: SourceKey = _KEYS.source,
    default_source: DefaultSource = _KEYS.default_source,
) -> None:
    """Train a lossless SentencePiece model and check its round trip on held-out documents.

    Example: python -m data_pipeline train-tokenizer data/demo/corpus --out data/demo/tokenizer
    --vocab-size 4096
    """
    from data_pipeline.tokenizer import train as trainer

    settings = trainer.TrainerSettings(
        vocab_size=vocab_size,
        model_type=model_type,
        sample_bytes=sample_bytes,
        seed=seed,
        sources=tuple(source or ()),
        exclude_sources=tuple(exclude_source or ()),
    )
    keys = RecordKeys(text_key, source_key, default_source)
    selected = find_inputs(inputs, keys)
    report, trained = trainer.train_tokenizer(selected.files, out, settings, keys)
    typer.echo(f"{out}.model: " + ("trained" if trained else "already up to date"))
    typer.echo(
        f"  {report['vocab_size']:,} pieces, {report['bytes_per_token']:.2f} bytes/token and "
        f"{report['round_trip_failures']} round-trip failures on "
        f"{report['held_out_documents']} documents"
    )
    if coverage := report.get("character_coverage"):
        typer.echo(
            f"  the text has more characters than --vocab-size {vocab_size} can hold: those with a "
            f"token are {coverage:.1%} of the text, and bytes carry the others"
        )
    if left_out := report.get("left_out"):
        typer.echo(f"  left out: {left_out}")
    show_passed_over(selected.passed_over)
    end_with_damage(report.get("damaged", ()), allow_damaged)


@app.command()
def download(
    source: Annotated[str, typer.Argument(help=f"{', '.join(SOURCES)}.")],
    out: Annotated[Path, typer.Option(help="The directory for the files.")],
    hub_id: Annotated[
        str | None, typer.Option(help="Another repository with the same files.")
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of the repository.")
    ] = None,
    splits: Annotated[
        str, typer.Option(help="The hub's own splits: train,validation,test.")
    ] = "train",
    fraction: Annotated[float, typer.Option(help="Share of the files of every folder.")] = 1.0,
    include: Annotated[
        list[str] | None,
        typer.Option(help="Pattern of names, in place of the source's own (repeatable)."),
    ] = None,
    workers: Annotated[int, typer.Option(help="Files at a time.")] = 8,
) -> None:
    """Fetch a corpus from the Hugging Face hub, checked against its listing.

    Example: python -m data_pipeline download slimpajama --out data/slimpajama --fraction 0.2
    """
    from data_pipeline.sources import hub

    selection = hub.Wanted(
        splits=tuple(part.strip() for part in splits.split(",")),
        include=tuple(include or ()),
        fraction=fraction,
    )
    corpus = hub.source_of(source, hub_id)
    done = hub.download(
        corpus,
        source,
        out,
        selection,
        note=lambda text: typer.echo(shown_in_line(text), err=True),
        revision=revision,
        workers=workers,
    )
    size = sum(file.size for file in done.files)
    typer.echo(
        f"{out}: {len(done.files):,} files, {size / 1e9:,.2f} GB of {done.repository} at "
        f"{done.revision}, checked"
    )
    typer.echo(f"  licence: {corpus.licence}; key of the text: {corpus.text_key}")


app.registered_commands += verbs.registered_commands


@app.command()
def verify(
    directory: ShardDirectory,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A model that must be the directory's own.")
    ] = None,
    inputs: Annotated[
        str | None, typer.Option(help="Where the inputs are now; default: where they were.")
    ] = None,
    compare_units: Annotated[
        int, typer.Option(help="Units at most to compare with their source text; 0 = none.")
    ] = 4,
    against: Annotated[
        list[Path] | None,
        typer.Option(help="Another directory of a blend: does either train on what one holds out?"),
    ] = None,
) -> None:
    """Rehash, reopen with megatron-core's reader, recount, look a sample up in the source text.

    Names every damaged file. --against (repeatable) looks for exact duplicates over several
    directories.

    Example: python -m data_pipeline verify data/demo/shards
    """
    from data_pipeline.shards.manifest import read_manifest
    from data_pipeline.shards.verify import find_problems, leaked_documents, refuse_tokenizer
    from data_pipeline.tokenizing.source_check import compare_with_source

    manifest = read_manifest(directory)
    if tokenizer is not None:
        refuse_tokenizer(manifest, tokenizer)
    problems = find_problems(manifest)
    remark = "not compared with the source text"
    if not problems and compare_units > 0:
        problems, remark = compare_with_source(manifest, inputs, compare_units)
    if problems:
        for problem in problems[1:]:
            typer.echo(f"error: {problem}", err=True)
        raise DataError(
            f"{problems[0]}; restore what is damaged and remove what the manifest does not name, "
            f"or delete {directory} and run the same tokenize command again"
        )
    tokens = sum(shard.tokens for shard in manifest.shards)
    typer.echo(
        f"{directory}: {len(manifest.shards)} shards, {tokens:,} tokens, all as the manifest says"
    )
    typer.echo(f"  {remark}")
    if against:
        manifests = [manifest, *map(read_manifest, against)]
        if leaks := leaked_documents(manifests):
            raise DataError(
                f"{'; '.join(leaks)}; tokenise with the same fractions, and remove duplicates"
            )
        typer.echo(
            f"  no document is held out in one of {len(manifests)} directories and trained on in "
            f"another"
        )


@app.command()
def stats(directory: ShardDirectory) -> None:
    """Count documents, tokens and bytes per token by split and source, and lengths of documents.

    Example: python -m data_pipeline stats data/demo/shards
    """
    from rich.console import Console

    from data_pipeline.shards.manifest import read_manifest
    from data_pipeline.shards.stats import length_histogram, stats_table

    manifest = read_manifest(directory)
    Console(width=200).print(stats_table(manifest))  # as wide as its numbers are: no digit is cut
    typer.echo(length_histogram(manifest))


expand_arguments(app)


def main() -> None:
    """Run the command line; a `DataError` becomes one sentence and exit code 2."""
    unset_empty_variables()
    guard_output()
    try:
        with output_or_refusal():
            app()
    except DataError as error:
        typer.echo(f"error: {shown_in_line(str(error))}", err=True)
        sys.exit(2)
    except OSError as error:
        if error.filename is None:
            raise
        typer.echo(
            f"error: cannot use {shown_in_line(str(error.filename))}: {error.strerror}", err=True
        )
        sys.exit(2)
    except (MemoryError, RuntimeError, ImportError) as error:
        if (sentence := limit_sentence(error)) is None:
            raise
        typer.echo(f"error: {sentence}", err=True)
        sys.exit(2)
    except SystemExit as ended:
        if ended.code == _INTERRUPTED:
            typer.echo(
                "error: interrupted; what is finished is kept: the same command continues", err=True
            )
        raise


def start() -> None:
    """Run the command line in a process of its own.

    There `datasets` need not import torch, which takes seconds and much memory in every worker.
    """
    os.environ.setdefault("USE_TORCH", "0")
    main()


if __name__ == "__main__":
    start()
