"""Python files of this repository as syntax trees, each parsed once a process."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


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
