"""Downloads of corpora from the Hugging Face hub.

DIR holds the files under the hub's own names and, once all are checked, download.json: the
repository, the commit and every file's size and hash. The same command again downloads missing
files and checks everything anew.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import hashlib
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.request import getproxies

from pydantic import TypeAdapter

from data_pipeline.errors import DataError
from data_pipeline.io.files import (
    read_form,
    read_regular,
    sha256_file,
    to_json,
    write_atomically,
)
from data_pipeline.io.forms import Count, Inside, parse_json

DOWNLOAD_NAME = "download.json"
# The record of an unfinished download, which continues with the commit that it began with.
UNFINISHED_NAME = "download.unfinished.json"
# Inputs of `tokenize` may be the download's directory, or that of a split or a chunk below it.
_LEVELS = 3
# Seconds before each further attempt at a file: of thousands of files, some meet a busy hub or a
# lost connection, which may be away for seven minutes.
_WAITS = (1, 5, 20, 60, 120, 240)
# The same for the first request, where there may be no network at all.
FIRST_WAITS = (1, 4, 10)
_BUSY = (408, 429)
# Progress bars of the hub's client, one for each file: thousands.
_BARS_OF_A_FILE = ("huggingface_hub.http_get", "huggingface_hub.xet_get")

_Note = Callable[[str], None]
_T = TypeVar("_T")


@dataclass(frozen=True)
class HubSource:
    """Corpus on the hub, as its card describes it.

    Attributes:
        repository: Name on the hub.
        pattern: Pattern of the files for fnmatch, where * matches / too; `{split}` stands for a
            split of the hub's own.
        tokens: Size, by the tokenizer of the corpus's authors.
        licence: Identifier on the hub.
        text_key: Key, or column, of the text.
    """

    repository: str
    pattern: str
    tokens: str
    licence: str
    text_key: str = "text"


SOURCES = {
    "slimpajama": HubSource(
        "cerebras/SlimPajama-627B", "{split}/*.jsonl.zst", "627 B", "those of its sources"
    ),
    "openwebtext": HubSource("Skylion007/openwebtext", "*{split}*.parquet", "9 B", "cc0-1.0"),
    "tinystories": HubSource(
        "roneneldan/TinyStories", "data/{split}-*.parquet", "0.5 B", "cdla-sharing-1.0"
    ),
    "fineweb-edu-10bt": HubSource(
        "HuggingFaceFW/fineweb-edu", "sample/10BT/*.parquet", "10 B", "odc-by"
    ),
    "fineweb-edu-100bt": HubSource(
        "HuggingFaceFW/fineweb-edu", "sample/100BT/*.parquet", "100 B", "odc-by"
    ),
    "dclm": HubSource(
        "mlfoundations/dclm-baseline-1.0",
        "global-shard_*/local-shard_*/*.jsonl.zst",
        "4,000 B",
        "cc-by-4.0",
    ),
    # nvidia's own repository has ids of GPT-2's tokenizer, not text. This one has the text of the
    # whole, shuffled, so that any share of its files is a sample.
    "climbmix": HubSource(
        "karpathy/climbmix-400b-shuffle", "shard_*.parquet", "400 B", "cc-by-nc-4.0"
    ),
}


@dataclass(frozen=True)
class RemoteFile:
    """File as the hub lists it: a SHA-256 if the hub knows one, else git's blob id (a SHA-1)."""

    name: Inside
    size: Count
    sha256: str
    blob_id: str


@dataclass(frozen=True)
class Download:
    """Content of download.json. `revision` is a commit, never a branch."""

    source: str
    repository: str
    revision: str
    files: tuple[RemoteFile, ...]

    def origin(self) -> dict[str, Any]:
        """Return the entry `origin` of a shard directory's manifest."""
        return {"source": self.source, "repository": self.repository, "revision": self.revision}


_DOWNLOAD = TypeAdapter(Download)


@dataclass(frozen=True)
class Wanted:
    """Choice of a repository's files.

    Attributes:
        splits: The hub's own splits.
        include: Patterns in place of the source's own.
        fraction: Share of the files of every directory, chosen by the hash of their names.
    """

    splits: tuple[str, ...] = ("train",)
    include: tuple[str, ...] = ()
    fraction: float = 1.0

    def choose(self, files: list[RemoteFile], source: HubSource, where: str) -> list[RemoteFile]:
        """Return the wanted files, sorted by name.

        Args:
            files: All files of the repository.
            where: Repository and commit, for messages.

        Raises:
            DataError: If a pattern matches no file, the corpus has no such split, or the fraction
                is impossible.
        """
        if not 0 < self.fraction <= 1:
            raise DataError(f"--fraction {self.fraction} must be above 0 and at most 1")
        one_split = "{split}" not in source.pattern
        if one_split and not self.include and self.splits != ("train",):
            raise DataError(
                f"--splits {','.join(self.splits)}: {source.repository} has no split but train; "
                f"`tokenize --validation-fraction` holds documents out"
            )
        patterns = self.include or [source.pattern.format(split=split) for split in self.splits]
        chosen: dict[str, RemoteFile] = {}
        for pattern in patterns:
            matching = {f.name: f for f in files if fnmatch.fnmatchcase(f.name, pattern)}
            if not matching:
                raise DataError(
                    f"{where} has no file that matches {pattern}; give --include or another "
                    f"--splits"
                )
            chosen |= matching
        by_directory: defaultdict[str, list[str]] = defaultdict(list)
        for name in sorted(chosen, key=lambda name: hashlib.sha256(name.encode()).digest()):
            by_directory[name.rpartition("/")[0]].append(name)
        # The share is rounded up, so that every directory gives at least one file.
        names = [
            name
            for group in by_directory.values()
            for name in group[: -int(-len(group) * self.fraction // 1)]
        ]
        return [chosen[name] for name in sorted(names)]


def download(
    source: HubSource,
    name: str,
    directory: Path,
    wanted: Wanted,
    note: _Note,
    revision: str | None = None,
    workers: int = 8,
) -> Download:
    """Fetch files of a corpus, check them against the hub's listing, write DIR/download.json.

    Args:
        name: Name of the corpus in download.json.
        note: Callback that gets a line on what is fetched, and one before each wait.
        revision: Branch, tag or commit, resolved to a commit once; None is the directory's earlier
            commit, else `main`.
        workers: Files at a time.

    Raises:
        DataError: If there is no network or repository, a file is not what the hub lists, or the
            disk is full.
    """
    if workers < 1:
        raise DataError(f"--workers {workers} must be at least 1")
    if directory.exists() and not directory.is_dir():
        raise DataError(f"--out {directory} is a file; give a directory")
    previous = read_download(directory, UNFINISHED_NAME) or read_download(directory)
    if revision is None:
        revision = (
            previous.revision if previous and previous.repository == source.repository else "main"
        )
    repository = source.repository
    with refusing_hub_errors(f"download {repository}", repository, revision):
        listed = functools.partial(_listing, repository, revision)
        commit, listing = repeat(listed, repository, note, waits=FIRST_WAITS)
    chosen = wanted.choose(listing, source, f"{repository} at {commit}")
    result = Download(name, repository, commit, tuple(chosen))
    if previous is not None:
        result = _extended(previous, result, directory)
    # Written before the first file, so that a rerun continues with this commit.
    content = to_json(asdict(result))
    write_atomically(directory / UNFINISHED_NAME, content)
    for file in result.files:  # a file that is not what the hub lists is fetched anew
        if _problem(directory / file.name, file):
            (directory / file.name).unlink(missing_ok=True)
    if missing := _missing(directory, result):
        size = sum(file.size for file in missing)
        note(f"{repository}: fetching {len(missing):,} files, {size / 1e9:,.2f} GB")
        fetch = functools.partial(_fetch_missing, directory, result, workers)
        with refusing_hub_errors(f"download {repository}", repository, commit):
            repeat(fetch, repository, note, left=lambda: len(_missing(directory, result)))
    for file in missing:
        if problem := _problem(directory / file.name, file):
            (directory / file.name).unlink(missing_ok=True)
            raise DataError(
                f"{problem} in the listing of {repository}; it was removed, download again"
            )
    write_atomically(directory / DOWNLOAD_NAME, content)
    (directory / UNFINISHED_NAME).unlink(missing_ok=True)
    return result


def _missing(directory: Path, download: Download) -> list[RemoteFile]:
    return [file for file in download.files if not (directory / file.name).exists()]


def _fetch_missing(directory: Path, download: Download, workers: int) -> None:
    """Fetch the missing files, each by its name, `workers` at a time.

    The hub's `snapshot_download` compares every name with every file of the repository, which takes
    minutes where there are tens of thousands of both.
    """
    import huggingface_hub
    from huggingface_hub.utils import disable_progress_bars, tqdm

    for group in _BARS_OF_A_FILE:
        disable_progress_bars(group)
    missing = _missing(directory, download)
    size = sum(file.size for file in missing)

    def fetch(file: RemoteFile) -> None:
        huggingface_hub.hf_hub_download(
            download.repository,
            file.name,
            repo_type="dataset",
            revision=download.revision,
            local_dir=directory,
        )
        bar.update(file.size)

    with (
        tqdm(total=size, unit="B", unit_scale=True, disable=None) as bar,
        ThreadPoolExecutor(workers) as pool,
    ):
        # The first error leaves what has not begun.
        list(pool.map(fetch, missing))


def source_of(name: str, hub_id: str | None) -> HubSource:
    """Return the corpus of a name.

    Args:
        name: Key of SOURCES.
        hub_id: Another repository with the same files; None is the corpus's own.

    Raises:
        DataError: If the name is unknown.
    """
    if name not in SOURCES:
        raise DataError(f"source {name!r} is unknown; known are {', '.join(SOURCES)}")
    return replace(SOURCES[name], repository=hub_id) if hub_id else SOURCES[name]


def read_download(directory: Path, name: str = DOWNLOAD_NAME) -> Download | None:
    """Read DIR/download.json.

    Args:
        name: DOWNLOAD_NAME or UNFINISHED_NAME.

    Returns:
        Content of the file; None if there is none.

    Raises:
        DataError: If the file is damaged.
    """
    path = directory / name
    if not path.is_file():
        return None
    return read_form(path, _DOWNLOAD, "delete it and download again")


def find_origin(root: Path) -> dict[str, Any] | None:
    """Return the origin of the inputs below `root`, by its download.json or one a few levels up."""
    for directory in [root, *root.parents][:_LEVELS]:
        if _is_own(directory / DOWNLOAD_NAME) and (recorded := read_download(directory)):
            return recorded.origin()
    return None


def _is_own(path: Path) -> bool:
    """Return whether a file may be a record of this program: one of another has other keys."""
    try:
        content = parse_json(read_regular(path))
    except (OSError, ValueError):
        return True  # which `read_download` says
    keys = Download.__annotations__.keys()
    return not isinstance(content, dict) or not content or bool(keys & content.keys())


def repeat(
    request: Callable[[], _T],
    name: str,
    note: _Note,
    waits: Sequence[float] = _WAITS,
    left: Callable[[], int] = lambda: 0,
) -> _T:
    """Make a request until it is answered, through errors that pass; the last error is raised.

    Args:
        name: Name of what is asked for.
        note: Callback that gets a line before each wait.
        waits: Seconds before each further attempt.
        left: Number of files that are missing; after an attempt that fetched some, the waits begin
            anew.
    """
    attempt = 0
    while True:
        missing = left()
        try:
            return request()
        except Exception as error:
            if left() < missing:
                attempt = 0
            if not passes(error) or attempt == len(waits):
                raise
            reason = one_line(error.__cause__ or error)
            note(f"{name}: {reason}; asking for it again in {waits[attempt]} s")
            time.sleep(waits[attempt])
            attempt += 1


def passes(error: Exception) -> bool:
    """Return whether an error of the hub's client may pass: of the network, or of a busy hub."""
    from huggingface_hub import errors

    causes = [cause for cause in (error, error.__cause__) if cause is not None]
    if any(isinstance(cause, errors.OfflineModeIsEnabled | DataError) for cause in causes):
        return False
    answers = [
        answer for cause in causes if (answer := getattr(cause, "response", None)) is not None
    ]
    if answers:
        status: int = answers[0].status_code
        return status in _BUSY or status >= 500
    # hf_xet, which fetches large files, knows no other error than RuntimeError.
    transient_errors = (errors.HTTPError, ConnectionError, TimeoutError, RuntimeError)
    return any(isinstance(cause, transient_errors) for cause in causes)


def _extended(old: Download, new: Download, directory: Path) -> Download:
    """Return `new` with the files of the same commit that the directory already has."""
    if (old.repository, old.revision) != (new.repository, new.revision):
        raise DataError(
            f"{directory} holds {old.repository} at {old.revision or 'no commit'}, not "
            f"{new.repository} at {new.revision}; choose another --out"
        )
    files = {file.name: file for file in (*old.files, *new.files)}
    return replace(new, files=tuple(files[name] for name in sorted(files)))


def _listing(repository: str, revision: str) -> tuple[str, list[RemoteFile]]:
    """Return the commit of a revision and its files."""
    import huggingface_hub

    api = huggingface_hub.HfApi()
    commit = api.dataset_info(repository, revision=revision).sha
    assert commit is not None  # the hub always states it
    entries = api.list_repo_tree(repository, recursive=True, revision=commit, repo_type="dataset")
    files = []
    for entry in entries:
        if isinstance(entry, huggingface_hub.RepoFile):
            # Large files have a SHA-256, small ones only git's id.
            sha256 = entry.lfs.sha256 if entry.lfs else ""
            blob_id = "" if entry.lfs else entry.blob_id
            files.append(RemoteFile(entry.path, entry.size, sha256, blob_id))
    return commit, files


def _problem(path: Path, file: RemoteFile) -> str | None:
    """Describe the difference between a file and the listing, as a clause; None without one."""
    from huggingface_hub.utils.sha import git_hash

    if not path.is_file():
        return f"{path} is missing, and is"
    size = path.stat().st_size
    if size != file.size:
        return f"{path} has {size:,} bytes, but {file.size:,}"
    expected = file.sha256 or file.blob_id
    actual = sha256_file(path) if file.sha256 else git_hash(path.read_bytes())
    return None if actual == expected else f"{path} has the hash {actual}, but {expected}"


def one_line(error: BaseException) -> str:
    """Return the message of an error in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def gated(repository: str) -> DataError:
    """Return the refusal of a data set whose terms have not been accepted."""
    return DataError(
        f"{repository} is gated: accept its terms on the hub and give a token in HF_TOKEN"
    )


@contextlib.contextmanager
def refusing_hub_errors(what: str, repository: str, revision: str) -> Iterator[None]:
    """Turn every error of the hub's client into a DataError of one sentence.

    Args:
        what: Clause on what was tried, as `download acme/text`.

    Raises:
        DataError: For any error of the hub, the network or the disk.
    """
    from huggingface_hub import errors

    try:
        yield
    except DataError:
        raise
    except errors.GatedRepoError as error:
        raise gated(repository) from error
    except errors.RepositoryNotFoundError as error:
        raise DataError(
            f"the hub has no data set {repository}, or this token may not see it; give another name"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise DataError(f"{repository} has no revision {revision}; give another") from error
    except errors.HFValidationError as error:
        raise DataError(f"{repository} is not a name like organisation/data-set") from error
    except (RuntimeError, errors.HTTPError, OSError, ValueError) as error:
        remedy = "; what is finished is kept: run the same command again"
        if isinstance(error, RuntimeError):
            remedy += ", with HF_HUB_DISABLE_XET=1 if that does not help"
        if isinstance(error, ValueError | FileNotFoundError) and not passes(error):
            remedy = ""
        way = _way() if passes(error) else ""
        raise DataError(f"cannot {what}: {one_line(error)}{way}{remedy}") from error
    except Exception as error:
        # No client could be made: SOCKS without its package, a port that is not a number. The two
        # have no class in common, and the second is of httpx, which older clients do not have.
        unmade = isinstance(error, ImportError) or type(error).__name__ == "InvalidURL"
        way = _way()
        if not (unmade and way):
            raise
        raise DataError(f"cannot {what}: {one_line(error)}{way}; correct the variable") from error


def _way() -> str:
    """Return a clause with the variables that lead to the hub; values may hold passwords."""
    names = [f"{scheme.upper()}_PROXY" for scheme in sorted(getproxies()) if scheme != "no"]
    names += ["HF_ENDPOINT"] * ("HF_ENDPOINT" in os.environ)
    return f" (by way of {' and '.join(names)})" if names else ""
