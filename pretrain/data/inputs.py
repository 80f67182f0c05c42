"""Refusals before a rank is started; imports nothing heavy, so that the answer is quick."""

from __future__ import annotations

from data_pipeline.shards.blend import Blend, Member, make_blend
from data_pipeline.shards.manifest import read_manifest
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
