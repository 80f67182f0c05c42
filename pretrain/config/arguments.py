"""The arguments of a command that takes a configuration; needs nothing but typer."""

from __future__ import annotations

from typing import Annotated

import typer

ConfigArgument = Annotated[
    str,
    typer.Argument(help="A name in pretrain/configs (demo, say) or a YAML file."),
]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(help="section.key=value, as often as needed.", metavar="[section.key=value]..."),
]
