"""Memory maps of files that hold no descriptor.

Python's own `mmap` (and with it numpy.memmap and np.load) duplicates the descriptor and keeps it
as long as the map exists (until Python 3.13's `trackfd`), so a process with a thousand maps runs
out of descriptors. The kernel needs none: here a file is closed as soon as it is mapped.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import weakref
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data_pipeline.io.files import open_regular

_PROT_READ, _MAP_SHARED = 1, 1  # the same numbers on Linux and macOS
_FAILED = ctypes.c_void_p(-1).value


class FileMap:
    """Read-only map of a file.

    Attributes:
        content: [size] uint8, the file's bytes. Arrays made from them keep the map alive.
    """

    def __init__(self, path: Path) -> None:
        with open_regular(path) as stream:
            self._size = os.fstat(stream.fileno()).st_size
            if self._size == 0:
                self.content: npt.NDArray[np.uint8] = np.zeros(0, dtype=np.uint8)
                return
            arguments = (_PROT_READ, _MAP_SHARED, stream.fileno(), 0)
            address = _libc().mmap(None, self._size, *arguments)
            if address == _FAILED:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number), str(path))
        self._address = address
        buffer = (ctypes.c_uint8 * self._size).from_address(address)
        # Every array over the map refers to this buffer: the map ends when the last of them does.
        unmap = weakref.finalize(buffer, _libc().munmap, address, self._size)
        # At exit the kernel unmaps everything, and other code may still read the arrays.
        unmap.atexit = False
        self.content = np.frombuffer(memoryview(buffer), dtype=np.uint8)
        self.content.flags.writeable = False

    def expect_random_access(self) -> None:
        """Tell the kernel that reading ahead does not pay."""
        self._advise(mmap.MADV_RANDOM)

    def forget_pages(self) -> None:
        """Take the pages read so far out of this process's memory; the page cache keeps them."""
        self._advise(mmap.MADV_DONTNEED)

    def _advise(self, advice: int) -> None:
        if self._size:
            _libc().madvise(self._address, self._size, advice)


@functools.cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library
