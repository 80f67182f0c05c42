"""The data of a run: refusals before a rank starts, samples, held-out sets, data.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.shards.blend import Blend, BlendedSamples, Member, make_blend
from data_pipeline.shards.manifest import read_manifest
from data_pipeline.shards.samples import ValidationSamples
from data_pipeline.shards.unigram import unigram_perplexity
from pretrain.config.resolved import Resolved, resolve
from pretrain.config.sections import DataSection
from pretrain.config.tree import Config
from pretrain.data.prompts import Prompts, read_prompts
from pretrain.errors import UserError
from pretrain.ranks.idle import ending_when_idle

DEMO_SHARDS = Path("demo/shards")
"""Directory of the shards that the shipped configurations `demo` and `demo_modern` train on."""


@dataclass(frozen=True)
class Inputs:
    """A configuration that fits its ranks and its data.

    Attributes:
        prompts: the prompts of `telemetry.sample_prompts`; None: none.
    """

    resolved: Resolved
    blend: Blend
    prompts: Prompts | None


def check_inputs(config: Config, world_size: int) -> Inputs:
    """Refuse all that can be refused without starting a rank.

    Args:
        config: a configuration from `load`.
        world_size: number of ranks of the run, over all nodes.

    Raises:
        UserError: as `resolve` and `read_prompts`, or the tokenizer has another number of tokens.
        DataError: as `read_blend` and `read_prompts`.
    """
    resolved = resolve(config, world_size)
    with ending_when_idle("reading the manifests of the data", config.parallel.timeout_seconds):
        blend = read_blend(config.data)
    _check_vocabulary(config, blend)
    prompts = read_prompts(config.telemetry, config.data.sequence_length, blend)
    return Inputs(resolved, blend, prompts)


def _check_vocabulary(config: Config, blend: Blend) -> None:
    """Refuse a model with more or fewer tokens than the tokenizer of its data has.

    Raises:
        UserError: the remedy is one that `check_consistency` accepts.
    """
    tokens, ids = config.model.vocab_size, blend.parts[0].manifest.tokenizer.vocab_size
    if tokens == ids:
        return
    problem = (
        f"model.vocab_size={tokens} but the tokenizer of {blend.manifests[0].directory} has {ids} "
        "tokens"
    )
    weights = config.given_weights
    if weights is None:
        raise UserError(
            f"{problem}; set model.vocab_size={ids} (model.vocab_multiple adds rows to it)"
        )
    if ids > weights.model["vocab_size"]:
        raise UserError(
            f"{problem}, more than the model in {weights.path} has rows; tokenize with the "
            "tokenizer of that model"
        )
    raise UserError(
        f"{problem}; if that is the tokenizer of the model in {weights.path}, which has rows to "
        f"spare, set model.vocab_size={ids}; otherwise tokenize with the model's own"
    )


def read_blend(data: DataSection) -> Blend:
    """Read the manifests of data.directory or data.blend, checked against each other.

    Raises:
        DataError: a directory is not a finished shard directory, or they do not go together.
        UserError: the shards of the demo, which have a command of their own, are not there.
    """
    if data.directory == DEMO_SHARDS and not DEMO_SHARDS.is_dir():
        raise UserError(
            f"data directory {DEMO_SHARDS} does not exist (seen from {Path.cwd()}); "
            "`ora-pretrain demo --no-training` makes it here"
        )
    members = [
        Member(read_manifest(entry.directory), entry.weight, entry.sources)
        for entry in data.blend or ()
    ]
    if data.directory is not None:
        members = [Member(read_manifest(data.directory))]
    return make_blend(members)


@dataclass(frozen=True)
class RunData:
    """The training and validation data of a run.

    Attributes:
        boundary: the end-of-document id where attention is masked across documents; None where it
            is not.
        sequence_length: tokens of a sample that the model predicts.
    """

    blend: Blend
    boundary: int | None
    sequence_length: int
    samples: BlendedSamples
    validation: Mapping[str, ValidationSamples]


def open_data(data: DataSection, blend: Blend, *, seed: int, cache: Path | None = None) -> RunData:
    """Open every shard.

    Args:
        seed: seed of the sample order.
        cache: directory of sample orders; None: they are kept in memory, once they are needed.

    Raises:
        DataError: a shard cannot be opened, or a part of the blend is too small for one sample.
    """
    length = data.sequence_length
    return RunData(
        blend=blend,
        boundary=blend.eod_id if data.reset_at_document_end else None,
        sequence_length=length,
        samples=blend.training_samples(length, seed, cache),
        validation=blend.validation_samples(length, data.validation_samples),
    )


def data_facts(data: RunData) -> dict[str, Any]:
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
        "sequence_length": data.sequence_length,
        "parts": parts,
        "train_tokens": blend.train_tokens(),
        "validation_tokens": blend.validation_tokens(),
        "validation_bytes": blend.validation_bytes(),
        "unigram_perplexity": unigram_perplexity(blend),
    }
