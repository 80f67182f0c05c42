"""`python -m data_pipeline VERB`: text to tokenised shards. See docs/data.md."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from data_pipeline.download_verb import download
from data_pipeline.errors import DataError
from data_pipeline.options import Inputs, ShardDirectory, SourceKey, TextKey
from data_pipeline.sources import RecordKeys, find_inputs
from data_pipeline.tokenize_verbs import merge_manifests, tokenize

app = typer.Typer(
    help="Text to tokens: build a corpus, train a tokenizer, write Megatron shards, check them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_KEYS = RecordKeys()


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
        typer.echo(f"  {source}: {corpus.documents_per_source[source]:,} documents, {size / 1e6:.2f} MB")


@app.command("train-tokenizer")
def train_tokenizer(
    inputs: Inputs,
    out: Annotated[Path, typer.Option(help="Prefix: PREFIX.model and PREFIX.json are written.")],
    vocab_size: Annotated[
        int, typer.Option(help="Number of pieces, the 256 bytes and 3 reserved ids included.")
    ],
    model_type: Annotated[str, typer.Option(help="unigram or bpe.")] = "unigram",
    sample_bytes: Annotated[
        int, typer.Option(help="Train on about this much text, evenly from all files.")
    ] = (100_000_000),
    seed: Annotated[int, typer.Option(help="Chooses the documents that are held out for the check.")] = 0,
    text_key: TextKey = _KEYS.text,
    source_key: SourceKey = _KEYS.source,
) -> None:
    """Train a lossless SentencePiece model and check its round trip on held-out documents.

    Example: python -m data_pipeline train-tokenizer data/demo/corpus --out data/demo/tokenizer --vocab-size
    4096
    """
    from data_pipeline import tokenizer

    settings = tokenizer.TrainerSettings(vocab_size, model_type, sample_bytes, seed)
    report, trained = tokenizer.train_tokenizer(
        find_inputs(inputs), out, settings, RecordKeys(text_key, source_key)
    )
    typer.echo(f"{out}.model: " + ("trained" if trained else "already up to date"))
    typer.echo(
        f"  {report['vocab_size']:,} pieces, {report['bytes_per_token']:.2f} bytes/token and "
        f"{report['round_trip_failures']} round-trip failures on {report['held_out_documents']} documents"
    )


app.command()(download)
app.command()(tokenize)
app.command("merge-manifests")(merge_manifests)


@app.command()
def verify(
    directory: ShardDirectory,
    tokenizer: Annotated[Path | None, typer.Option(help="A model that must be the directory's own.")] = None,
) -> None:
    """Rehash, reopen with megatron-core's reader, recount, and decode a sample; names every damaged file.

    Example: python -m data_pipeline verify data/demo/shards
    """
    from data_pipeline.manifest import read_manifest
    from data_pipeline.verify import find_problems

    manifest = read_manifest(directory)
    problems = find_problems(manifest, tokenizer)
    if problems:
        for problem in problems[1:]:
            typer.echo(f"error: {problem}", err=True)
        raise DataError(
            f"{problems[0]}; delete the damaged files and run the same tokenize command: it remakes them"
        )
    tokens = sum(shard.tokens for shard in manifest.shards)
    typer.echo(f"{directory}: {len(manifest.shards)} shards, {tokens:,} tokens, all as the manifest says")


@app.command()
def stats(directory: ShardDirectory) -> None:
    """Documents, tokens and bytes per token for every split and source.

    Example: python -m data_pipeline stats data/demo/shards
    """
    from rich.console import Console

    from data_pipeline.manifest import read_manifest
    from data_pipeline.stats import stats_table

    console = Console()
    # A pipe has no width of its own; the table should not be squeezed for one.
    (console if console.is_terminal else Console(width=100)).print(stats_table(read_manifest(directory)))


def main() -> None:
    """Run the command line; a `DataError` becomes one sentence and exit code 2."""
    try:
        app()
    except DataError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        typer.echo("error: interrupted; finished shards are kept", err=True)
        sys.exit(130)


if __name__ == "__main__":
    main()
