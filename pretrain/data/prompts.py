"""The prompts that a run's model continues at every validation, in ids of its tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from data_pipeline.shards.blend import Blend
from data_pipeline.tokenizer.tokenizer import Tokenizer, open_tokenizer
from pretrain.config.sections import TelemetrySection
from pretrain.errors import UserError


@dataclass(frozen=True)
class Prompts:
    """The prompts of `telemetry.sample_prompts`.

    ids: those of every text, at least one. tokens: by how many each is continued; they and the
    longest prompt fit into `data.sequence_length`. eod_id: ends a continuation before that.
    """

    texts: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]
    tokens: int
    eod_id: int
    tokenizer: Tokenizer

    def added(self, number: int, ids: Sequence[int]) -> str:
        """Return the text that `ids` add to a prompt's own.

        Args:
            number: of the prompt.
            ids: that follow it.
        """
        prompt = self.ids[number]
        before = self.tokenizer.decode(prompt)
        # Decoded alone, the first of them could lose its space.
        whole = self.tokenizer.decode([*prompt, *ids])
        if whole.startswith(before):
            return whole.removeprefix(before)
        return self.tokenizer.decode(ids)


def read_prompts(telemetry: TelemetrySection, length: int, blend: Blend) -> Prompts | None:
    """Read the prompts of a run in ids.

    Args:
        telemetry: names the prompts, and the tokens to add to each.
        length: tokens of a training sample (`data.sequence_length`).
        blend: the data, whose tokenizer encodes them.

    Returns:
        The prompts; None: there are none.

    Raises:
        UserError: a prompt is longer than there is room for, or nothing is left of it.
        DataError: the tokenizer of the shards cannot be read.
    """
    if not telemetry.sample_prompts:
        return None
    named = [
        (f"telemetry.sample_prompts.{n}", text) for n, text in enumerate(telemetry.sample_prompts)
    ]
    tokens = ("telemetry.sample_tokens", telemetry.sample_tokens)
    return encode_prompts(named, tokens, length, blend)


def encode_prompts(
    named: Sequence[tuple[str, str]], tokens: tuple[str, int], length: int, blend: Blend
) -> Prompts:
    """Encode prompts for models of a context length.

    Args:
        named: (key, text) of each.
        tokens: key and number of the tokens to add.
        length: of the context, in tokens.
        blend: the data, whose tokenizer encodes them.

    Raises:
        UserError: as `read_prompts`.
        DataError: as `read_prompts`.
    """
    tokenizer = open_tokenizer(blend.manifests[0].tokenizer_path)
    key, added = tokens
    encoded = []
    for name, text in named:
        (ids,) = tokenizer.encode([text])
        if not len(ids):
            raise UserError(
                f"{name} is nothing to the tokenizer; give it other text, or leave it out"
            )
        if len(ids) + added > length:
            raise UserError(
                f"{name} has {len(ids)} tokens, which with {key}={added} is more than "
                f"data.sequence_length={length}; shorten it, or lower {key}"
            )
        encoded.append(tuple(ids.tolist()))
    return Prompts(
        texts=tuple(text for _, text in named),
        ids=tuple(encoded),
        tokens=added,
        eod_id=blend.eod_id,
        tokenizer=tokenizer,
    )
