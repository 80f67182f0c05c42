"""Survey of the files that hold text, and the beginning of a data set."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from data_pipeline.sources.discovery import InputFile, Inputs

MOST_BYTES = 64_000_000
"""Text that is taken of a data set, which may be larger than this machine's disk."""


def survey(
    files: Sequence[InputFile], text_key: str, named: Sequence[str]
) -> tuple[list[InputFile], list[str], int]:
    """Read the first document of every local file to tell texts from other files.

    Args:
        files: The inputs.
        text_key: Keys of the text in a record.
        named: The inputs as they were given: files, or directories of them.

    Returns:
        The files that hold text, lines that name the keys of it and the other files, and how many
        tables without the column are among these.

    Raises:
        NoTextColumn: a table that was named itself has no such column.
    """
    from data_pipeline.errors import NoTextColumn
    from data_pipeline.io.home import expand_home
    from data_pipeline.sources.discovery import PassedOver, RecordKeys, describe
    from data_pipeline.sources.records import Document, RecordReader

    keys: Counter[str] = Counter()
    lost = {}
    tables = 0
    for file in files:
        why = "no lines"
        try:
            for item in RecordReader(file, RecordKeys(text_key)):
                if isinstance(item, Document):
                    keys[item.key] += 1
                    break
                why = item.detail
            else:
                lost[file.name] = PassedOver(file.name, why)
        except NoTextColumn:
            if any(file.path == expand_home(entry) for entry in named):
                raise
            tables += 1
            lost[file.name] = PassedOver(file.name, "no column of the text")
    key_counts = {f"`{key}`": count for key, count in keys.most_common() if key}
    single = len(key_counts) == 1
    listed = " and ".join(
        key_counts if single else [f"{key} (of {n})" for key, n in key_counts.items()]
    )
    sentences = [f"text is read from the key{'' if single else 's'} {listed}"] if key_counts else []
    read = [file for file in files if file.name not in lost]
    return read, [*sentences, *describe(lost.values())], tables


def written_beginning(inputs: Inputs, text_key: str, out: Path) -> Path:
    """Write the first MOST_BYTES of a data set's text to a file below `out`, and return its path.

    Args:
        text_key: Keys of the text in a record.
        out: Directory of the trial.
    """
    import orjson

    from data_pipeline.io.files import write_atomically
    from data_pipeline.sources.discovery import RecordKeys
    from data_pipeline.sources.records import read_documents

    keys = RecordKeys(text_key)
    version = f"{inputs.root} {inputs.files[0].version}"
    digest = hashlib.sha256(version.encode()).hexdigest()[:8]
    path = out / f"texts-{digest}" / "beginning.jsonl"
    if path.exists():
        return path
    lines: list[bytes] = []
    size = 0
    for document in chain.from_iterable(read_documents(file, keys) for file in inputs.files):
        lines.append(orjson.dumps({keys.text_keys[0]: document.text}) + b"\n")
        size += len(lines[-1])
        if size >= MOST_BYTES:
            break
    write_atomically(path, b"".join(lines))
    return path


def linked(files: Sequence[InputFile], out: Path) -> Path:
    """Return a directory below `out` with a link to each file, under the file's name.

    Args:
        files: Files of this machine.
        out: Directory of the trial.
    """
    names = "\n".join(file.name for file in files)
    directory = out / f"texts-{hashlib.sha256(names.encode(errors='replace')).hexdigest()[:8]}"
    for file in files:
        link = directory / file.name
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(Path(str(file.path)).resolve())
    return directory
