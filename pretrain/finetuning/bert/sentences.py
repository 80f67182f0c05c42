"""Real text for a test without downloads: its sentences, and which of two sources each is from.

Every document belongs to one side for good, by a hash of its text: one of VALIDATION_ONE_IN is held out of
the tokenizer, of pretraining and of the training sentences alike.

The task: of the two sources with the most sentences, which one is this sentence from? In the demo's corpus
these are docstrings and comments of the same modules. Both labels are equally frequent on each side, and no
sentence is shown twice.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.sources.discovery import RecordKeys, find_inputs
from data_pipeline.sources.records import Document, read_documents
from pretrain.errors import UserError
from pretrain.runs.directory import write_text_atomically

VALIDATION_ONE_IN = 6
SHORTEST, LONGEST = 5, 30
"""Words of a sentence that becomes an example."""
_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"'(])")
_PLAIN = re.compile(r"[A-Za-z]+(?:[-'][A-Za-z]+)*[,;:]?")


@dataclass(frozen=True)
class Example:
    sentence: str
    label: int


@dataclass(frozen=True)
class Text:
    """Documents by side; `training` is also what a model is pretrained on."""

    training: tuple[Document, ...]
    validation: tuple[Document, ...]


def read_text(corpus: Path) -> Text:
    """All documents of a directory or file, as `tokenize` reads them.

    Raises:
        DataError: no such files, or none that can be read.
        UserError: too few documents to hold some out.
    """
    sides: tuple[list[Document], list[Document]] = ([], [])
    for file in find_inputs([corpus]):
        for document in read_documents(file.whole, RecordKeys()):
            sides[_hash(document.text) % VALIDATION_ONE_IN == 0].append(document)
    if not all(sides):
        raise UserError(f"{corpus} has only {len(sides[0]) + len(sides[1])} documents: give more text")
    return Text(tuple(sides[0]), tuple(sides[1]))


def sentences(text: str) -> Iterator[str]:
    """Sentences of plain words that end in a full stop, white space made single spaces."""
    for paragraph in text.split("\n\n"):
        for sentence in _END.split(" ".join(paragraph.split())):
            words = sentence.split(" ")
            if (
                SHORTEST <= len(words) <= LONGEST
                and sentence.endswith(".")
                and words[0][:1].isupper()
                and all(_PLAIN.fullmatch(word) for word in [*words[:-1], words[-1][:-1]])
            ):
                yield sentence


@dataclass(frozen=True)
class Task:
    """`sources` are those of labels 0 and 1."""

    sources: tuple[str, str]
    training: tuple[Example, ...]
    validation: tuple[Example, ...]


def make_task(text: Text) -> Task:
    """Both sides of the task, in the order of the sentences' hashes.

    Raises:
        UserError: the sentences are of one source, or of two that do not meet on both sides.
    """
    training, validation = _by_sentence(text.training), _by_sentence(text.validation)
    for sentence in training.keys() & validation.keys():  # written in several documents
        del validation[sentence]
    counts = Counter(training.values())
    sources = sorted(sorted(counts), key=lambda source: -counts[source])[:2]
    sides = [_balanced(side, sources) for side in (training, validation)]
    if len(sources) < 2 or not all(sides):
        raise UserError(
            f"the text has sentences of {len(counts)} sources ({', '.join(sorted(counts)) or 'none'}): the "
            "test asks which of two a sentence is from; give more text, or name sources in "
            "meta.redpajama_set_name"
        )
    return Task((sources[0], sources[1]), sides[0], sides[1])


def _by_sentence(documents: tuple[Document, ...]) -> dict[str, str]:
    """{sentence: its source}; what stands in several sources belongs to none of them."""
    found: dict[str, set[str]] = {}
    for document in documents:
        for sentence in sentences(document.text):
            found.setdefault(sentence, set()).add(document.source)
    return {sentence: min(sources) for sentence, sources in found.items() if len(sources) == 1}


def _balanced(side: dict[str, str], sources: list[str]) -> tuple[Example, ...]:
    """As many sentences of each source: of the more frequent one those with the lowest hashes."""
    by_source = [sorted((s for s in side if side[s] == source), key=_hash) for source in sources]
    fewest = min(map(len, by_source))
    chosen = [Example(s, label) for label, found in enumerate(by_source) for s in found[:fewest]]
    return tuple(sorted(chosen, key=lambda example: _hash(example.sentence)))


def write_examples(path: Path, found: Sequence[Example]) -> None:
    """JSON lines of GLUE's fields, `sentence` and `label`."""
    lines = [json.dumps({"sentence": e.sentence, "label": e.label}, ensure_ascii=False) for e in found]
    write_text_atomically(path, "".join(f"{line}\n" for line in lines))


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
