"""The verb `download`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from data_pipeline.errors import DataError
from data_pipeline.options import Chunks
from data_pipeline.sources.discovery import parse_chunks


def download(
    source: Annotated[str, typer.Argument(help="slimpajama, openwebtext or tinystories.")],
    out: Annotated[Path, typer.Option(help="The directory for the files.")],
    hub_id: Annotated[str | None, typer.Option(help="Another repository with the same files.")] = None,
    mirror: Annotated[
        Path | None,
        typer.Option(help="A directory with the same files, in place of the hub."),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the repository.")] = None,
    splits: Annotated[str, typer.Option(help="The hub's own splits: train,validation,test.")] = "train",
    chunks: Chunks = "",
    fraction: Annotated[float, typer.Option(help="Of the files of every chunk, this share.")] = 1.0,
    include: Annotated[
        list[str] | None, typer.Option(help="Pattern of names, in place of the source's own (repeatable).")
    ] = None,
    workers: Annotated[int, typer.Option(help="Files at a time.")] = 8,
) -> None:
    """Fetch a corpus from the Hugging Face hub, checked against its listing; again: what is missing.

    Example: python -m data_pipeline download slimpajama --out data/slimpajama --fraction 0.2
    """
    from data_pipeline.io.progress import DownloadLine
    from data_pipeline.sources import hub
    from data_pipeline.sources.catalogue import Wanted

    if mirror is not None and (hub_id or revision):
        raise DataError("--mirror takes the place of the hub: leave out --hub-id and --revision")
    wanted = Wanted(
        splits=tuple(part.strip() for part in splits.split(",")),
        include=tuple(include or ()),
        chunks=parse_chunks(chunks) if chunks else frozenset(),
        fraction=fraction,
    )
    with DownloadLine() as line:
        if mirror is None:
            done = hub.download(source, out, wanted, line.update, hub_id, revision, workers)
        else:
            done = hub.take_from_mirror(source, out, wanted, mirror, line.update, workers)
    size = sum(file.size for file in done.files)
    commit = done.revision or "no known commit"
    typer.echo(
        f"{out}: {len(done.files):,} files, {size / 1e9:,.2f} GB of {done.repository} at {commit}, checked"
    )
