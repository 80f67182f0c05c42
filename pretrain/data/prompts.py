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

    Attributes:
        ids: Ids of each text, at least one.
        tokens: Number of tokens by which each prompt is continued; together with the longest prompt
            they fit into `data.sequence_length`.
        eod_id: The end-of-document id, which ends a continuation early.
    """

    texts: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]
    tokens: int
    eod_id: int
    tokenizer: Tokenizer

    def added(self, number: int, ids: Sequence[int]) -> str:
        """Return the text that following ids add to a prompt.

        Args:
            number: Number of the prompt.
            ids: Ids that follow the prompt.
        """
        prompt = self.ids[number]
        prompt_text = self.tokenizer.decode(prompt)
        # Decoded alone, the first id could lose the space before it.
        whole = self.tokenizer.decode([*prompt, *ids])
        if whole.startswith(prompt_text):
            return whole.removeprefix(prompt_text)
        return self.tokenizer.decode(ids)


def read_prompts(telemetry: TelemetrySection, length: int, blend: Blend) -> Prompts | None:
    """Read and encode the prompts of a run.

    Args:
        telemetry: Section with the prompts, and the number of tokens to add to each.
        length: Tokens of a training sample (`data.sequence_length`).
        blend: Blend whose tokenizer encodes the prompts.

    Returns:
        The prompts; None without any.

    Raises:
        UserError: a prompt is too long for its continuation to fit, or has no tokens.
        DataError: the tokenizer of the shards cannot be read.
    """
    if not telemetry.sample_prompts:
        return None
    prompts = [
        (f"telemetry.sample_prompts.{n}", text) for n, text in enumerate(telemetry.sample_prompts)
    ]
    tokens = ("telemetry.sample_tokens", telemetry.sample_tokens)
    return encode_prompts(prompts, tokens, length, blend)


def encode_prompts(
    prompts: Sequence[tuple[str, str]], tokens: tuple[str, int], length: int, blend: Blend
) -> Prompts:
    """Encode prompts that fit a model's context length with their continuations.

    Args:
        prompts: (key, text) of each prompt.
        tokens: Key and number of the tokens to add.
        length: Context length in tokens.
        blend: Blend whose tokenizer encodes the prompts.

    Raises:
        UserError: as `read_prompts`.
        DataError: as `read_prompts`.
    """
    tokenizer = open_tokenizer(blend.manifests[0].tokenizer_path)
    key, added = tokens
    encoded = []
    for name, text in prompts:
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
        texts=tuple(text for _, text in prompts),
        ids=tuple(encoded),
        tokens=added,
        eod_id=blend.eod_id,
        tokenizer=tokenizer,
    )
