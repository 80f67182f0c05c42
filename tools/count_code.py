"""Count code: lines that are neither blank nor comments nor docstrings, and tokens.

    python -m tools.count_code              # every part of the repository, lines and tokens
    python -m tools.count_code pretrain     # any folders

Tokens leave out what layout adds: commas and brackets. Only Python files that git tracks are
counted.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from functools import cache
from pathlib import Path
from typing import NamedTuple

PARTS: dict[str, tuple[str, ...]] = {
    "core": ("pretrain", "data_pipeline", "megatron_patches", "ds_configs", "slurm"),
    "laboratory": ("laboratory",),
    "tools": ("benchmarks", "tools", "docs"),
    "tests": ("tests",),
}
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
LAYOUT = frozenset(",()[]{}")


class Size(NamedTuple):
    """Code of a module, or of many."""

    lines: int
    tokens: int


@cache
def size(text: str) -> Size:
    """Return the lines and tokens of a module's code."""
    docstring_rows: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        constant = node.value if isinstance(node, ast.Expr) else None
        if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
            docstring_rows.update(range(constant.lineno, (constant.end_lineno or 0) + 1))
    rows: set[int] = set()
    tokens = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            rows.update(range(token.start[0], token.end[0] + 1))
            tokens += token.start[0] not in docstring_rows and token.string not in LAYOUT
    return Size(len(rows - docstring_rows), tokens)


def count(*folders: str) -> Size:
    """Return the size of all tracked Python files in some folders."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", *folders], check=True, capture_output=True, text=True
    )
    names = [name for name in listed.stdout.split("\0") if name.endswith(".py")]
    sizes = [size(Path(name).read_text(encoding="utf-8")) for name in names]
    return Size(sum(module.lines for module in sizes), sum(module.tokens for module in sizes))


if __name__ == "__main__":
    chosen = {" ".join(sys.argv[1:]): tuple(sys.argv[1:])} if len(sys.argv) > 1 else PARTS
    for name, folders in chosen.items():
        print(f"{name}: {count(*folders).lines} lines, {count(*folders).tokens} tokens")
