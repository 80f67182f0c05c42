"""Formats of input files: the one table that discovery and reading follow.

A new packing is an entry of `_PACKINGS`, a new ending an entry of `FORMATS`; a new kind of content
also needs a reader in `records`.
"""

from __future__ import annotations

import lzma
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import orjson
import zstandard

from data_pipeline.io.files import LFS_POINTER

_LARGEST_WINDOW = 1 << 31


@dataclass(frozen=True)
class Packing:
    """Compression of a file.

    Attributes:
        begin: Maker of the decompressor of one frame (zstd), member (gzip) or stream (xz).
        broken: Error that the decompressor raises for damaged bytes.
        magic: First bytes of a frame, so that reading can continue there after damage. Without
            them, everything after the damage is lost, and zeros between frames are padding.
    """

    begin: Callable[[], Any]
    broken: type[Exception]
    magic: bytes = b""


@dataclass(frozen=True)
class Format:
    """Content of a file: `lines` (of JSON), `parquet` or `text`; and its packing."""

    kind: str
    packing: Packing | None = None


def _begin_zstd() -> Any:
    # zstandard's own readers stop after the first frame, or end silently in one that is cut.
    return zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW).decompressobj()


_ZSTD = Packing(_begin_zstd, zstandard.ZstdError, b"\x28\xb5\x2f\xfd")
_PACKINGS = {
    ".zst": _ZSTD,
    ".zstd": _ZSTD,
    ".gz": Packing(partial(zlib.decompressobj, zlib.MAX_WBITS | 16), zlib.error),
    ".xz": Packing(partial(lzma.LZMADecompressor, lzma.FORMAT_XZ), lzma.LZMAError),
}
_KINDS = {
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".json": "lines",
    ".txt": "text",
    ".md": "text",
}
FORMATS = MappingProxyType(
    {
        f"{ending}{packed}": Format(kind, packing)
        for ending, kind in _KINDS.items()
        for packed, packing in {"": None, **_PACKINGS}.items()
    }
    | {".parquet": Format("parquet")}
)
KNOWN_ENDINGS = ".jsonl, .ndjson, .json, .txt, .md (each also .zst, .zstd, .gz, .xz) or .parquet"
# Tables, which the package `datasets` reads.
TABLE_NAMES = tuple(f"{kind}{packed}" for kind in (".csv", ".tsv") for packed in ("", *_PACKINGS))
_TABLE = "a table; give csv:FILE, and --text-key for the column of the text"
_TAR = "a tar archive; unpack it first, or give webdataset:FILE if it is one"
_TAR_MAGIC = (257, b"ustar")
JSON_AS_A_WHOLE = (
    "JSON as a whole; write one record a line: jq -c '.[]' FILE > NEW.jsonl (jq -c . "
    "where it is not a list)"
)
_WHOLE = re.compile(rb"\s*(\[\s*(\{|\]|$)|\{\s*$)")
# Files that are not text, by ending and by their first bytes, and the way to convert them.
_FOREIGN = (
    (".pdf", b"%PDF-", "a PDF, not text; convert it: pdftotext -enc UTF-8 FILE.pdf FILE.txt"),
    (".docx", b"", "a Word document, not text; convert it: pandoc FILE.docx -o FILE.txt"),
    (".doc", b"\xd0\xcf\x11\xe0", "an old Office document, not text; save it as .txt"),
    (".odt", b"", "an OpenDocument text, not text; convert it: pandoc FILE.odt -o FILE.txt"),
    (".epub", b"", "an EPUB, not text; convert it: pandoc FILE.epub -t plain -o FILE.txt"),
    (".rtf", b"{\\rtf", "RTF, not text; convert it: pandoc FILE.rtf -o FILE.txt"),
    (".html", b"", "HTML, not text; convert it: pandoc FILE.html -t plain -o FILE.txt"),
    (".htm", b"", "HTML, not text; convert it: pandoc FILE.htm -t plain -o FILE.txt"),
    (".xlsx", b"", "a spreadsheet; save it as .csv with a header"),
    (".zip", b"PK\x03\x04", "a ZIP archive (a .docx and an .epub is one too); unpack it first"),
    *(
        (ending, b"", _TAR)
        for ending in (".tar", ".tgz", ".tar.gz", ".tar.zst", ".tar.xz", ".tar.bz2")
    ),
    *((ending, b"", _TABLE) for ending in TABLE_NAMES),
    (".arrow", b"ARROW1\0\0", "an Arrow file; give arrow:FILE, or the directory of save_to_disk"),
    (".gz", b"\x1f\x8b", "packed by gzip; name it by what is inside, as .txt.gz or .jsonl.gz"),
    (".zst", _ZSTD.magic, "packed by zstd; name it by what is inside, as .txt.zst or .jsonl.zst"),
    (".xz", b"\xfd7zXZ", "packed by xz; name it by what is inside, as .txt.xz or .jsonl.xz"),
    (".bz2", b"BZh91AY&SY", "packed by bzip2; unpack it first: bunzip2 FILE.bz2"),
    (".parquet", b"PAR1\x15", "a parquet file; name it .parquet"),
    ("", LFS_POINTER, "a pointer of Git LFS; fetch the file itself with `git lfs pull`"),
)


def format_of(name: str) -> Format | None:
    """Return the format of a file name by its ending, in any case; None if unknown."""
    lower = name.lower()
    return next((FORMATS[ending] for ending in FORMATS if lower.endswith(ending)), None)


def foreign_name(name: str) -> str | None:
    """Describe a file that is not text by its name, with the remedy; None if unknown."""
    lower = name.lower()
    return next((what for ending, _, what in _FOREIGN if ending and lower.endswith(ending)), None)


def foreign_content(content: bytes) -> str | None:
    """Describe bytes that are not text by their beginning, with the remedy; None if unknown."""
    offset, magic = _TAR_MAGIC
    if content[offset:].startswith(magic):
        return _TAR
    starts = ((start, description) for _, start, description in _FOREIGN if start)
    return next((description for start, description in starts if content.startswith(start)), None)


def is_whole_json(first: bytes, second: bytes) -> bool:
    """Return whether two first lines begin JSON that goes over lines, or are a list of records.

    Where the second line is JSON by itself, every line is a record, and the first is an odd one.
    """
    if _WHOLE.match(first) is None:
        return False
    try:
        orjson.loads(second)
    except orjson.JSONDecodeError:
        return True
    return False
