"""Parts of a blend, and checks that two of them share no text across splits."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from data_pipeline.errors import DataError
from data_pipeline.shards.manifest import SPLITS, Manifest, Shard


@dataclass(frozen=True)
class Part:
    """Directory or one source of it (None is all), with its share of the samples."""

    manifest: Manifest
    source: str | None
    share: Fraction

    @property
    def name(self) -> str:
        """Return the name of the part for messages."""
        directory = str(self.manifest.directory)
        return directory if self.source is None else f"{directory} source {self.source}"

    def shards(self, split: str) -> list[Shard]:
        """Return the part's shards of a split."""
        return self.manifest.shards_of(split, self.source)


def overlap(a: Part, b: Part) -> bool:
    """Return whether two parts have data in common."""
    same = a.manifest.fingerprint == b.manifest.fingerprint
    return same and (a.source == b.source or None in (a.source, b.source))


def check_splits(a: Part, b: Part) -> None:
    """Refuse two parts of which one may train on text of an input that the other holds out.

    Raises:
        DataError: They do; the message names both and the first input.
    """
    options = [a.manifest.options, b.manifest.options]
    fractions = [[o.get(f"{split}_fraction", 0.0) for split in SPLITS[1:]] for o in options]
    if fractions[0] == fractions[1]:
        return  # a document's split is a function of its text and the fractions
    same_keys = options[0].get("keys") == options[1].get("keys")
    if same_keys and not _source_names(a) & _source_names(b):
        return
    ours = _input_names(a.manifest)
    theirs = _input_names(b.manifest)
    if shared := sorted(ours[key] for key in ours.keys() & theirs.keys()):
        stated = " and ".join("{:g} / {:g}".format(*pair) for pair in fractions)
        raise DataError(
            f"{a.name} and {b.name} hold text of the same inputs ({len(shared)}, the first is "
            f"{shared[0]}) with different --validation-fraction / --test-fraction ({stated}): what "
            f"one holds out the other trains on; tokenise one of them again with the other's "
            f"fractions, or drop one"
        )


def _source_names(part: Part) -> set[str]:
    return {shard.source for shard in part.manifest.shards if part.source in (None, shard.source)}


def _input_names(manifest: Manifest) -> dict[object, str]:
    """Return the names of inputs by hash; by name and size if an earlier version read parts."""
    names: dict[object, str] = {}
    for entry in manifest.inputs:
        whole = entry.end - entry.start == entry.size
        names[entry.sha256 if whole else (Path(entry.name).name, entry.size)] = entry.name
    return names
