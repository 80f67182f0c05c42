"""Error lines of a log: this program's `error: …`, and the last line of a traceback."""

from __future__ import annotations

import re
from collections.abc import Iterable

_ERROR_LINE = re.compile(r"error: |(\w+\.)*\w*(Error|Exception|Interrupt)(:|$)")


def error_lines(lines: Iterable[str]) -> list[str]:
    """Return the lines that begin like an error, in order."""
    return [line for line in lines if _ERROR_LINE.match(line)]
