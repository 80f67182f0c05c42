"""Count lines of code: lines that are neither blank nor comments nor docstrings.

    python -m tools.count_code              # product with its tools, and tests, each on a line
    python -m tools.count_code pretrain     # any folders

Only Python files that git tracks are counted.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from pathlib import Path

PRODUCT = (
    "pretrain",
    "data_pipeline",
    "megatron_patches",
    "benchmarks",
    "tools",
    "ds_configs",
    "slurm",
)
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(text: str) -> int:
    """Return the number of lines of a module that hold code."""
    rows: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            rows.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        constant = node.value if isinstance(node, ast.Expr) else None
        if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
            rows.difference_update(range(constant.lineno, (constant.end_lineno or 0) + 1))
    return len(rows)


def count(*folders: str) -> int:
    """Return the lines of code of the tracked Python files in folders."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", *folders], check=True, capture_output=True, text=True
    )
    paths = [Path(name) for name in listed.stdout.split("\0") if name.endswith(".py")]
    return sum(code_lines(path.read_text(encoding="utf-8")) for path in paths)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(count(*sys.argv[1:]))
    else:
        print("product and tools", count(*PRODUCT))
        print("tests", count("tests"))
