"""Rank functions of test_prompts.py: train with and without prompts.

Continue prompts the plain way.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pretrain.config.load import load_config
from pretrain.data.prompts import read_prompts
from pretrain.export.trained_run import load_model, open_trained_run
from pretrain.ranks.single_process import one_process

SURE = 1e-5
"""Logits that are nearer to each other may change places with the layout."""


def continue_all(payload: dict[str, Any]) -> dict[str, Any]:
    """{run: {step: [(text, tokens, ended, sure) of each prompt]}}, of checkpoints, on one rank."""
    with one_process() as context:
        return {
            name: {step: _continuations(Path(path), step, context) for step in payload["steps"]}
            for name, path in payload["paths"].items()
        }


def _continuations(path: Path, step: int, context: Any) -> list[tuple[str, int, bool, bool]]:
    run = open_trained_run(path, step)
    model = load_model(run, context)
    config = load_config(str(path / "config.yaml"))  # `run.config` is one without prompts
    prompts = read_prompts(config.telemetry, config.data.sequence_length, run.blend)
    assert prompts is not None
    continuations = []
    for number, prompt in enumerate(prompts.ids):
        ids = list(prompt)
        ended = False
        sure = True
        while not ended and sure and len(ids) < len(prompt) + prompts.tokens:
            # One prompt alone, nothing behind it, the logits of all its positions.
            with torch.no_grad():
                logits = model(torch.tensor([ids]), torch.arange(len(ids))[None], None)[0, -1]
            first, second = logits.topk(2).values.tolist()
            chosen = int(logits.argmax())
            sure = first - second > SURE
            ended = sure and chosen == prompts.eod_id
            if sure and not ended:
                ids.append(chosen)
        added = ids[len(prompt) :]
        continuations.append((prompts.added(number, added), len(added), ended, sure))
    return continuations
