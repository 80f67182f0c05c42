"""Texts of trained runs after the same prompts, by their models as they are: no export is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from pretrain.data.prompts import encode_prompts
from pretrain.export.trained_run import load_model, open_trained_run
from pretrain.ranks.single_process import one_process
from pretrain.training.prompts import continue_prompts

TEMPERATURE = 0.8


def model_texts(
    runs: Sequence[Path], prompts: Sequence[str], tokens: int, seed: int = 0
) -> Mapping[Path, tuple[str, ...]]:
    """Return {run: text after each prompt}, drawn at TEMPERATURE; the draws of every run are of one seed.

    What cannot be printed is a middle dot, so that the text shows the same everywhere. Raises UserError: as
    `open_trained_run`, `load_model` and `encode_prompts`; DataError: the shards of a run are missing.
    """
    texts = {}
    with one_process() as context:
        for path in runs:
            run = open_trained_run(path)
            named = [(f"--prompt {text!r}", text) for text in prompts]
            encoded = encode_prompts(
                named, ("--sample-tokens", tokens), run.config.data.sequence_length, run.blend
            )
            draws = torch.Generator(context.device).manual_seed(seed)

            def draw(logits: torch.Tensor, draws: torch.Generator = draws) -> torch.Tensor:
                return torch.multinomial(
                    torch.softmax(logits.double() / TEMPERATURE, -1), 1, generator=draws
                )[:, 0]

            boundary = run.blend.eod_id if run.config.data.reset_at_document_end else None
            model = load_model(run, context)
            samples = continue_prompts(model, encoded, run.config, boundary, context, draw)
            texts[path] = tuple(_printable(sample.text) for sample in samples)
    return texts


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "·" for letter in text)
