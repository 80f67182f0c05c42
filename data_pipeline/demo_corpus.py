"""Demo corpus of English prose from the running Python: no download, the same for the same Python.

Sources: PydocTopics (the language reference as `help()` shows it), StdlibDocstrings and
StdlibComments (docstrings and block comments of the standard library's .py files, which are parsed,
never imported). Paragraphs that are mostly code are dropped, and every paragraph is kept once in
the whole corpus. Written as SlimPajama is: `*.jsonl.zst` with `{"text": ..., "meta":
{"redpajama_set_name": SOURCE}}`.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zstandard
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from data_pipeline.errors import DataError
from data_pipeline.io.files import read_form, sha256_file, to_json, write_atomically
from data_pipeline.io.forms import Count

MINIMUM_BYTES = 1_500_000
RECORD_NAME = "corpus.json"
_FILE = re.compile(r"demo-\d{5}\.jsonl\.zst")

_VERSION = 1
# Test suites are left out: some distributions ship them, some do not, and they are mostly code.
_SKIPPED_DIRECTORIES = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "pydoc_data",
}
_DOCUMENT_CHARACTERS = 1000
_SHORTEST_REST = 200
_WORD = re.compile(r"[\"'(*`\[]*[A-Za-z]+(?:[-'/][A-Za-z]+)*[.\"',;:!?)*`\]]*")


class _Record(TypedDict):
    version: Count
    python: str
    files: Count
    outputs: dict[str, str]
    bytes: dict[str, Count]
    documents: dict[str, Count]


_RECORD = TypeAdapter(_Record)


@dataclass(frozen=True)
class Corpus:
    """Demo corpus on disk: bytes of text and documents per source; whether it was made now."""

    bytes_per_source: dict[str, int]
    documents_per_source: dict[str, int]
    built: bool


def build_corpus(directory: Path, num_files: int) -> Corpus:
    """Write the corpus unless the directory holds the same one already.

    Raises:
        DataError: If the installation has too little text, or the directory holds something else.
    """
    if num_files < 1:
        raise DataError(f"--files {num_files} must be at least 1")
    made_from: dict[str, Any] = {"version": _VERSION, "python": sys.version, "files": num_files}
    record_path = directory / RECORD_NAME
    if record_path.exists():
        record = read_form(record_path, _RECORD)
        same = all(record.get(key) == value for key, value in made_from.items())
        paths = {directory / name: digest for name, digest in record["outputs"].items()}
        if same and all(
            path.is_file() and sha256_file(path) == digest for path, digest in paths.items()
        ):
            return Corpus(record["bytes"], record["documents"], built=False)
    elif directory.is_dir():
        temporary = re.compile(r"(demo-\d{5}\.jsonl\.zst|corpus\.json)\..*\.tmp")
        for name in (path.name for path in directory.iterdir()):
            if not (_FILE.fullmatch(name) or temporary.fullmatch(name)):
                raise DataError(
                    f"{directory} holds {name}, which demo-corpus did not make; choose another "
                    f"directory"
                )
    written = _write(directory, num_files, collect_documents(Path(sysconfig.get_path("stdlib"))))
    write_atomically(record_path, to_json(made_from | written))
    return Corpus(written["bytes"], written["documents"], built=True)


def _write(directory: Path, num_files: int, documents: list[tuple[str, str]]) -> dict[str, Any]:
    """Distribute the documents over the files, every source in every file; return counts."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for source, text in documents:
        counts[source] += 1
        sizes[source] += len(text.encode())
    if sizes.total() < MINIMUM_BYTES:
        raise DataError(
            f"this Python yields {sizes.total():,} bytes of text, {MINIMUM_BYTES:,} are needed; "
            f"use a Python with its complete standard library (not a minimal or zipped one)"
        )
    outputs = {}
    for number in range(num_files):
        path = directory / f"demo-{number:05d}.jsonl.zst"
        lines = [
            json.dumps({"text": text, "meta": {"redpajama_set_name": source}}, ensure_ascii=False)
            for source, text in documents[number::num_files]
        ]
        write_atomically(
            path,
            zstandard.ZstdCompressor().compress("".join(f"{line}\n" for line in lines).encode()),
        )
        outputs[path.name] = sha256_file(path)
    for path in directory.iterdir():
        if _FILE.fullmatch(path.name) and path.name not in outputs:
            path.unlink()  # left over from a corpus of more files
    return {"outputs": outputs, "bytes": sizes, "documents": counts}


def collect_documents(library: Path) -> list[tuple[str, str]]:
    """Collect (source, text) of every document of the standard library, in a fixed order.

    Raises:
        DataError: If the library has no pydoc topics.
    """
    topics_path = library / "pydoc_data" / "topics.py"
    if not topics_path.is_file():
        raise DataError(
            f"this Python has no pydoc topics ({topics_path}); install its complete standard "
            f"library"
        )
    modules = [
        path
        for path in sorted(library.rglob("*.py"))
        if not _SKIPPED_DIRECTORIES.intersection(path.relative_to(library).parts)
    ]
    seen: set[str] = set()
    documents = [
        ("PydocTopics", text)
        for topic in _topics(topics_path)
        for text in _documents([topic], seen)
    ]
    # The trees are not kept: hundreds of them make Python's garbage collector the slowest part.
    read = [(source, list(docstrings(tree))) for path in modules for source, tree in parsed(path)]
    for _, module_docstrings in read:
        documents += [("StdlibDocstrings", text) for text in _documents(module_docstrings, seen)]
    for source, _ in read:
        documents += [
            ("StdlibComments", text) for text in _documents(_comment_blocks(source), seen)
        ]
    return documents


def _topics(path: Path) -> list[str]:
    """Read the strings of `topics = {...}`, sorted by name, as a literal that is not executed."""
    nodes = (
        n for n in ast.parse(path.read_bytes()).body if isinstance(n, (ast.Assign, ast.AnnAssign))
    )
    topics: dict[str, str] = next(
        (ast.literal_eval(node.value) for node in nodes if node.value is not None), {}
    )
    return [topics[name] for name in sorted(topics)]


def parsed(path: Path) -> Iterator[tuple[str, ast.Module]]:
    """Yield (source text, tree); nothing of the few files that are not Python or not UTF-8."""
    try:
        source = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield source, ast.parse(source)
    except (SyntaxError, ValueError):
        return


def docstrings(node: ast.AST) -> Iterator[str]:
    """Yield docstrings in the order of the file; no expression can hold a definition."""
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        docstring = ast.get_docstring(node)
        if docstring:
            yield docstring
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):
            yield from docstrings(child)


def _comment_blocks(source: str) -> Iterator[str]:
    """Yield runs of at least two comment lines, without their signs."""
    block: list[str] = []
    for line in [*source.splitlines(), ""]:
        stripped = line.strip()
        if stripped.startswith("#"):
            block.append(stripped.lstrip("#").removeprefix(" "))
        else:
            if len(block) > 1:
                yield "\n".join(block)
            block = []


def _documents(texts: Iterable[str], seen: set[str]) -> Iterator[str]:
    """Join paragraphs that are prose and new into documents of about 1,000 characters."""
    kept: list[str] = []
    for paragraph in _paragraphs(texts):
        key = " ".join(paragraph.split())
        if key not in seen and _is_prose(paragraph):
            seen.add(key)
            kept.append(paragraph)
            if sum(map(len, kept)) >= _DOCUMENT_CHARACTERS:
                yield "\n\n".join(kept)
                kept = []
    # What is left of a module with hardly any text is mostly a generated line.
    if sum(map(len, kept)) >= _SHORTEST_REST:
        yield "\n\n".join(kept)


def _paragraphs(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        # A docstring may spell out a lone surrogate, which is not text.
        encodable = text.encode("utf-8", "replace").decode()
        for paragraph in re.split(r"\n[ \t]*\n", inspect.cleandoc(encodable)):
            yield inspect.cleandoc(paragraph)


def _is_prose(paragraph: str) -> bool:
    """Return whether a paragraph is prose: mostly words, at least four, no doctest."""
    parts = paragraph.split()
    if len(parts) < 4 or ">>>" in paragraph:
        return False
    return sum(_WORD.fullmatch(part) is not None for part in parts) >= 0.75 * len(parts)
