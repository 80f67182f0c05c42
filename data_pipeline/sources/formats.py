"""Formats of input files: the one table that discovery and reading follow.

A new packing is an entry of `_PACKINGS`, a new ending an entry of `FORMATS`; a new kind of content
also needs a reader in `records`.
"""

from __future__ import annotations

import lzma
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import zstandard

_LARGEST_WINDOW = 1 << 31


@dataclass(frozen=True)
class Packing:
    """Compression of a file.

    Attributes:
        begin: makes the decompressor of one frame (zstd), member (gzip) or stream (xz).
        broken: the error that the decompressor raises for damaged bytes.
        magic: how a frame begins, so that reading can continue there after damage. Without one,
            what follows the damage is lost, and zeros between frames are padding.
    """

    begin: Callable[[], Any]
    broken: type[Exception]
    magic: bytes = b""


@dataclass(frozen=True)
class Format:
    """Content of a file, one of `lines` (of JSON), `parquet`, `text`; and its packing, if any."""

    kind: str
    packing: Packing | None = None


def _begin_zstd() -> Any:
    # zstandard's own readers stop after the first frame, or end silently in one that is cut.
    return zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW).decompressobj()


def _begin_gzip() -> Any:
    return zlib.decompressobj(zlib.MAX_WBITS | 16)


def _begin_xz() -> Any:
    return lzma.LZMADecompressor(lzma.FORMAT_XZ)


_ZSTD = Packing(_begin_zstd, zstandard.ZstdError, b"\x28\xb5\x2f\xfd")
_PACKINGS = {
    ".zst": _ZSTD,
    ".zstd": _ZSTD,
    ".gz": Packing(_begin_gzip, zlib.error),
    ".xz": Packing(_begin_xz, lzma.LZMAError),
}
FORMATS = MappingProxyType(
    {
        ".jsonl": Format("lines"),
        ".ndjson": Format("lines"),
        ".parquet": Format("parquet"),
        ".txt": Format("text"),
        ".md": Format("text"),
    }
    | {
        f"{kind}{ending}": Format("lines", packing)
        for kind in (".jsonl", ".ndjson", ".json")
        for ending, packing in _PACKINGS.items()
    }
)
KNOWN_ENDINGS = (
    ".jsonl or .ndjson (also .zst, .zstd, .gz, .xz), .json.zst, .json.gz, .json.xz, .parquet, "
    ".txt, .md"
)


def format_of(name: str) -> Format | None:
    """Return the format that the ending of a file name tells, in any case; None if unknown."""
    lower = name.lower()
    return next((FORMATS[ending] for ending in FORMATS if lower.endswith(ending)), None)
