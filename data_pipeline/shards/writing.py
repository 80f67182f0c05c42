r"""Writer of Megatron .bin/.idx files.

The writer does not import megatron-core, which would cost a worker seconds. The layout is that of
`megatron.core.datasets.indexed_dataset` (megatron-core 0.16.1): the .bin is the ids one after the
other; the .idx is

    9 bytes "MMIDIDX\0\0" · uint64 version 1 · uint8 dtype code · uint64 sequences ·
    uint64 documents + 1 · int32 length of each sequence · int64 byte offset of each sequence ·
    int64 first sequence of each document, and end

with one sequence a document. The tests compare the files, byte for byte, with those of
megatron-core's own writer.
"""

from __future__ import annotations

import hashlib
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data_pipeline.errors import DataError
from data_pipeline.io.files import Draft, open_regular, refusing
from data_pipeline.shards.manifest import file_problem

# megatron.core.datasets.indexed_dataset.DType
DTYPE_CODES = {"int32": 4, "uint16": 8}
_MAGIC = b"MMIDIDX\x00\x00"
_HEADER_BYTES = 34
_UINT16_VOCAB = 1 << 16
_LONGEST_SOURCE = 40


def dtype_for(vocab_size: int) -> str:
    """Return the type of ids below `vocab_size`: uint16 up to 65,536 pieces, or int32."""
    return "uint16" if vocab_size <= _UINT16_VOCAB else "int32"


def shard_name(name: str, split: str, source: str, number: int, *, with_hash: bool = False) -> str:
    """Return NAME-SPLIT-SOURCE_00000.

    SOURCE is the source's first 40 characters, with all but letters, digits and dots replaced by
    `_`. If that changes the source's name, a dash and twelve digits of its hash follow; no
    unchanged name has a dash, so two sources never share a file name.

    Args:
        number: Number of the shard within its split and source.
        with_hash: Whether the hash follows in any case, because another source's name is the same
            but for capital letters.
    """
    plain = re.sub(r"[^A-Za-z0-9.]+", "_", source)[:_LONGEST_SOURCE]
    if plain != source or with_hash:
        plain += "-" + hashlib.blake2b(source.encode(), digest_size=6).hexdigest()
    return f"{name}-{split}-{plain}_{number:05d}"


def index_size(documents: int) -> int:
    """Return the bytes of the .idx file of this many documents."""
    return _HEADER_BYTES + 20 * documents + 8


def index_bytes(lengths: npt.NDArray[np.int32], dtype: str) -> bytes:
    """Return the content of an .idx file.

    Args:
        lengths: [documents] int32, tokens of each document.
    """
    offsets = np.zeros(len(lengths), dtype=np.int64)
    np.cumsum(lengths[:-1], dtype=np.int64, out=offsets[1:])
    offsets *= np.dtype(dtype).itemsize
    counts = (len(lengths), len(lengths) + 1)
    header = _MAGIC + struct.pack("<QBQQ", 1, DTYPE_CODES[dtype], *counts)
    documents = np.arange(len(lengths) + 1, dtype=np.int64)
    return (
        header
        + lengths.astype("<i4").tobytes()
        + offsets.astype("<i8").tobytes()
        + documents.tobytes()
    )


def read_lengths(prefix: Path) -> npt.NDArray[np.int32]:
    """Read the documents' lengths in tokens, [documents] int32, from PREFIX.idx.

    Raises:
        DataError: If the file is damaged.
    """
    path = Path(f"{prefix}.idx")
    try:
        with refusing(f"read {path}"), open_regular(path) as stream:
            magic, version, _, sequences, ends = struct.unpack(
                "<9sQBQQ", stream.read(_HEADER_BYTES)
            )
            whole = path.stat().st_size == index_size(sequences)
            lengths = np.fromfile(stream, dtype="<i4", count=sequences if whole else 0)
    except struct.error as error:
        raise DataError(f"{path} is cut short; see verify") from error
    if magic != _MAGIC or version != 1 or ends != sequences + 1 or not whole:
        raise DataError(f"{path} is not an index that tokenize writes; see verify")
    return lengths


def pack(ids: npt.NDArray[np.int32], dtype: np.dtype[Any]) -> npt.NDArray[np.integer]:
    """Convert int32 ids to the type of a shard.

    Raises:
        DataError: If an id does not fit; numpy would wrap it around.
    """
    # As unsigned a negative id is a very large one, so that one pass finds both.
    if len(ids) and int(ids.view(np.uint32).max()) > np.iinfo(dtype).max:
        worst = ids.min() if ids.min() < 0 else ids.max()
        raise DataError(
            f"a token id ({worst}) does not fit {dtype}; the tokenizer is not what it says"
        )
    return ids.astype(dtype, copy=False)


class ShardWriter:
    """Writer of a shard, under temporary names until `finish`. Memory: four bytes a document.

    Used as a context manager, an unfinished shard is removed.
    """

    def __init__(self, prefix: Path, dtype: str) -> None:
        self.prefix = prefix
        self.dtype = np.dtype(dtype)
        self._lengths: list[npt.NDArray[np.int32]] = []
        self._bin, self._index = (Draft(Path(f"{prefix}.{ending}")) for ending in ("bin", "idx"))
        self._digest = hashlib.sha256()

    def append_ids(self, ids: npt.NDArray[np.integer]) -> None:
        """Append ids of the shard's type."""
        self._bin.stream.write(ids.data)
        self._digest.update(ids.data)

    def append_lengths(self, lengths: npt.NDArray[np.int32]) -> None:
        """Append the lengths of the documents that the appended ids form, in order."""
        self._lengths.append(lengths)

    def finish(self) -> dict[str, Any]:
        """Publish .bin, then .idx; return the counts and hashes of `manifest.Shard`.

        The names are durable once the caller has synced the directory.
        """
        lengths = np.concatenate(self._lengths)
        content = index_bytes(lengths, self.dtype.name)
        self._index.stream.write(content)
        bin_bytes = self._bin.stream.tell()
        bin_sha256 = self._digest.hexdigest()
        idx_sha256 = hashlib.sha256(content).hexdigest()
        for draft, size, digest in (
            (self._bin, bin_bytes, bin_sha256),
            (self._index, len(content), idx_sha256),
        ):
            # An earlier run may have finished the very same file, which then stays.
            if file_problem(draft.path, size, digest):
                draft.publish()
            draft.discard()
        return {
            "documents": len(lengths),
            "tokens": int(lengths.sum(dtype=np.int64)),
            "bin_bytes": bin_bytes,
            "bin_sha256": bin_sha256,
            "idx_bytes": len(content),
            "idx_sha256": idx_sha256,
        }

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._bin.discard()
        self._index.discard()
