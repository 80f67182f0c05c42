"""Samples of documents that depend neither on their order nor on how files group them.

Every document has a number that follows from its text and a seed. A sample consists of the
documents with the lowest numbers, so it is spread over all files and sources as the text is, and
contains a duplicated document at most once.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter


def sample_number(text: bytes, seed: int = 0, purpose: bytes = b"sample") -> float:
    """Return the number of a text (UTF-8), from 0 to 1.

    The number is independent of the one that decides the text's split.

    Args:
        seed: Seed of the numbers.
        purpose: Purpose of the numbers, at most 16 bytes; different purposes have independent
            numbers.
    """
    salt = seed.to_bytes(8, "little")
    digest = hashlib.blake2b(text, digest_size=8, salt=salt, person=purpose).digest()
    return int.from_bytes(digest, "little") / 2**64


class LowestNumbers:
    """Sample of the added texts with the lowest numbers.

    Args:
        budget: Least bytes of all texts of the sample together.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._heap: list[tuple[float, bytes, str]] = []  # numbers negated: the largest is on top
        self._numbers: set[float] = set()
        self._bytes = 0

    def add(self, number: float, text: bytes, source: str) -> None:
        """Add a text, and drop texts that are no longer needed.

        Args:
            number: `sample_number` of the text.
            text: Text, as UTF-8.
        """
        full = self._bytes >= self._budget
        if number in self._numbers or (full and number > -self._heap[0][0]):
            return
        heapq.heappush(self._heap, (-number, text, source))
        self._numbers.add(number)
        self._bytes += len(text)
        while self._bytes - len(self._heap[0][1]) >= self._budget:
            self.pop_largest()

    def pop_largest(self) -> str:
        """Remove the text with the largest number and return it."""
        number, text, _ = heapq.heappop(self._heap)
        self._numbers.discard(-number)
        self._bytes -= len(text)
        return text.decode()

    def texts(self) -> list[str]:
        """Return the texts in the order of their numbers."""
        return [text.decode() for _, text, _ in sorted(self._heap, reverse=True)]

    def bytes_by_source(self) -> dict[str, int]:
        """Return the bytes of the sample for each source."""
        sizes: Counter[str] = Counter()
        for _, text, source in self._heap:
            sizes[source] += len(text)
        return dict(sorted(sizes.items()))
