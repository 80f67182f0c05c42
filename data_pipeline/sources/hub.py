"""Downloads of corpora from the Hugging Face hub, or from a directory that mirrors one.

DIR has the files under the hub's own names and, when all are there and checked, download.json: the
repository, the commit and every file's size and hash. The same command again downloads missing files and
checks everything anew.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from data_pipeline.errors import DataError, needs_extra
from data_pipeline.io.files import read_json, sha256_file, to_json, write_atomically
from data_pipeline.sources.discovery import chunk_of

DOWNLOAD_NAME = "download.json"
# The same for a download that has not finished, which goes on with the commit that it began with.
UNFINISHED_NAME = "download.unfinished.json"
# `tokenize` is given the download's directory, or one of a split or a chunk below it.
_LEVELS = 3
_READ_BYTES = 1 << 22

# (files done, bytes done, bytes in all)
_Report = Callable[[int, int, int], None]


@dataclass(frozen=True)
class HubSource:
    """Corpus on the hub. `pattern` is one of fnmatch, where * goes over / too."""

    repository: str
    pattern: str


SOURCES = {
    "slimpajama": HubSource("cerebras/SlimPajama-627B", "{split}/*.jsonl.zst"),
    "openwebtext": HubSource("Skylion007/openwebtext", "*{split}*.parquet"),
    "tinystories": HubSource("roneneldan/TinyStories", "data/{split}-*.parquet"),
}


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


@dataclass(frozen=True)
class Wanted:
    """Choice of a repository's files.

    include: patterns in place of the source's own; chunks: only these of SlimPajama's, all if empty.
    fraction: share of the files of every directory, chosen by the hash of their names.
    """

    splits: tuple[str, ...] = ("train",)
    include: tuple[str, ...] = ()
    chunks: frozenset[int] = frozenset()
    fraction: float = 1.0

    def choose(self, files: list[RemoteFile], source: HubSource, where: str) -> list[RemoteFile]:
        """Return the wanted files, sorted by name; DataError if a pattern or a chunk has none."""
        if not 0 < self.fraction <= 1:
            raise DataError(f"--fraction {self.fraction} must be above 0 and at most 1")
        patterns = self.include or [source.pattern.format(split=split) for split in self.splits]
        chosen: dict[str, RemoteFile] = {}
        for pattern in patterns:
            matching = {
                file.name: file for file in files if fnmatch.fnmatchcase(file.name, pattern)
            }
            if not matching:
                raise DataError(
                    f"{where} has no file that matches {pattern}; give --include or another --splits"
                )
            chosen |= matching
        if self.chunks:
            if missing := sorted(self.chunks - {chunk_of(name) for name in chosen}):
                raise DataError(f"{where} has no chunk{missing[0]}; see --chunks")
            chosen = {name: file for name, file in chosen.items() if chunk_of(name) in self.chunks}
        by_directory: defaultdict[str, list[str]] = defaultdict(list)
        for name in sorted(chosen, key=lambda name: hashlib.sha256(name.encode()).digest()):
            by_directory[name.rpartition("/")[0]].append(name)
        names = [
            n
            for group in by_directory.values()
            for n in group[: -int(-len(group) * self.fraction // 1)]
        ]
        return [chosen[name] for name in sorted(names)]


def download(
    name: str,
    directory: Path,
    wanted: Wanted,
    report: _Report,
    hub_id: str | None = None,
    revision: str | None = None,
    workers: int = 8,
) -> Download:
    """Fetch the wanted files of a source, check them against the hub's listing, write DIR/download.json.

    `revision` is a branch, tag or commit; None is the commit that the directory was begun with, else `main`.
    It is resolved to a commit once, and all is fetched from that. DataError: no network or repository, a file
    that is not what the hub lists, or no room.
    """
    source = _source(name, hub_id, directory, workers)
    with needs_extra("download", "hub"):
        import huggingface_hub
        from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    before = _begun_with(directory)
    if revision is None:
        revision = before.revision if before and before.repository == source.repository else "main"
    api = huggingface_hub.HfApi()
    with _sentences(source.repository, revision):
        commit = api.dataset_info(source.repository, revision=revision).sha
        assert commit is not None  # the hub always states it
        listing = [
            _remote_file(entry)
            for entry in api.list_repo_tree(
                source.repository, recursive=True, revision=commit, repo_type="dataset"
            )
            if isinstance(entry, huggingface_hub.RepoFile)
        ]
    chosen = wanted.choose(listing, source, f"{source.repository} at {commit}")
    result = _extended(before, Download(name, source.repository, commit, tuple(chosen)), directory)
    write_download(directory, result, finished=False)

    def fetch(file: RemoteFile) -> None:
        path = directory / file.name
        if path.exists() and _problem(path, file) is None:
            return
        with _sentences(source.repository, commit):
            # force: what is there under this name is not what the hub lists.
            huggingface_hub.hf_hub_download(
                source.repository,
                file.name,
                repo_type="dataset",
                revision=commit,
                local_dir=directory,
                force_download=path.exists(),
            )
        if problem := _problem(path, file):
            path.unlink(missing_ok=True)
            raise DataError(
                f"{problem} in the listing of {source.repository}; it was removed, download again"
            )

    _all(fetch, list(result.files), workers, report)
    write_download(directory, result, finished=True)
    return result


def take_from_mirror(
    name: str, directory: Path, wanted: Wanted, mirror: Path, report: _Report, workers: int = 8
) -> Download:
    """Link, not copy, the wanted files from a directory that has them under the hub's names.

    If the mirror has a download.json, its files are checked against that and its commit is kept; otherwise
    their hashes are recorded as they are. DataError: the mirror lacks files, or has others than it says.
    """
    source = _source(name, None, directory, workers)
    if not mirror.is_dir():
        raise DataError(f"--mirror {mirror} is not a directory")
    known = read_download(mirror)
    there = () if known else sorted(path for path in mirror.rglob("*") if path.is_file())
    listing = [*known.files] if known else []  # the hashes are made when the files are chosen
    listing += [
        RemoteFile(p.relative_to(mirror).as_posix(), p.stat().st_size, "", "") for p in there
    ]
    chosen = wanted.choose(listing, source, str(mirror))
    result = Download(name, source.repository, "", tuple(chosen))
    if known:
        result = replace(result, repository=known.repository, revision=known.revision)
    hashes: dict[str, str] = {}

    def link(file: RemoteFile) -> None:
        original, path = mirror / file.name, directory / file.name
        if known and (problem := _problem(original, file)):
            raise DataError(f"{problem} in {mirror / DOWNLOAD_NAME}")
        hashes[file.name] = file.sha256 or sha256_file(original)
        target = os.path.abspath(original)
        if path.is_symlink() and os.readlink(path) == target:
            return
        if path.exists() or path.is_symlink():
            raise DataError(
                f"{path} is there already and is no link to {original}; choose another --out"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target)

    _all(link, chosen, workers, report)
    result = replace(
        result, files=tuple(replace(file, sha256=hashes[file.name]) for file in chosen)
    )
    result = _extended(_begun_with(directory), result, directory)
    write_download(directory, result, finished=True)
    return result


def _source(name: str, hub_id: str | None, directory: Path, workers: int) -> HubSource:
    """Return the source of this name, after checking what `download` and `take_from_mirror` are given."""
    if name not in SOURCES:
        raise DataError(f"source {name!r} is unknown; known are {', '.join(SOURCES)}")
    if workers < 1:
        raise DataError(f"--workers {workers} must be at least 1")
    if directory.exists() and not directory.is_dir():
        raise DataError(f"--out {directory} is a file; give a directory")
    return replace(SOURCES[name], repository=hub_id) if hub_id else SOURCES[name]


def write_download(directory: Path, download: Download, finished: bool) -> None:
    """Write DIR/download.json when the download is finished, and DIR/download.unfinished.json until then."""
    content = to_json(asdict(download))
    path = directory / (DOWNLOAD_NAME if finished else UNFINISHED_NAME)
    if not path.exists() or path.read_bytes() != content:
        write_atomically(path, content)
    if finished:
        (directory / UNFINISHED_NAME).unlink(missing_ok=True)


def read_download(directory: Path, name: str = DOWNLOAD_NAME) -> Download | None:
    """Read DIR/download.json; None if there is none, DataError if it is damaged."""
    path = directory / name
    if not path.is_file():
        return None
    value = read_json(path)
    try:
        return Download(
            **(value | {"files": tuple(RemoteFile(**entry) for entry in value["files"])})
        )
    except (KeyError, TypeError) as error:
        raise DataError(
            f"{path} is not what `download` writes ({error}); download again"
        ) from error


def find_origin(root: Path) -> dict[str, Any] | None:
    """Return the origin of the inputs below `root`: from its download.json, or one a few directories up."""
    for directory in [root, *root.parents][:_LEVELS]:
        if download := read_download(directory):
            return download.origin()
    return None


def _begun_with(directory: Path) -> Download | None:
    return read_download(directory, UNFINISHED_NAME) or read_download(directory)


def _extended(old: Download | None, new: Download, directory: Path) -> Download:
    """Return `new`, with the files that the directory has of the same commit already."""
    if old is None:
        return new
    if (old.repository, old.revision) != (new.repository, new.revision):
        raise DataError(
            f"{directory} holds {old.repository} at {old.revision or 'no commit'}, not {new.repository} at "
            f"{new.revision or 'no commit'}; choose another --out"
        )
    files = {file.name: file for file in (*old.files, *new.files)}
    return replace(new, files=tuple(files[name] for name in sorted(files)))


def _remote_file(entry: object) -> RemoteFile:
    """Convert a `huggingface_hub.RepoFile`: large files have a SHA-256, small ones only git's id."""
    lfs = getattr(entry, "lfs", None)
    name, size, blob_id = (getattr(entry, field) for field in ("path", "size", "blob_id"))
    return RemoteFile(name, size, lfs.sha256 if lfs else "", "" if lfs else blob_id)


def _problem(path: Path, file: RemoteFile) -> str | None:
    """Describe how a file differs from the listing, as a clause; None if it does not."""
    if not path.is_file():
        return f"{path} is missing, and is"
    size = path.stat().st_size
    if size != file.size:
        return f"{path} has {size:,} bytes, but {file.size:,}"
    actual, expected = (
        (sha256_file(path), file.sha256)
        if file.sha256
        else (_git_blob_id(path, size), file.blob_id)
    )
    return None if actual == expected else f"{path} has the hash {actual}, but {expected}"


def _git_blob_id(path: Path, size: int) -> str:
    digest = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    with open(path, "rb") as stream:
        while chunk := stream.read(_READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _all(
    action: Callable[[RemoteFile], None], files: list[RemoteFile], workers: int, report: _Report
) -> None:
    """Call action(file) for all files on some threads; the first error ends the work."""
    total = sum(file.size for file in files)
    done = size = 0
    with ThreadPoolExecutor(workers) as pool:
        futures = {pool.submit(action, file): file for file in files}
        try:
            for future in as_completed(futures):
                future.result()
                done, size = done + 1, size + futures[future].size
                report(done, size, total)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def _sentences(repository: str, revision: str) -> Iterator[None]:
    """Turn errors of the hub's client into one sentence each."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise DataError(
            f"{repository} is gated: accept its terms on the hub and give a token in HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise DataError(
            f"the hub has no data set {repository}, or this token may not see it; "
            f"give another with --hub-id, or a directory with --mirror"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise DataError(f"{repository} has no revision {revision}; see --revision") from error
    except errors.HFValidationError as error:
        raise DataError(
            f"--hub-id {repository} is not a name like organisation/data-set"
        ) from error
    except (errors.HTTPError, OSError, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(
            f"cannot download {repository}: {reason}; what is finished is kept: run the same command again, "
            f"or give a directory with --mirror"
        ) from error
