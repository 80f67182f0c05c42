"""Samples of documents that are the same whatever the order, the grouping or the number of workers.

Every document has a number that follows from its text and a seed. A sample is the documents with the lowest
numbers: so it is spread over all files and sources as the text itself is, and a document that is there twice
is taken once or not at all.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter


def sample_number(text: bytes, seed: int = 0, purpose: bytes = b"sample") -> float:
    """A number from 0 to 1. It has nothing to do with the one that decides the document's split."""
    salt = seed.to_bytes(8, "little")
    digest = hashlib.blake2b(text, digest_size=8, salt=salt, person=purpose).digest()
    return int.from_bytes(digest, "little") / 2**64


class LowestNumbers:
    """Of all texts added, those with the lowest numbers that together have at least `budget` bytes."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._heap: list[tuple[float, bytes, str]] = []  # the largest number first
        self._numbers: set[float] = set()
        self._bytes = 0

    def add(self, number: float, text: bytes, source: str) -> None:
        """Take a text, and drop those that are no longer needed."""
        full = self._bytes >= self._budget
        if number in self._numbers or (full and number > -self._heap[0][0]):
            return
        heapq.heappush(self._heap, (-number, text, source))
        self._numbers.add(number)
        self._bytes += len(text)
        while self._bytes - len(self._heap[0][1]) >= self._budget:
            dropped, text, _ = heapq.heappop(self._heap)
            self._numbers.discard(-dropped)
            self._bytes -= len(text)

    def texts(self) -> list[str]:
        """The texts by their numbers."""
        return [text.decode() for _, text, _ in sorted(self._heap, reverse=True)]

    def bytes_by_source(self) -> dict[str, int]:
        """How much of them is of which source."""
        sizes: Counter[str] = Counter()
        for _, text, source in self._heap:
            sizes[source] += len(text)
        return dict(sorted(sizes.items()))
