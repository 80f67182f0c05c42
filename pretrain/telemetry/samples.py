"""Samples as TensorBoard's page TEXT shows them: markdown in which a model's text stays text."""

from __future__ import annotations

from collections.abc import Sequence

from pretrain.telemetry.records import Sample

SAMPLE_TAG = "samples/{}"
"""With the prompt's place in telemetry.sample_prompts, from 0."""


def sample_pages(samples: Sequence[Sample]) -> dict[str, str]:
    """{tag: markdown} of a step's samples."""
    return {SAMPLE_TAG.format(number): markdown_of(sample) for number, sample in enumerate(samples)}


def markdown_of(sample: Sample) -> str:
    """The prompt, then what was added.

    Both are blocks of code by their indentation, which no text can end; a fence of backticks it could.
    """
    tokens = f"{sample.tokens} {'token' if sample.tokens == 1 else 'tokens'}"
    end = ", then the end of the document" if sample.ended else ""
    parts = ["**Prompt**", _block(sample.prompt), f"**Continuation**, {tokens}{end}", _block(sample.text)]
    return "\n\n".join(parts)


def _block(text: str) -> str:
    """Every line indented, by whatever lines end: markdown takes a lone carriage return for an end too."""
    return "\n".join(f"    {line}" for line in text.splitlines())
