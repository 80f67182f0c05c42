"""The data of a run: what is refused before a rank starts, samples, held-out sets, data.json's content."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from data_pipeline.shards.blend import Blend, BlendedSamples, Member, make_blend
from data_pipeline.shards.manifest import read_manifest
from data_pipeline.shards.samples import ValidationSamples
from pretrain.config.refusals import check_layout
from pretrain.config.tree import Config
from pretrain.data.prompts import read_prompts
from pretrain.errors import UserError


def check_inputs(config: Config, world_size: int) -> Blend:
    """Refuse all that can be refused without starting a rank: layout, prompts, the data against the model.

    Raises UserError, DataError.
    """
    check_layout(config, world_size)
    blend = read_blend(config)
    tokenizer = blend.parts[0].manifest.tokenizer
    if config.model.vocab_size != tokenizer.vocab_size:
        raise UserError(
            f"model.vocab_size={config.model.vocab_size} but the tokenizer of "
            f"{blend.manifests[0].directory} has {tokenizer.vocab_size} pieces; "
            f"set model.vocab_size={tokenizer.vocab_size} (model.vocab_multiple adds rows to it)"
        )
    read_prompts(config, blend)
    return blend


def read_blend(config: Config) -> Blend:
    """Read the manifests of data.directory or data.blend, checked against each other.

    Raises DataError: a directory is not a finished shard directory, or they do not go together.
    """
    if config.data.directory is not None:
        return make_blend([Member(read_manifest(config.data.directory))])
    entries = config.data.blend or ()
    return make_blend([Member(read_manifest(e.directory), e.weight, e.sources) for e in entries])


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
    return RunData(
        blend, boundary, samples, blend.validation_samples(length, config.data.validation_samples)
    )


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
