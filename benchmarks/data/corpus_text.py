"""Text for benchmarks in SlimPajama's format, from this Python and its installed packages."""

from __future__ import annotations

import json
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import zstandard

from data_pipeline.demo_corpus import docstrings, parsed

# Of the text; there is not enough prose on a machine for SlimPajama's 5 %.
_CODE_SHARE = 0.3
_SHORTEST = 300
_RESERVED = re.compile("<0x|<unk>|<s>|</s>")


def write_corpus(directory: Path, megabytes: int, files: int) -> list[Path]:
    """Write a corpus of `.jsonl.zst` files, unless it is there.

    Documents are the docstrings of a module, one after the other, and with a share of 30 % whole
    modules. They are shuffled, and none comes twice before all have come once: a tokenizer that
    remembers words has no easier time than with any text of this size. Texts in which a reserved
    piece is written out (`</s>`; seven in a thousand of these, of web text hardly any) are left
    out: ours gives them to SentencePiece, and Megatron-LM's fast tool makes control ids of them, so
    that the ids could not be compared.

    Args:
        directory: made if it is not there.
        megabytes: of text in all, before compression.
        files: among which it is divided.

    Returns:
        The files' paths.
    """
    paths = [directory / f"text-{megabytes:05d}-{number:04d}.jsonl.zst" for number in range(files)]
    if all(path.exists() for path in paths):
        return paths
    directory.mkdir(parents=True, exist_ok=True)
    documents = _endless(megabytes * 1_000_000)
    each = megabytes * 1_000_000 // files
    for path in paths:
        lines, size = "", 0
        while size < each:
            source, text = next(documents)
            record = {"text": text, "meta": {"redpajama_set_name": source}}
            lines += json.dumps(record, ensure_ascii=False) + "\n"
            size += len(text.encode())
        path.write_bytes(zstandard.compress(lines.encode()))
    return paths


def _endless(size: int) -> Iterator[tuple[str, str]]:
    """Yield (source, text) of documents of `size` characters at most, shuffled, again and again."""
    documents: list[tuple[str, str]] = []
    left = {"Prose": size * (1 - _CODE_SHARE), "Code": size * _CODE_SHARE}
    modules: list[Path] = []
    for kind in ("stdlib", "purelib"):
        paths = sorted(Path(sysconfig.get_path(kind)).rglob("*.py"))
        random.Random(kind).shuffle(paths)
        modules += (
            path for path in paths if kind == "purelib" or "site-packages" not in path.parts
        )
    for content, tree in (module for path in modules for module in parsed(path)):
        if left["Prose"] <= 0:
            break
        code = content if len(content) < 50_000 else ""
        for source, text in (("Prose", "\n\n".join(docstrings(tree))), ("Code", code)):
            if left[source] > 0 and len(text) >= _SHORTEST and not _RESERVED.search(text):
                documents.append((source, text))
                left[source] -= len(text)
    generator = random.Random(1234)
    while True:
        generator.shuffle(documents)
        yield from documents
