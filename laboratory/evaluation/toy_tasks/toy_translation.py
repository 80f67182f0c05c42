"""Translation into an invented language: word by word, with the adjective after its noun.

    the old cat sees a red house = la mari velo suda ne taro kibi .

`python -m laboratory.evaluation.toy_tasks.toy_translation FILE` writes sentences to train on; none
of the task's sentences is among them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

Pair: TypeAlias = dict[str, str]
"""{"source": an English sentence, "target": its translation}"""

ARTICLES = {"the": "la", "a": "ne"}
ADJECTIVES = {
    "old": "mari",
    "red": "kibi",
    "small": "tolu",
    "loud": "sefa",
    "cold": "dano",
    "green": "rupi",
}
NOUNS = {
    "cat": "velo",
    "house": "taro",
    "river": "nime",
    "child": "pasu",
    "bird": "geto",
    "tree": "lifa",
    "king": "bodu",
    "ship": "zera",
}
VERBS = {"sees": "suda", "finds": "feri", "leaves": "goma", "loves": "hito"}
HELD_OUT = 100
"""Sentences of which one, drawn by its hash, is held out for the task."""


def translate(words: tuple[str, ...]) -> str:
    """Translate article, adjective, noun, verb, article, adjective, noun."""
    first, adjective, noun, verb, second, other_adjective, other_noun = words
    subject = (ARTICLES[first], NOUNS[noun], ADJECTIVES[adjective])
    thing = (ARTICLES[second], NOUNS[other_noun], ADJECTIVES[other_adjective])
    return " ".join((*subject, VERBS[verb], *thing))


def pairs(held_out: bool) -> Iterator[Pair]:
    """Yield all sentences that are held out, or all others."""
    phrase = (ARTICLES, ADJECTIVES, NOUNS)
    for words in itertools.product(*phrase, VERBS, *phrase):
        source = " ".join(words)
        number = int.from_bytes(hashlib.sha256(source.encode()).digest()[:4], "big")
        if (number % HELD_OUT == 0) == held_out:
            yield {"source": source, "target": translate(words)}


def documents(**_: object) -> dict[str, Any]:
    """Return the splits of the task, as lm-evaluation-harness asks for them."""
    from datasets import Dataset

    return {"test": Dataset.from_list(list(pairs(held_out=True))[::4])}


def write_text(path: Path) -> int:
    """Write the sentences to train on, a JSON object each, and return their number."""
    lines = [
        json.dumps({"text": f"{pair['source']} = {pair['target']} ."}) for pair in pairs(False)
    ]
    # By hash, so that every shard and every batch has all kinds.
    lines.sort(key=lambda line: hashlib.sha256(line.encode()).digest())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return len(lines)


if __name__ == "__main__":
    print(f"{write_text(Path(sys.argv[1])):,} sentences in {sys.argv[1]}")
