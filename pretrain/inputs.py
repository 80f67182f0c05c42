"""What can be refused before a rank starts: imports nothing heavy, so a mistake is answered at once."""

from __future__ import annotations

from data_pipeline.manifest import Manifest, read_manifest
from pretrain.config import Config, check_layout
from pretrain.errors import UserError


def check_inputs(config: Config, world_size: int) -> Manifest:
    """Everything that can be refused without starting a rank: the layout, and the data's manifest against the
    model.

    Raises:
        UserError, DataError
    """
    check_layout(config, world_size)
    manifest = read_manifest(config.data.directory)
    if config.model.vocab_size != manifest.tokenizer.vocab_size:
        raise UserError(
            f"model.vocab_size={config.model.vocab_size} but the tokenizer of {config.data.directory} has "
            f"{manifest.tokenizer.vocab_size} pieces; set model.vocab_size={manifest.tokenizer.vocab_size}"
        )
    return manifest
