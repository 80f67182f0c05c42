"""A corpus that is the same on every machine: random words, drawn from a seed.

Golden curves, recordings and fixtures depend on it, unlike on the demo corpus, which is made of the
Python installation's own prose.
"""

from __future__ import annotations

import json
import random
from pathlib import Path


def write_made_corpus(directory: Path) -> None:
    """Write 200 documents of 150 words into `directory`/text.jsonl."""
    draw = random.Random(0)
    words = [
        "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9)))
        for _ in range(700)
    ]
    frequency = [1 / rank for rank in range(1, len(words) + 1)]
    directory.mkdir(parents=True)
    with (directory / "text.jsonl").open("w") as file:
        for _ in range(200):
            text = " ".join(draw.choices(words, frequency, k=150))
            file.write(json.dumps({"text": text, "meta": {"redpajama_set_name": "made"}}) + "\n")
