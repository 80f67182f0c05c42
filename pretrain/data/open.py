"""The data of a run: its samples, its held-out sets, and the content of data.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from data_pipeline.shards.blend import Blend, BlendedSamples
from data_pipeline.shards.samples import ValidationSamples
from pretrain.config.tree import Config


@dataclass(frozen=True)
class RunData:
    """The training and validation data of a run."""

    blend: Blend
    boundary: int | None
    """The end-of-document id where documents of a sample stand alone; None where they do not."""
    samples: BlendedSamples
    validation: Mapping[str, ValidationSamples]


def open_data(config: Config, blend: Blend) -> RunData:
    """Open every shard.

    Raises DataError: a shard cannot be opened, or a part of the blend is too small for one sample.
    """
    length = config.data.sequence_length
    samples = blend.training_samples(length, config.data_seed, config.sample_cache)
    boundary = blend.eod_id if config.data.reset_at_document_end else None
    return RunData(blend, boundary, samples, blend.validation_samples(length, config.data.validation_samples))


def data_facts(config: Config, data: RunData) -> dict[str, Any]:
    """Return the content of data.json."""
    blend = data.blend
    parts = [
        {
            "directory": str(part.manifest.directory),
            "source": part.source,
            "share": float(part.share),
            "tokens": part.manifest.tokens("train", part.source),
            "samples_per_epoch": member.samples_per_epoch,
        }
        for part, member in zip(blend.parts, data.samples.members, strict=True)
    ]
    return {
        "directory": ", ".join(str(manifest.directory) for manifest in blend.manifests),
        "fingerprint": blend.fingerprint,
        "sequence_length": config.data.sequence_length,
        "parts": parts,
        "train_tokens": blend.train_tokens(),
        "validation_tokens": blend.validation_tokens(),
        "validation_bytes": blend.validation_bytes(),
        "unigram_perplexity": blend.unigram_perplexity(),
    }
