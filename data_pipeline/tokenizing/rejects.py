"""Limits on lost input: rejected lines up to a rate, and the files that are damaged."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.errors import DataError
from data_pipeline.shards.manifest import MANIFEST_NAME, Manifest
from data_pipeline.sources.discovery import RecordKeys
from data_pipeline.tokenizing.plan import options_of

# After _ENOUGH_LINES, a run at _TOO_MANY times the allowed rate is stopped before its end.
_ENOUGH_LINES = 10_000
_TOO_MANY = 10
_NAMED_FILES = 5


@dataclass(frozen=True)
class Limits:
    """Limits at which a run stops; they do not change what is written.

    Args:
        strict: Whether to stop at the first line that is not a document, and at any entry not read.
        max_reject_rate: Largest share of all lines that may be rejected.

    Raises:
        DataError: If the rate is impossible.
    """

    strict: bool = False
    max_reject_rate: float = 0.01

    def __post_init__(self) -> None:
        if not 0 <= self.max_reject_rate <= 1:
            raise DataError(f"--max-reject-rate {self.max_reject_rate} must be from 0 to 1")


class RejectWatch:
    """Counter of rejected lines over units, as their records arrive.

    Args:
        directory: Shard directory, for messages.

    Attributes:
        damaged: Files that could not be read to their end, each with what was lost.
    """

    def __init__(self, limits: Limits, directory: Path) -> None:
        self._limits = limits
        self._directory = directory
        self._lines = self._rejected = 0
        self._files: dict[str, list[int]] = {}
        self.damaged: list[str] = []

    def add(self, record: dict[str, Any]) -> None:
        """Add a unit's record.

        Raises:
            DataError: If so many lines are rejected that the rest of the inputs cannot matter.
        """
        for entry in record["inputs"]:
            self._lines += entry["lines"]
            self._rejected += entry["rejected"]
            if entry["rejected"]:
                counts = self._files.setdefault(entry["name"], [0, 0])
                counts[0] += entry["rejected"]
                counts[1] += entry["lines"]
            if entry["damaged"]:
                self.damaged.append(f"{entry['name']}: {entry['damaged']}")
        if self._lines >= _ENOUGH_LINES:
            self.check(_TOO_MANY)

    def check(self, times: int = 1) -> None:
        """Compare the rate with the limit.

        Args:
            times: Multiple of the limit.

        Raises:
            DataError: If the rate is above that multiple.
        """
        if self._rejected <= times * self._limits.max_reject_rate * self._lines:
            return
        worst = sorted(self._files.items(), key=lambda item: (-item[1][0], item[0]))
        worst_files = ", ".join(
            f"{name} ({count:,} of {lines:,})" for name, (count, lines) in worst[:_NAMED_FILES]
        )
        more = f" and {len(worst) - _NAMED_FILES} more" if len(worst) > _NAMED_FILES else ""
        more += f"; damaged is {self.damaged[0]}" if self.damaged else ""
        raise DataError(
            f"{self._rejected:,} of {self._lines:,} lines are not documents, more than "
            f"--max-reject-rate {self._limits.max_reject_rate:g} allows: {worst_files}{more}; see "
            f"{self._directory}/units/*.rejects.jsonl, fix the files and choose another --out, or "
            f"allow a higher rate and run the same command again"
        )


def notes(manifest: Manifest) -> list[str]:
    """Return remarks on a finished directory that its options do not lead one to expect."""
    remarks = []
    sources = {shard.source for shard in manifest.shards} | manifest.excluded_documents.keys()
    present_sources = ", ".join(sorted(sources)[:20])
    options = options_of(manifest.options, manifest.directory / MANIFEST_NAME)
    asked = {"--source": options.sources, "--exclude-source": options.exclude_sources}
    for flag, names in asked.items():
        remarks += [
            f"{flag} {name!r}: no document is of that source; there are {present_sources}"
            for name in names
            if name not in sources
        ]
    keys = options.keys
    if keys.source != RecordKeys().source and sources == {keys.default_source}:
        remarks.append(
            f"--source-key {keys.source!r}: no record names its source there, so all are of "
            f"{keys.default_source}"
        )
    empty_inputs = [
        entry.name
        for entry in manifest.inputs
        if entry.size and not entry.lines and not entry.damaged
    ]
    if empty_inputs:
        remarks.append(f"{len(empty_inputs):,} inputs hold no lines: {', '.join(empty_inputs[:5])}")
    return remarks
