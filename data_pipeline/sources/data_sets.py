"""Data sets that the package `datasets` opens, cut into shards that are inputs.

An input names one in three ways: `hf:NAME[:CONFIG[:SPLIT]][@REVISION]` on the hub, a directory that
`save_to_disk` wrote, or `READER:FILES` for any reader of files that `load_dataset` has. What is not
on this machine is streamed. Caches, endpoint, proxies and credentials are those of `datasets`.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_pipeline.errors import DataError, how_to_install
from data_pipeline.sources.hub import FIRST_WAITS, gated, one_line, refusing_hub_errors, repeat

_HUB = "hf"
_READER = re.compile(r"([a-z][a-z0-9]*):(?!//)")
_SAVED = (("state.json", "dataset_info.json"), ("dataset_dict.json",))
"""Files of a directory that `save_to_disk` wrote: of one split, or of several."""
_BATCH_ROWS = 512
_SHARD_ROWS = 100_000
"""Rows of a shard where a data set can be cut anywhere; a killed worker repeats a shard."""
_UNSPLIT = "train"


@dataclass(frozen=True)
class DataShard:
    """Shard of a data set, which can be sent to another process.

    Attributes:
        address: Input that opens the very same data set again; "" for one in memory.
        index: Number of the shard, from 0.
        count: Number of shards.
        columns: Columns that are read.
        version: Fingerprint or commit, configuration and split; "" where there is none.
        data: Data set, or texts, in memory; None is opened by its address.
    """

    address: str
    index: int
    count: int
    columns: tuple[str, ...]
    version: str
    data: Any = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.address or 'the data set'}, shard {self.index + 1} of {self.count}"

    def batches(self) -> Iterator[Any]:
        """Iterate over the rows as record batches of pyarrow.

        Raises:
            DataError: If the data set cannot be opened any more, or is another.
        """
        data = _reopened(self.address, self.version) if self.data is None else self.data
        if not hasattr(data, "shard"):
            yield from ({self.columns[0]: text} for text in data)
            return
        shard = data.shard(num_shards=self.count, index=self.index, contiguous=True)
        tables = shard.select_columns([*self.columns]).with_format("arrow").iter(_BATCH_ROWS)
        while (table := _next(tables)) is not None:
            yield from table.to_batches()


@dataclass(frozen=True)
class DataSet:
    """Data set that has been opened.

    Attributes:
        address: Input that opens it again, with the commit that was read; "" for one in memory.
        origin: Entry `origin` of a shard directory's manifest.
        version: As of its shards.
        data: Dataset, IterableDataset, or iterable of texts.
        split: Name of the split, the first part of the shards' names.
    """

    address: str
    origin: dict[str, str]
    version: str
    data: Any
    split: str = "data"

    def columns(self) -> list[str]:
        """Return the names of the columns; of a stream without a header, those of its first row."""
        if self.data.features is not None:
            return [*self.data.features]
        return [*self.first([])]

    def first(self, columns: list[str]) -> Mapping[str, Any]:
        """Return the first row, with these columns only unless there are none.

        Raises:
            DataError: If there is no row.
        """
        row: Mapping[str, Any] | None = None
        with refusing(self.address):
            rows = self.data.select_columns(columns) if columns else self.data
            if getattr(rows, "num_rows", 1):
                row = _next(iter(rows))
        if row is None:
            raise DataError(f"{self.address or 'the data set'} has no rows; give another split")
        return row

    def shards(self, columns: tuple[str, ...]) -> dict[str, DataShard]:
        """Return {name: shard}, in the order of the rows."""
        count = 1
        if hasattr(self.data, "num_rows"):
            count = -(-self.data.num_rows // _SHARD_ROWS)
        elif hasattr(self.data, "num_shards"):
            count = self.data.num_shards
        data = None if self.address else self.data
        return {
            f"{self.split}-{index:05d}-of-{count:05d}": DataShard(
                self.address, index, count=count, columns=columns, version=self.version, data=data
            )
            for index in range(count)
        }


def _next(rows: Iterator[Any]) -> Any:
    """Return the next rows, or None after the last.

    What pandas only warns of is an error: a further field of each row would move every text into
    the next column.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Length of header or names does not match")
        return next(rows, None)


def is_data_set(entry: str | Path) -> bool:
    """Return whether an input is a data set and not files, without opening it."""
    if os.path.isdir(entry):
        return any(
            all(os.path.isfile(os.path.join(entry, name)) for name in names) for names in _SAVED
        )
    return _READER.match(str(entry)) is not None and not os.path.lexists(entry)


@functools.lru_cache(maxsize=1)
def _reopened(address: str, version: str) -> Any:
    """Open a data set once in each process that reads its shards."""
    opened = open_data_set(address)
    if opened.version != version:
        raise DataError(
            f"input {address} changed after it was opened first: it is {opened.version}, it was "
            f"{version}; restore it, or choose another --out"
        )
    return opened.data


def open_data_set(entry: str) -> DataSet:
    """Open a data set of the hub, a saved one, or files that a reader of `datasets` reads.

    Raises:
        DataError: If there is no such data set, configuration, split or revision; it is gated, a
            script, or saved in another form; or there is no network.
    """
    import datasets
    from huggingface_hub.utils import disable_progress_bars, logging

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()
    logging.set_verbosity_error()
    disable_progress_bars()
    if os.path.isdir(entry):
        return _open_saved(entry)
    reader, _, rest = entry.partition(":")
    if reader == _HUB:
        return _open_on_hub(rest)
    return _open_files(entry, reader, rest)


def in_memory(data: Any, column: str) -> DataSet:
    """Return a Dataset, an IterableDataset or an iterable of texts as an opened data set.

    Args:
        column: Column that texts are given.

    Raises:
        DataError: If `data` is none of these.
    """
    import datasets

    if isinstance(data, datasets.DatasetDict | datasets.IterableDatasetDict):
        raise DataError(f"the data set has the splits {', '.join(data)}; give one of them")
    if not isinstance(data, Iterable) or isinstance(data, str | bytes | Mapping):
        raise DataError(
            f"data is {type(data).__name__}; give a Dataset, an IterableDataset, or an iterable of "
            f"texts"
        )
    fingerprint = data._fingerprint if isinstance(data, datasets.Dataset) else ""
    origin = {"source": type(data).__name__, "repository": "", "revision": fingerprint}
    return DataSet("", origin, fingerprint, data)


@contextlib.contextmanager
def refusing(address: str, repository: str = "", revision: str = "") -> Iterator[None]:
    """Turn every error of `datasets` and what it calls into a DataError of one sentence.

    Args:
        address: Data set, as the input names it.
        repository: Name on the hub.
        revision: Branch, tag or commit, as it was given.

    Raises:
        DataError: For any error.
    """
    import datasets

    address = address or "the data set"
    with refusing_hub_errors(f"read {address}", repository or address, revision):
        try:
            yield
        except datasets.exceptions.DatasetNotFoundError as error:
            if "gated" in str(error):
                raise gated(address) from error
            raise DataError(f"cannot read {address}: {one_line(error)}") from error
        except ImportError as error:
            raise DataError(
                f"{address} needs a package that is not installed ({one_line(error)}); for s3:// "
                f"{how_to_install('s3')}"
            ) from error
        except StopIteration as error:  # from the listing of a bucket
            raise DataError(f"{address}: there are no such files, or there is no bucket") from error
        except Warning as error:  # of pandas, an error by `_next`
            raise DataError(
                f"{address}: rows have more fields than the first line has names; quote texts that "
                f"hold the separator, and name every column"
            ) from error
        except (OSError, ValueError, RuntimeError):
            raise
        except Exception as error:  # each store and each format has errors of its own
            # An argument for web servers, which `datasets` gives to every store.
            if "requote_redirect_url" in str(error):
                raise DataError(
                    f"{address}: the package datasets {datasets.__version__} cannot stream "
                    "compressed files of S3; copy them to this machine, or store them uncompressed "
                    "or as parquet"
                ) from error
            raise DataError(f"cannot read {address}: {one_line(error)}") from error


def _open_saved(directory: str) -> DataSet:
    import datasets

    with refusing(directory):
        try:
            data = datasets.load_from_disk(directory)
        except IndexError as error:  # of no rows, save_to_disk writes no file
            raise DataError(f"{directory} has no rows; give another split") from error
    split = "data"
    if isinstance(data, datasets.DatasetDict):
        split = _choose_split(directory, [*data], "", advice=f"give {directory}/SPLIT")
        directory = os.path.join(directory, split)
        data = data[split]
    fingerprint: str = data._fingerprint
    address = os.path.abspath(directory)
    origin = {"source": address, "repository": "", "revision": fingerprint}
    return DataSet(address, origin, version=fingerprint, data=data, split=split)


def _open_on_hub(name: str) -> DataSet:
    import datasets
    import huggingface_hub

    named, _, revision = name.partition("@")
    repository, config, split, *more = [*named.split(":"), "", ""]
    if any(more) or not repository:
        raise DataError(
            f"{_HUB}:{name} is not hf:NAME[:CONFIG[:SPLIT]][@REVISION], as "
            f"hf:HuggingFaceFW/fineweb-edu:sample-10BT:train"
        )
    address = f"{_HUB}:{name}"
    offline: bool = datasets.config.HF_HUB_OFFLINE

    def request() -> tuple[str, str, Mapping[str, Any]]:
        if offline:  # what an earlier load_dataset has left in the cache
            cached = datasets.load_dataset(repository, config or None, revision=revision or None)
            return "", config or "default", cached
        commit = huggingface_hub.HfApi().dataset_info(repository, revision=revision or None).sha
        assert commit is not None  # the hub always states it
        try:
            builder = datasets.load_dataset_builder(repository, config or None, revision=commit)
        except RuntimeError as error:
            if "script" not in str(error):
                raise
            raise DataError(
                f"{address} is a script, and `datasets` no longer runs scripts; give the hub's "
                f"copy in parquet: {_HUB}:{named}@refs/convert/parquet"
            ) from error
        return commit, builder.config.name, builder.as_streaming_dataset()

    with refusing(address, repository, revision):
        waits = () if offline else FIRST_WAITS
        note = functools.partial(print, file=sys.stderr)
        commit, config, splits = repeat(request, address, note, waits=waits)
    advice = f"give {_HUB}:{repository}:{config}:SPLIT"
    split = _choose_split(address, [*splits], split, advice)
    pinned = f"{_HUB}:{repository}:{config}:{split}" + (f"@{commit}" if commit else "")
    commit = commit or splits[split]._fingerprint
    origin = {"source": f"{_HUB}:{named}", "repository": repository, "revision": commit}
    version = f"{config}:{split}@{commit}"
    return DataSet(pinned, origin, version=version, data=splits[split], split=split)


def _open_files(entry: str, reader: str, files: str) -> DataSet:
    import datasets
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES as readers

    if reader not in readers:
        raise DataError(
            f"input {entry} is not a file, and {reader} not a reader; readers are hf (the hub), "
            f"{', '.join(sorted(readers))}"
        )
    if "://" not in files:
        files = os.path.abspath(os.path.expanduser(files))
        entry = f"{reader}:{files}"
    # All files by a pattern: of a directory, `datasets` reads those with the name of a split alone.
    below = "**/*.[cCtT][sS][vV]*" if reader == "csv" else "**"
    pattern = os.path.join(glob.escape(files), below) if os.path.isdir(files) else files
    source: dict[str, Any] = {"data_files": pattern}
    if reader == "csv":
        names = os.listdir(files) if os.path.isdir(files) else [os.path.basename(files)]
        separator = "\t" if any(".tsv" in name.lower() for name in names) else ","
        # A text that is NA or null is that text.
        source |= {"keep_default_na": False, "sep": separator, "index_col": False}
    with refusing(entry):
        builder = datasets.load_dataset_builder(reader, **source)
        splits = builder.as_streaming_dataset()
    split = _choose_split(entry, [*splits], "", advice="name its files")
    version = builder.config_id
    origin = {"source": entry, "repository": "", "revision": version}
    return DataSet(entry, origin, version=version, data=splits[split], split=split)


def _choose_split(address: str, splits: list[str], split: str, advice: str) -> str:
    """Return the split that is named, else the only one or `train`.

    Args:
        advice: How a split is named.

    Raises:
        DataError: If there is no such split, or no telling which is meant.
    """
    if split in splits:
        return split
    if not split and (_UNSPLIT in splits or len(splits) == 1):
        return _UNSPLIT if _UNSPLIT in splits else splits[0]
    present = ", ".join(splits) or "none"
    raise DataError(f"{address} has no split {split or _UNSPLIT}; it has {present}: {advice}")
