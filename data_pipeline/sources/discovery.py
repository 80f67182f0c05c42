"""Inputs of the pipeline: the files that are read, every entry that is not, or a data set's shards.

Inputs are files and directories of this machine, or one data set.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from data_pipeline.errors import DataError, NoTextColumn
from data_pipeline.io.files import refusing
from data_pipeline.io.home import expand_home
from data_pipeline.sources.data_sets import DataSet, DataShard, is_data_set, open_data_set
from data_pipeline.sources.formats import (
    FORMATS,
    JSON_AS_A_WHOLE,
    KNOWN_ENDINGS,
    TABLE_NAMES,
    foreign_name,
    format_of,
    is_whole_json,
)
from data_pipeline.sources.hub import UNFINISHED_NAME

# Files beside the data of a download that are not meant to be read; the last two are our own.
# A name with an ending of data is data, except for texts: README.txt and README_de.md are not data,
# readme_corpus.jsonl and readme.csv are.
_DATA = "|".join(re.escape(ending) for ending in (*FORMATS, *TABLE_NAMES) if ending != ".md")
_COMPANIONS = re.compile(
    rf"(readme|licen[cs]e)(\.txt|(?!.*({_DATA})$)[._-].*)?"
    r"|(download|corpus)\.json",
    re.IGNORECASE,
)
COMPANION = "left out"
_SHOWN_NAMES, _SHOWN_CHARACTERS = 20, 40
_JSON_BYTES = 1 << 12


@dataclass(frozen=True)
class RecordKeys:
    """Keys of a record; a dot goes one object down, unless the record has a key of that very name.

    Attributes:
        text: Key of the text, or several with `|` between them: the first that a record has.
        source: Key of the name of the text's source.
        default_source: Source of a record that names none.
    """

    text: str = "text"
    source: str = "meta.redpajama_set_name"
    default_source: str = "default"

    @property
    def text_keys(self) -> tuple[str, ...]:
        """Return the keys of the text, the preferred ones first."""
        return tuple(self.text.split("|"))

    def holds_text(self, column: str) -> bool:
        """Return whether the text may lie in a column of this name."""
        return any(may_hold(column, key) for key in self.text_keys)

    def require_text(self, columns: Iterable[str], place: object) -> None:
        """Raise NoTextColumn if the text cannot lie in any of the columns.

        Args:
            place: File or data set, for the message.
        """
        names = [*columns]
        if not any(map(self.holds_text, names)):
            raise NoTextColumn(
                f"{place} has no column {self.either_text_key()}, it has {shortened_names(names)}; "
                f"name the column of the text with --text-key, or leave it out"
            )

    def either_text_key(self) -> str:
        """Return the keys of the text as words: "a", "b" or "c"."""
        quoted = [f'"{key}"' for key in self.text_keys]
        return " or ".join([", ".join(quoted[:-1]), quoted[-1]] if len(quoted) > 1 else quoted)


def may_hold(column: str, key: str) -> bool:
    """Return whether the key's value may lie in the column."""
    return key == column or key.startswith(f"{column}.")


def shortened_names(names: Sequence[str]) -> str:
    """Join names for a message; without a header a table's first text stands in place of them."""
    shown = [
        name if len(name) <= _SHOWN_CHARACTERS else f"{name[:_SHOWN_CHARACTERS]}…"
        for name in names[:_SHOWN_NAMES]
    ]
    return ", ".join(shown + ["…"] * (len(names) > _SHOWN_NAMES)) or "none"


def is_wanted(source: str, only: tuple[str, ...], never: tuple[str, ...]) -> bool:
    """Return whether documents of a source are used.

    Args:
        only: Sources to use; empty means all.
        never: Sources not to use.
    """
    return source not in never and (not only or source in only)


@dataclass(frozen=True)
class InputFile:
    """Input file, or shard of a data set.

    Attributes:
        path: File of this machine, or shard of a data set.
        name: Path below the inputs' common directory, wherever that lies.
        size: Bytes on disk; 0 for a shard of a data set.
    """

    path: Path | DataShard
    name: str
    size: int

    @property
    def version(self) -> str:
        """Return the version of a data set's shard; empty for a file."""
        return self.path.version if isinstance(self.path, DataShard) else ""

    def open(self) -> BinaryIO:
        """Open the bytes of a file, unbuffered."""
        return cast(BinaryIO, open(cast(Path, self.path), "rb", buffering=0))


@dataclass(frozen=True)
class PassedOver:
    """Entry that is not read, and why; COMPANION for those that nobody expects to be read."""

    name: str
    reason: str

    @property
    def expected(self) -> bool:
        """Return whether nobody expects the entry to be read."""
        return self.reason == COMPANION


@dataclass(frozen=True)
class Inputs:
    """Input files, and every entry beside them that is not read, both sorted by name.

    Attributes:
        data_set: Data set whose shards the inputs are; None for files.
    """

    files: list[InputFile]
    passed_over: tuple[PassedOver, ...] = ()
    data_set: DataSet | None = None

    @property
    def root(self) -> str:
        """Return the directory of the files, or the place of the data set."""
        if self.data_set is not None:
            return self.data_set.address
        return str(Path(str(self.files[0].path)[: -len(self.files[0].name)]))


def find_inputs(inputs: Sequence[str | Path], keys: RecordKeys | None = None) -> Inputs:
    """Find the files among `inputs` and below directories, or open the one data set.

    Args:
        keys: Keys of text and source in a record; the columns of a data set that are read. None
            takes the usual ones.

    Raises:
        DataError: If an input is missing, not a regular file, of an unknown ending, or given twice;
            if there is no input; if there is a data set and anything else; as `open_data_set` and
            `shards_of`.
    """
    data_sets = [entry for entry in map(os.path.expanduser, map(str, inputs)) if is_data_set(entry)]
    if data_sets and len(inputs) > 1:
        raise DataError(
            f"{data_sets[0]} is a data set, and there are other inputs; tokenise each into a "
            f"directory of its own and train on a blend of them"
        )
    if data_sets:
        return shards_of(open_data_set(data_sets[0]), keys or RecordKeys())
    for entry in map(str, inputs):
        if "://" in entry:
            raise DataError(_of_a_store(entry))
    files, passed_over = _find_local([expand_home(entry) for entry in inputs])
    if not files:
        names = ", ".join(map(str, inputs))
        passed_over_lines = "; ".join(describe(passed_over))
        raise DataError(
            f"there is no {KNOWN_ENDINGS} file in {names}"
            + (f" ({passed_over_lines})" if passed_over_lines else "")
        )
    files.sort(key=lambda file: file.name)
    for file, following in itertools.pairwise(files):
        if file.name == following.name:
            raise DataError(f"input {file.path} is given twice; name each file or directory once")
    return Inputs(files, tuple(sorted(passed_over, key=lambda entry: entry.name)))


def shards_of(data_set: DataSet, keys: RecordKeys) -> Inputs:
    """Return the shards of a data set as inputs, after a look at its first row.

    Raises:
        NoTextColumn: If no column may hold the text.
        DataError: If the data set has no rows, or its text is a list.
    """
    columns: tuple[str, ...] = keys.text_keys
    if hasattr(data_set.data, "select_columns"):
        data_set_name = data_set.address or "the data set"
        names = data_set.columns()
        keys.require_text(names, data_set_name)
        columns = tuple(
            name for name in names if keys.holds_text(name) or may_hold(name, keys.source)
        )
        first: Mapping[str, Any] = data_set.first([*columns])
        for key in keys.text_keys:
            if isinstance(first.get(key), list):
                raise DataError(
                    f'{data_set_name}: the column "{key}" holds lists, not text; name a column '
                    f"of text with --text-key: it has {shortened_names(names)}"
                )
    shards = data_set.shards(columns)
    return Inputs([InputFile(shard, name, 0) for name, shard in shards.items()], (), data_set)


def _of_a_store(url: str) -> str:
    """Describe an input that is not on this machine, with the remedy."""
    if "@" in url.split("/")[2] and not url.startswith("hf://"):
        return f"input {url.partition('://')[0]}://… holds credentials; leave them out"
    return (
        f"input {url} is not on this machine; download it first, or let the package datasets read "
        f"it: hf:NAME for a data set of the hub, else json:{url}, parquet:… or another of its "
        f"readers"
    )


def describe(passed_over: Iterable[PassedOver], at_most: int = 5) -> list[str]:
    """Describe entries by reason, in lines for the console.

    Args:
        at_most: Number of names given for each reason.
    """
    entries = list(passed_over)
    lines = []
    for reason, count in sorted(Counter(entry.reason for entry in entries).items()):
        names = [entry.name for entry in entries if entry.reason == reason]
        rest = f" and {count - at_most:,} more" if count > at_most else ""
        title = "left out" if reason == COMPANION else f"not read ({reason})"
        lines.append(f"{title}: {', '.join(names[:at_most])}{rest}")
    return lines


def _find_local(inputs: list[Path]) -> tuple[list[InputFile], list[PassedOver]]:
    """Find the files among paths of this machine and below the directories among them."""
    paths: list[Path] = []
    passed_over: list[PassedOver] = []
    for entry in inputs:
        if os.path.isdir(entry):  # unlike Path.is_dir, it never raises
            for below in _entries_below(entry):
                if isinstance(below, Path):
                    paths.append(below)
                else:
                    passed_over.append(below)
            continue
        reason = _why_not_file(entry)
        if reason in ("broken link", "not a directory"):
            raise DataError(f"input {entry} does not exist; give a file or a directory of files")
        if reason is not None and format_of(entry.name) is None:
            foreign = foreign_name(entry.name)
            unknown = f"has an unknown ending; known are {KNOWN_ENDINGS}"
            raise DataError(f"input {entry} {f'is {foreign}' if foreign else unknown}")
        if reason is not None:
            passed_over.append(PassedOver(str(entry), reason))
        else:
            paths.append(entry)
    # abspath, not resolve: the hub's cache is symlinks to files whose own names say nothing.
    parents = [os.path.abspath(entry if os.path.isdir(entry) else entry.parent) for entry in inputs]
    root = os.path.commonpath(parents or ["/"])
    files: list[InputFile] = []
    read_as: dict[tuple[int, int], str] = {}
    # Links come last: of a file and a link to it, the file is read.
    absolute = (Path(os.path.abspath(path)) for path in paths)
    for path in sorted(absolute, key=lambda path: (path.is_symlink(), path)):
        with refusing(f"read {path}"):
            status = path.stat()
        name = path.relative_to(root).as_posix()
        first = read_as.setdefault((status.st_dev, status.st_ino), name)
        if first == name:
            files.append(InputFile(path, name, status.st_size))
        else:
            passed_over.append(PassedOver(name, f"the same file as {first}"))
    return files, passed_over


def _entries_below(root: Path) -> Iterator[Path | PassedOver]:
    """Yield the files below a directory, and the entries that are not read.

    Links to directories are followed, and a directory reached twice is read once. Links wait until
    no real directories are left, so that a directory is read under its own name.
    """
    read_as: dict[tuple[int, int], str] = {}
    real = [root]
    links: list[Path] = []
    while real or links:
        directory = real.pop() if real else links.pop(0)
        name = directory.relative_to(root).as_posix()
        try:
            status = os.stat(directory)
            first = read_as.setdefault((status.st_dev, status.st_ino), name)
            if first != name:
                yield PassedOver(name, f"the same directory as {first}")
                continue
            children = sorted(os.listdir(directory))
        except OSError as error:
            yield PassedOver(name, (error.strerror or str(error)).lower())
            continue
        for child in children:
            path = directory / child
            is_directory = os.path.isdir(path)
            if child.startswith(".") or (not is_directory and _COMPANIONS.fullmatch(child)):
                yield PassedOver(path.relative_to(root).as_posix(), COMPANION)
            elif is_directory:
                (links if os.path.islink(path) else real).append(path)
            elif (reason := _why_not_file(path)) is not None:
                yield PassedOver(path.relative_to(root).as_posix(), reason)
            else:
                yield path


def _why_not_file(path: Path) -> str | None:
    """Return why a file is not read, None if it is; a pipe, which never answers, is not opened."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return "broken link"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    if not stat.S_ISREG(status.st_mode):
        kinds = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        return kinds.get(stat.S_IFMT(status.st_mode), "a device")
    if path.name == UNFINISHED_NAME:
        return "its download has not ended; run the same download command again"
    if format_of(path.name) is None:
        return foreign_name(path.name) or "unknown ending"
    if status.st_size == 0:
        return "empty"
    if path.suffix.lower() == ".json":
        with contextlib.suppress(OSError), open(path, "rb") as stream:
            if is_whole_json(stream.readline(_JSON_BYTES), stream.readline(_JSON_BYTES)):
                return JSON_AS_A_WHOLE
    return None
