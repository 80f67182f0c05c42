"""Paths that begin with ~, in `--out=~/x` and `run.directory=~/x`, and empty variables."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import typer

_MEANINGFUL = ("_VISIBLE_DEVICES", "_PROXY")
"""Ends of the names of variables that say something by being empty: no GPU, and no proxy."""


def expand_home(path: str | os.PathLike[str]) -> Path:
    """Replace ~ or ~NAME at the beginning of a path by the home directory it stands for."""
    return Path(os.path.expanduser(path))


def unset_empty_variables() -> None:
    """Remove empty variables from the environment of this process and its children.

    Job scripts export variables that they have no value for; called before anything reads one.
    """
    for name, value in list(os.environ.items()):
        if not value and not name.upper().endswith(_MEANINGFUL):
            del os.environ[name]


def expand_arguments(app: typer.Typer) -> None:
    """Expand ~ in every path among the arguments and options of a command line."""
    for command in app.registered_commands:
        assert command.callback is not None
        command.callback = _with_paths_expanded(command.callback)
    for group in app.registered_groups:
        assert group.typer_instance is not None
        expand_arguments(group.typer_instance)


def _with_paths_expanded(verb: Callable[..., Any]) -> Callable[..., Any]:
    # typer makes the options from the signature, which `wraps` preserves.
    @functools.wraps(verb)
    def call(**arguments: Any) -> Any:
        return verb(**{name: _expanded(value) for name, value in arguments.items()})

    return call


def _expanded(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_expanded(item) for item in value]
    return expand_home(value) if isinstance(value, Path) else value
