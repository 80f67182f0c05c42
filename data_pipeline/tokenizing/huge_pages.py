"""Huge pages for the encoder's tables.

gigatoken looks every word up in tables of tens of MB. With pages of 4 KiB most of these look-ups also miss
the processor's cache of addresses; with pages of 2 MiB tokenising takes some 10 % less time. glibc (from 2.35
on) asks the kernel for them if a setting says so when the process starts, and its child processes inherit the
setting. Other libraries pass over it, and some kernels give such pages unasked.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping

_TUNABLES = "GLIBC_TUNABLES"
_SETTING = "glibc.malloc.hugetlb"


def with_huge_pages(environment: Mapping[str, str]) -> dict[str, str] | None:
    """An environment that asks for huge pages; None if this one has a setting already, or none can be had."""
    set_before = environment.get(_TUNABLES, "")
    if sys.platform != "linux" or _SETTING in set_before:
        return None
    return dict(environment) | {_TUNABLES: ":".join(filter(None, [set_before, f"{_SETTING}=1"]))}


def restart_with_huge_pages() -> None:
    """Begin this program anew, as the same process, with huge pages; return if that is of no use."""
    environment = with_huge_pages(os.environ)
    if environment is not None:
        with contextlib.suppress(OSError):  # it works without
            os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
