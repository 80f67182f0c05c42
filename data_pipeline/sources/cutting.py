"""Cuts of a long text into documents, while it is read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

# A .txt of more characters, such as a novel, is cut into documents up to this size: at blank lines;
# where more text than this has no blank line, at the end of a line; and in a longer line, at the
# end of a sentence, at a space, or anywhere.
TEXT_CHARACTERS = 1 << 14
_BLANK_LINES = re.compile(r"\n(?:[ \t]*\n)+")
_ENDS = (
    _BLANK_LINES,
    re.compile(r"\n(?:[ \t]*\n)*"),
    re.compile(r"(?<=[.!?]) |(?<=[。！？])"),
    re.compile(r"[ \t]"),
)
_WHITE = " \t\n"


class Cutter:
    """Cutter of a text into parts, as long as possible, without the white space at the cuts.

    Text without blank lines is cut at the ends of lines, a longer line at the ends of sentences, a
    longer sentence at spaces, and text with none of these at the limit. The parts do not depend on
    how the text is split into fragments. Memory holds about a fragment and a part, or the longest
    line.

    Args:
        limit: Most characters of a part.
        ends: Patterns of places to cut at, the best first.
    """

    def __init__(
        self, limit: int = TEXT_CHARACTERS, ends: Sequence[re.Pattern[str]] = _ENDS
    ) -> None:
        self._limit = limit
        self._ends = ends
        self._held = ""  # text that is not yet cut
        self._cut = False  # whether any part has been yielded
        self._long: Cutter | None = None  # cuts a part that is over the limit and still grows

    def feed(self, text: str, last: bool = False) -> Iterator[str]:
        """Yield the parts that are complete.

        Args:
            text: Next fragment of the text.
            last: Whether the text ends with this fragment.
        """
        text = self._held + text
        if not self._ends:
            cut_length = len(text) if last else len(text) - len(text) % self._limit
            yield from (
                text[offset : offset + self._limit] for offset in range(0, cut_length, self._limit)
            )
            self._held = text[cut_length:]
            return
        # White space at the end may be the beginning of a longer gap.
        end = len(text) if last else len(text.rstrip(_WHITE))
        start = 0  # of the present part
        last_gap = (0, 0)
        for gap in (match.span() for match in self._ends[0].finditer(text, 0, end)):
            if self._long is not None:
                yield from self._part(text[start : gap[0]])
                start = gap[1]
            elif gap[0] - start > self._limit and last_gap[0] > start:
                yield from self._part(text[start : last_gap[0]])
                start = last_gap[1]
            last_gap = gap
        if end - start > self._limit and last_gap[0] > start:
            yield from self._part(text[start : last_gap[0]])
            start = last_gap[1]
        if last:
            if self._long is not None or start < end or (text and not self._cut):
                yield from self._part(text[start:])
        elif self._long is not None or (end - start > self._limit and last_gap[0] <= start):
            self._long = self._long or Cutter(self._limit, self._ends[1:])
            yield from self._long.feed(text[start : end - 1])
            start = end - 1  # whether a cut fits next may depend on the character before it
        self._held = text[start:]

    def break_off(self) -> Iterator[str]:
        """Yield the complete parts of a text whose rest is lost, up to the last place for a cut."""
        if self._long is not None:
            yield from self._long.break_off()
        elif gaps := [*self._ends[0].finditer(self._held)] if self._ends else []:
            self._held = self._held[: gaps[-1].start()]
            yield from self.feed("", last=True)

    def _part(self, text: str) -> Iterator[str]:
        """Yield a complete part, cut further if it is over the limit."""
        self._cut = True
        if self._long is None and len(text) <= self._limit:
            yield text
            return
        cutter = self._long or Cutter(self._limit, self._ends[1:])
        self._long = None
        yield from cutter.feed(text, last=True)
