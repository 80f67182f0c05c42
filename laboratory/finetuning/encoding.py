"""Encoding of texts as the exported model saw them in training, and examples set aside.

    [end of document] first sentence [newline] second sentence

A document's end is what every text of the training began after, and the line end is the plainest
mark between two sentences that a text can have. The classifier reads the last token, which has seen
all others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from laboratory.finetuning.classification_data import Example, Task
from pretrain.errors import UserError

_T = TypeVar("_T")
ASIDE, MOST_ASIDE = 0.1, 1000
"""Share of the training examples that decides when a training ends, and their largest number."""
Ids = list[int]
Item = Mapping[str, Any]
"""Example as a model reads it: `input_ids`, `labels`, and lists as long as `input_ids`."""


@dataclass(frozen=True)
class Encoded:
    """Examples as ids.

    Attributes:
        items: The examples.
        shortened: How many did not fit and were cut.
    """

    items: Sequence[Item]
    shortened: int

    def __len__(self) -> int:
        return len(self.items)

    @property
    def labels(self) -> np.ndarray:
        """Return the labels of examples that have one each: `[items]`."""
        return np.array([item["labels"] for item in self.items])


def encode_examples(
    task: Task,
    examples: Sequence[Example],
    to_ids: Callable[[list[str]], list[Ids]],
    start: int,
    longest: int,
) -> Encoded:
    """Encode examples for a model that reads from left to right.

    Args:
        examples: Texts with their labels.
        to_ids: Ids of texts, without any that mark their ends.
        start: The id that stands before every example.
        longest: Ids of an example at most; of two sentences the longer one is cut first, at its
            end.
    """
    columns = [to_ids([example.first for example in examples])]
    between: Ids = []
    if task.second:
        columns.append(to_ids([example.second or "" for example in examples]))
        between = to_ids(["\n"])[0]
    items, shortened = [], 0
    for example, parts in zip(examples, map(list, zip(*columns, strict=True)), strict=True):
        first, *second = cut = shorten(parts, longest - 1 - len(between))
        shortened += cut != parts
        ids = [start, *first, *between, *(second[0] if second else ())]
        items.append({"input_ids": ids, "labels": example.label})
    return Encoded(items, shortened)


def shorten(parts: Sequence[Ids], room: int) -> list[Ids]:
    """Cut one or two lists of ids to fit into `room`; the longer of two is cut first.

    Args:
        parts: Ids of each sentence.
        room: Most ids of both together.
    """
    first, *rest = parts
    if not rest:
        return [first[:room]]
    second = rest[0][: max(room - room // 2, room - len(first))]
    return [first[: room - len(second)], second]


def set_aside(
    examples: Sequence[_T], part: float, most: int, seed: int
) -> tuple[list[_T], list[_T]]:
    """Split training examples into those to train on and those that decide when training ends.

    The examples that are reported must not choose the weights they are reported of.

    Args:
        examples: All training examples.
        part: Share that is set aside.
        most: Largest number that is set aside.
        seed: Seed of the draw.

    Raises:
        UserError: the examples are too few for both.
    """
    count = min(most, max(1, round(part * len(examples))))
    if len(examples) < 2 * count:
        raise UserError(
            f"{len(examples)} training examples are too few to set some aside; give more"
        )
    order = np.random.default_rng(seed).permutation(len(examples))
    # Sorted: only the choice is random, and the Trainer shuffles by its own seed.
    return [examples[i] for i in np.sort(order[count:])], [
        examples[i] for i in np.sort(order[:count])
    ]
