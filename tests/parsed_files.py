"""Python files of this repository as syntax trees, each parsed once a process."""

from __future__ import annotations

import ast
import os
from functools import cache
from pathlib import Path


def python_files(folder: Path) -> list[Path]:
    """Every Python file of a folder, in order.

    Without slurm/code, whose copies jobs make, and tests remove, meanwhile.
    """
    paths = []
    for directory, folders, names in os.walk(folder):
        if Path(directory).name == "slurm" and "code" in folders:
            folders.remove("code")
        paths += [Path(directory, name) for name in names if name.endswith(".py")]
    return sorted(paths)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Every node of a file, as `ast.walk` yields them."""
    return tuple(ast.walk(parsed(path)))


@cache
def texts(path: Path) -> frozenset[str]:
    """Every string in a file but docstrings; of an f-string, its fixed parts."""
    alone = {id(node.value) for node in nodes(path) if isinstance(node, ast.Expr)}
    return frozenset(
        node.value
        for node in nodes(path)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone
    )
