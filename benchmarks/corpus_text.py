"""Text for benchmarks in SlimPajama's format, from this Python installation and its installed packages."""

from __future__ import annotations

import ast
import json
import random
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

import zstandard

# Enough that the documents are many thousands; reading all packages would take minutes.
_PROSE_BYTES = 12_000_000
_CODE_BYTES = 4_000_000
# SlimPajama has 5.2 % of RedPajamaGithub.
_CODE_SHARE = 0.05
_SHORTEST = 300


def write_corpus(directory: Path, megabytes: int, files: int) -> list[Path]:
    """`files` files of `.jsonl.zst` with so many MB of text in all, unless they are there.

    Documents are the docstrings of a module, one after the other, and with a share of 5 % whole modules; they
    are shuffled, and again for every repetition that is needed.
    """
    paths = [directory / f"text-{megabytes:05d}-{number:04d}.jsonl.zst" for number in range(files)]
    if all(path.exists() for path in paths):
        return paths
    directory.mkdir(parents=True, exist_ok=True)
    prose, code = _documents()
    generator = random.Random(1234)
    each = megabytes * 1_000_000 // files
    for path in paths:
        lines, size = [], 0
        while size < each:
            source, texts = ("Code", code) if generator.random() < _CODE_SHARE else ("Prose", prose)
            text = generator.choice(texts)
            lines.append(
                json.dumps({"text": text, "meta": {"redpajama_set_name": source}}, ensure_ascii=False)
            )
            size += len(text.encode())
        path.write_bytes(zstandard.compress("".join(f"{line}\n" for line in lines).encode()))
    return paths


def _documents() -> tuple[list[str], list[str]]:
    """(prose, code)."""
    prose: list[str] = []
    code: list[str] = []
    sizes = [0, 0]
    for path in _modules():
        if sizes[0] >= _PROSE_BYTES:
            break
        content = path.read_text(encoding="utf-8", errors="ignore")
        text = "\n\n".join(_docstrings(content))
        if len(text) >= _SHORTEST:
            prose.append(text)
            sizes[0] += len(text)
        if sizes[1] < _CODE_BYTES and _SHORTEST <= len(content) < 50_000:
            code.append(content)
            sizes[1] += len(content)
    return prose, code


def _modules() -> Iterator[Path]:
    """Modules of the standard library, then of the installed packages, each shuffled in a fixed way."""
    for kind in ("stdlib", "purelib"):
        paths = sorted(Path(sysconfig.get_path(kind)).rglob("*.py"))
        random.Random(kind).shuffle(paths)
        yield from (path for path in paths if kind == "purelib" or "site-packages" not in path.parts)


def _docstrings(content: str) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(content)
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and (
            docstring := ast.get_docstring(node)
        ):
            yield docstring
