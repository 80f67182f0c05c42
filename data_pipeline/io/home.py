"""Paths that begin with ~, which a shell leaves as it is in `--out=~/x` and `run.directory=~/x`."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import typer


def expand_home(path: str | os.PathLike[str]) -> Path:
    """Return a path with ~ or ~NAME at its beginning as the home directory that it stands for."""
    return Path(os.path.expanduser(path))


def expand_arguments(app: typer.Typer) -> None:
    """Let every path among the arguments and options of a command line begin with ~."""
    for command in app.registered_commands:
        assert command.callback is not None
        command.callback = _with_paths_expanded(command.callback)
    for group in app.registered_groups:
        assert group.typer_instance is not None
        expand_arguments(group.typer_instance)


def _with_paths_expanded(verb: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(verb)
    def call(**arguments: Any) -> Any:
        return verb(**{name: _expanded(value) for name, value in arguments.items()})

    return call


def _expanded(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_expanded(item) for item in value]
    return expand_home(value) if isinstance(value, Path) else value
