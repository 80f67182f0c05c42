"""Blends of shard directories, and of sources inside them: one stream of samples.

    members = [Member(one, 0.7), Member(another, 0.3, {"Wikipedia": 2, "Book": 1})]
    blend = make_blend(members)
    samples = blend.training_samples(sequence_length=1024, seed=1234)

A part is a whole directory (its sources in proportion to their tokens), or one source of a
directory. Every part has an order and epochs of its own, each shuffled anew, and runs through them
as fast as its weight says: a small part may be in its tenth epoch while a large one is in its
first.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.errors import DataError
from data_pipeline.shards.documents import FORGET_AFTER
from data_pipeline.shards.manifest import Manifest
from data_pipeline.shards.parts import Part, check_splits, overlap
from data_pipeline.shards.permutation import Int64Array
from data_pipeline.shards.proportions import Proportions, exact_shares
from data_pipeline.shards.samples import TrainingSamples, ValidationSamples


@dataclass(frozen=True)
class Member:
    """Shard directory with its weight in a blend.

    Attributes:
        manifest: Manifest of the directory.
        weight: Weight, in any unit.
        sources: Weights of the sources to take, in any unit; None takes all, in proportion to their
            tokens.
    """

    manifest: Manifest
    weight: float | Fraction = 1
    sources: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Blend:
    """Parts whose shares sum to 1, in an order that does not depend on how a user lists them."""

    parts: tuple[Part, ...]

    @property
    def manifests(self) -> list[Manifest]:
        """Return the shard directories, each once."""
        return list({part.manifest.fingerprint: part.manifest for part in self.parts}.values())

    @property
    def eod_id(self) -> int:
        """Return the id that ends every document."""
        return self.parts[0].manifest.tokenizer.eod_id

    @property
    def fingerprint(self) -> str:
        """Return the identity of the data: the manifest's, or over all parts if there are more."""
        if _is_whole_directory(self.parts):
            return self.parts[0].manifest.fingerprint
        content = [[p.manifest.fingerprint, p.source, str(p.share)] for p in self.parts]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def training_samples(
        self, sequence_length: int, seed: int, cache_directory: Path | None = None
    ) -> BlendedSamples:
        """Open the training samples; DataError if a part has too few tokens for one sample.

        Args:
            sequence_length: Tokens that a sample predicts.
            seed: Seed of the order.
            cache_directory: Directory of the cached orders of epochs; None keeps them in memory.
        """
        alone = _is_whole_directory(self.parts)
        members = [
            TrainingSamples(
                part.manifest,
                sequence_length,
                seed,
                cache_directory=cache_directory,
                source=part.source,
                # All parts together keep about as many pages resident as one directory does.
                forget_after=max(16, FORGET_AFTER // len(self.parts)),
                # Parts are shuffled independently; a directory alone needs no salt.
                salt="" if alone else f"{part.manifest.fingerprint} {part.source or ''}",
            )
            for part in self.parts
        ]
        return BlendedSamples(members, Proportions([part.share for part in self.parts]))

    def validation_samples(
        self, sequence_length: int, max_samples: int
    ) -> dict[str, ValidationSamples]:
        """Open a held-out set for every source that is trained on, by name.

        Args:
            sequence_length: Tokens that a sample predicts.
            max_samples: Samples of each set.

        Raises:
            DataError: If a set has too few tokens for one sample.
        """
        return {
            source: ValidationSamples(manifests, source, sequence_length, max_samples)
            for source, manifests in self._held_out().items()
        }

    def validation_tokens(self) -> dict[str, int]:
        """Return the number of held-out tokens of every source."""
        return {
            source: sum(manifest.tokens("validation", source) for manifest in manifests)
            for source, manifests in self._held_out().items()
        }

    def validation_bytes(self) -> dict[str, int]:
        """Return the bytes of held-out text of every source."""
        return {
            source: sum(s.text_bytes for m in manifests for s in m.shards_of("validation", source))
            for source, manifests in self._held_out().items()
        }

    def train_tokens(self) -> int:
        """Return the training tokens of all parts."""
        return sum(part.manifest.tokens("train", part.source) for part in self.parts)

    def describe(self) -> dict[str, Any]:
        """Describe the blend as JSON; `shards.blend_difference` compares two descriptions."""
        return {
            "tokenizer": self.parts[0].manifest.tokenizer.sha256,
            "directories": [
                {
                    "directory": str(m.directory),
                    "fingerprint": m.fingerprint,
                    "sources": _sources(m),
                }
                for m in self.manifests
            ],
            "parts": [
                {"fingerprint": p.manifest.fingerprint, "source": p.source, "share": str(p.share)}
                for p in self.parts
            ],
        }

    def _held_out(self) -> dict[str, list[Manifest]]:
        manifests: dict[str, list[Manifest]] = {}
        for part in self.parts:
            for source in part.manifest.sources("validation"):
                if part.source in (None, source):
                    manifests.setdefault(source, []).append(part.manifest)
        return dict(sorted(manifests.items()))


class BlendedSamples:
    """Endless training samples of the parts of a blend."""

    def __init__(self, members: Sequence[TrainingSamples], proportions: Proportions) -> None:
        self.members = list(members)
        self.sequence_length = members[0].sequence_length
        self._proportions = proportions

    def blocks(self, sample_numbers: Int64Array) -> Int64Array:
        """Read samples: [n] numbers -> [n, sequence_length + 1] ids, int64. Thread-safe."""
        result = np.empty((len(sample_numbers), self.sequence_length + 1), dtype=np.int64)
        members, numbers = self._proportions.locate(sample_numbers)
        for member in np.unique(members).tolist():
            rows = members == member
            result[rows] = self.members[member].blocks(numbers[rows])
        return result

    def origins(self, sample_number: int) -> list[str]:
        """Return `SHARD, document NUMBER` of each id of a sample, [sequence_length + 1]."""
        (member,), (number,) = self._proportions.locate(np.array([sample_number]))
        return self.members[member].origins(int(number))

    def prepare(self, sample_number: int) -> None:
        """Make or load the orders of the epochs into which this sample number falls."""
        counts = self._proportions.before(sample_number)
        for member, consumed in zip(self.members, counts, strict=True):
            member.epoch(consumed // member.samples_per_epoch)


def make_blend(members: Sequence[Member]) -> Blend:
    """Check that shard directories fit together and compute each part's share of the samples.

    Raises:
        DataError: If there is no member, a weight is not above 0, a source is unknown, the same
            data comes twice, the same text is in different splits, or tokenizers differ; the
            message names both directories where two disagree.
    """
    if not members:
        raise DataError("a blend needs at least one shard directory")
    first = members[0].manifest
    parts = []
    for member, share in zip(members, exact_shares([m.weight for m in members]), strict=True):
        manifest = member.manifest
        if manifest.tokenizer.eod_id != first.tokenizer.eod_id:
            raise DataError(
                f"documents end with id {first.tokenizer.eod_id} in {first.directory} and with id "
                f"{manifest.tokenizer.eod_id} in {manifest.directory}; tokenise one of them again "
                "with the other's --eod-token"
            )
        if manifest.tokenizer.sha256 != first.tokenizer.sha256 or manifest.dtype != first.dtype:
            raise DataError(
                f"{first.directory} and {manifest.directory} were made with different tokenizers; "
                f"tokenise one of them again with the other's {first.tokenizer.file}"
            )
        if member.sources is None:
            parts.append(Part(manifest, None, share))
            continue
        parts += _source_parts(member, share)
    for position, part in enumerate(parts):
        for other in parts[:position]:
            if overlap(part, other):
                raise DataError(
                    f"the blend has the same data twice, as {other.name} and {part.name}; drop one"
                )
            check_splits(other, part)
    # Sorted, so that the samples do not depend on the order in which a user lists the directories.
    return Blend(tuple(sorted(parts, key=lambda p: (p.manifest.fingerprint, p.source or ""))))


def _source_parts(member: Member, share: Fraction) -> list[Part]:
    manifest = member.manifest
    sources = member.sources or {}
    if not sources:
        raise DataError(
            f"{manifest.directory} is in the blend with no sources; leave `sources` out to take all"
        )
    for source in sources:
        if source not in manifest.sources("train"):
            raise DataError(
                f"{manifest.directory} has no train documents of source {source!r}; "
                f"it has {', '.join(manifest.sources('train')) or 'none at all'}"
            )
    within = zip(sources, exact_shares(list(sources.values())), strict=True)
    return [Part(manifest, source, share * part) for source, part in within]


def _is_whole_directory(parts: Sequence[Part]) -> bool:
    return len(parts) == 1 and parts[0].source is None


def _sources(manifest: Manifest) -> dict[str, Any]:
    """Describe each source of the training split: documents, tokens, and a digest of its files."""
    described = {}
    for source in manifest.sources("train"):
        shards = manifest.shards_of("train", source)
        content = "\n".join(f"{s.number} {s.bin_sha256}" for s in shards)
        described[source] = {
            "documents": sum(s.documents for s in shards),
            "tokens": sum(s.tokens for s in shards),
            "sha256": hashlib.sha256(content.encode()).hexdigest(),
        }
    return described
