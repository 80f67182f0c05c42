"""The prompts that a run's model continues at every validation, in the ids of the run's tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from data_pipeline.shards.blend import Blend
from data_pipeline.tokenizer.tokenizer import Tokenizer, open_tokenizer
from pretrain.config.tree import Config
from pretrain.errors import UserError


@dataclass(frozen=True)
class Prompts:
    """The prompts of `telemetry.sample_prompts`.

    ids: those of every text, at least one.
    tokens: by how many each is continued; they and the longest prompt fit into `data.sequence_length`.
    eod_id: ends a continuation before that.
    """

    texts: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]
    tokens: int
    eod_id: int
    tokenizer: Tokenizer

    def added(self, number: int, ids: Sequence[int]) -> str:
        """Return the text that `ids` add to a prompt's own."""
        prompt = self.ids[number]
        before, whole = self.tokenizer.decode(prompt), self.tokenizer.decode([*prompt, *ids])
        # Decoded alone, the first of them could lose its space.
        return whole.removeprefix(before) if whole.startswith(before) else self.tokenizer.decode(ids)


def read_prompts(config: Config, blend: Blend) -> Prompts | None:
    """Read the prompts in ids; None: there are none.

    Raises UserError: one is longer than there is room for, or nothing is left of it; DataError: the tokenizer
    of the shards cannot be read.
    """
    texts, tokens = config.telemetry.sample_prompts, config.telemetry.sample_tokens
    if not texts:
        return None
    tokenizer = open_tokenizer(blend.manifests[0].tokenizer_path)
    length, encoded = config.data.sequence_length, []
    for number, text in enumerate(texts):
        key = f"telemetry.sample_prompts.{number}"
        (ids,) = tokenizer.encode([text])
        if not len(ids):
            raise UserError(f"{key} is nothing to the tokenizer; give it other text, or leave it out")
        if len(ids) + tokens > length:
            raise UserError(
                f"{key} has {len(ids)} tokens, which with telemetry.sample_tokens={tokens} is more than "
                f"data.sequence_length={length}; shorten it, or lower telemetry.sample_tokens"
            )
        encoded.append(tuple(ids.tolist()))
    return Prompts(texts, tuple(encoded), tokens, blend.eod_id, tokenizer)
