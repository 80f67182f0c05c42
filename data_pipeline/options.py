"""Arguments and options of several verbs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Inputs = Annotated[
    list[str],
    typer.Argument(
        help="Files, directories or URLs (s3, gs, https, hf): .jsonl (or .zst, .gz, .xz), .parquet, .txt, .md"
    ),
]
TextKey = Annotated[str, typer.Option(help="Key of the text in a JSON record; a dot goes one object down.")]
SourceKey = Annotated[str, typer.Option(help="Key of the source's name in a JSON record.")]
OnlySource = Annotated[list[str] | None, typer.Option("--source", help="Take this source only (repeatable).")]
ExcludeSource = Annotated[list[str] | None, typer.Option(help="Leave this source out (repeatable).")]
Chunks = Annotated[str, typer.Option(help="Take inputs of directories chunkN only: 1,3-5.")]
DefaultSource = Annotated[str, typer.Option(help="Source of the records that name none.")]
ShardDirectory = Annotated[Path, typer.Argument(help="A directory that tokenize made.")]
