"""Origin of a directory of inputs: download.json, with its repository, commit, and every file's hash."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data_pipeline.errors import DataError
from data_pipeline.io.files import read_json, to_json, write_atomically

DOWNLOAD_NAME = "download.json"
# The same for a download that has not finished, which goes on with the commit that it began with.
UNFINISHED_NAME = "download.unfinished.json"
# `tokenize` is given the download's directory, or one of a split or a chunk below it.
_LEVELS = 3


@dataclass(frozen=True)
class RemoteFile:
    """File as the hub lists it: a SHA-256 where the hub knows one, else git's blob id (a SHA-1)."""

    name: str
    size: int
    sha256: str
    blob_id: str


@dataclass(frozen=True)
class Download:
    """Content of download.json. `revision` is a commit, never a branch; empty for a plain directory."""

    source: str
    repository: str
    revision: str
    files: tuple[RemoteFile, ...]

    def origin(self) -> dict[str, Any]:
        """Return the entry `origin` of a shard directory's manifest."""
        return {"source": self.source, "repository": self.repository, "revision": self.revision}


def write_download(directory: Path, download: Download, finished: bool) -> None:
    """Write DIR/download.json when the download is finished, and DIR/download.unfinished.json until then."""
    content = to_json(asdict(download))
    path = directory / (DOWNLOAD_NAME if finished else UNFINISHED_NAME)
    if not path.exists() or path.read_bytes() != content:
        write_atomically(path, content)
    if finished:
        (directory / UNFINISHED_NAME).unlink(missing_ok=True)


def read_download(directory: Path, name: str = DOWNLOAD_NAME) -> Download | None:
    """Read DIR/download.json; None if there is none.

    Raises:
        DataError: the file is no such record.
    """
    path = directory / name
    if not path.is_file():
        return None
    value = read_json(path)
    try:
        return Download(**(value | {"files": tuple(RemoteFile(**entry) for entry in value["files"])}))
    except (KeyError, TypeError) as error:
        raise DataError(f"{path} is not what `download` writes ({error}); download again") from error


def find_origin(root: Path) -> dict[str, Any] | None:
    """Return the origin of the inputs below `root`: from its download.json, or one a few directories up."""
    for directory in [root, *root.parents][:_LEVELS]:
        if download := read_download(directory):
            return download.origin()
    return None
