"""Anatomy of a gap: which predictions hold it, by what a token needed (docs/evaluation.md).

Each split puts every prediction into one of its classes, so over the classes of a split the shares
of the predictions times the gaps sum up to the whole gap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import torch
from scipy import stats

from pretrain.data.open import RunData
from pretrain.errors import UserError
from pretrain.evaluation.heads.trained_model import TrainedModel, losses_of
from pretrain.reporting.tables import Table
from pretrain.reporting.text import NOTHING, number, share
from pretrain.runs.finished import FinishedRun
from pretrain.study.gaps import CONFIDENCE, FEWEST_SEEDS, NATS, PairedGap, gap_content, paired_gap
from pretrain.study.report import Block, Document
from pretrain.study.seeds import Groups

MOST = 0.8  # of the gap: a class with that share of it is said to hold it
_QUARTERS = ("rarest quarter", "second quarter", "third quarter", "most frequent quarter")
_HEADER = (
    "class",
    "variant",
    "tokens",
    "baseline's loss",
    "loss",
    "gap",
    "95 % interval",
    "of the gap",
)
Splits: TypeAlias = Mapping[str, Mapping[str, np.ndarray]]
"""{split: {class: bool [samples, sequence_length], whether a prediction is in the class}}"""


@dataclass(frozen=True)
class ClassGap:
    """Gap within a class of predictions.

    Attributes:
        variant: name of the variant.
        split: name of the split.
        name: of the class.
        share: share of the predictions.
        losses: the baseline's and the variant's, in nats.
        gap: of the variant to its baseline.
        part: share of the whole gap, with Fieller's interval (1954); None where the whole's
            interval has no ends or holds 0.
    """

    variant: str
    split: str
    name: str
    share: float
    losses: tuple[float, float]
    gap: PairedGap
    part: tuple[float, float, float] | None

    @property
    def cells(self) -> tuple[str, ...]:
        """Return the row of a table under _HEADER."""
        part = (
            "{:.0f} % [{:.0f}, {:.0f}]".format(*(100 * p for p in self.part))
            if self.part
            else NOTHING
        )
        gap = (NATS.signed(self.gap.mean), NATS.interval(self.gap))
        return (
            self.name,
            self.variant,
            f"{100 * self.share:.1f} %",
            *map(number, self.losses),
            *gap,
            part,
        )


def refuse_unlike(groups: Groups[FinishedRun]) -> None:
    """Refuse groups that have no predictions in common to compare.

    Raises:
        UserError: there is a single variant, a pair of variants without a common seed, or runs that
            differ in the predictions they were validated on.
    """
    if len(groups.groups) < 2:
        raise UserError(f"all runs are '{groups.baseline}'; give runs of two variants or more")
    for key in ("sequence_length", "validation_samples", "reset_at_document_end"):
        if len(values := {str(run.config["data"].get(key)) for run in groups.runs}) > 1:
            differ = f"these runs differ in data.{key} ({', '.join(sorted(values))})"
            raise UserError(
                f"{differ}, so they have no held-out text in common; evaluate them apart"
            )
    for name, base in groups.compared_with.items():
        if not set.intersection(
            *({run.seed for run in groups.named(one).runs} for one in (name, base))
        ):
            raise UserError(f"'{name}' and '{base}' have no seed in common; leave one out")


def score(trained: TrainedModel) -> np.ndarray:
    """Return the loss of every held-out prediction, `[samples, sequence_length]` float64, nats."""
    size = trained.config.data.micro_batch_size
    losses = []
    for samples in trained.data.validation.values():
        for rows in np.array_split(np.arange(len(samples)), -(-len(samples) // size)):
            losses.append(losses_of(trained.model, trained.data, samples.blocks(rows)))
    return torch.cat(losses).numpy()


def classify(
    ids: np.ndarray, sources: np.ndarray, counts: np.ndarray, boundary: int | None
) -> Splits:
    """Return the classes of every prediction; some may be empty.

    Args:
        ids: `[samples, sequence_length + 1]`.
        sources: `[samples]`, names of the samples' sources.
        counts: `[vocabulary]`, occurrences in training text; each quarter of frequency holds a
            fourth of them, as whole tokens allow.
        boundary: id of the end of a document; predictions made at it are in no class. None: none.
    """
    ends = np.zeros(ids.shape, bool) if boundary is None else ids == boundary
    # A number for each document of each sample; pairs of it and a token (or two) become one
    # integer, so that `np.unique` finds repetitions within documents.
    documents = np.cumsum(ends, axis=1) - ends + np.arange(len(ids))[:, None] * ids.shape[1]
    tokens = np.unique(documents * len(counts) + ids, return_inverse=True)[1].reshape(ids.shape)
    seen = _repeated(tokens)[:, 1:]
    pair = _repeated(tokens[:, :-1] * len(counts) + ids[:, 1:])
    order = np.argsort(counts, kind="stable")
    quarters = np.empty(len(counts), int)
    quarters[order] = 4 * (np.cumsum(counts[order]) - counts[order] / 2) / counts.sum()
    frequency = quarters[ids[:, 1:]]
    rows, places = np.indices(seen.shape)
    cuts = [-(-seen.shape[1] * part // 4) for part in range(5)]
    splits = {
        "recall": {
            "pair seen before": pair,
            "token alone seen before": seen & ~pair,
            "not seen": ~seen,
        },
        "frequency": {name: frequency == quarter for quarter, name in enumerate(_QUARTERS)},
        "position": {f"{a + 1} to {b}": (places >= a) & (places < b) for a, b in pairwise(cuts)},
        "source": {str(name): sources[rows] == name for name in np.unique(sources)},
    }
    return {
        split: {name: own & ~ends[:, :-1] for name, own in one.items()}
        for split, one in splits.items()
    }


def _repeated(keys: np.ndarray) -> np.ndarray:
    """Return where a key has been before, in reading order, `[samples, ids]` bool."""
    again = np.ones(keys.size, bool)
    again[np.unique(keys, return_index=True)[1]] = False
    return again.reshape(keys.shape)


def dissect(
    variant: str,
    baseline: str,
    own: Mapping[int, np.ndarray],
    base: Mapping[int, np.ndarray],
    splits: Splits,
) -> list[ClassGap]:
    """Return the whole gap ("all", of split "all") and that of every class that is not empty.

    Args:
        variant: name of the variant.
        baseline: name of its baseline.
        own: {seed: losses of `score`} of the variant.
        base: the same of the baseline, with a seed in common.
        splits: classes of every prediction.
    """
    whole = np.logical_or.reduce([*splits["recall"].values()])
    found: list[ClassGap] = []
    named = [("all", "all", whole)]
    named += [(split, name, mask) for split, one in splits.items() for name, mask in one.items()]
    for split, name, mask in named:
        if not mask.any():
            continue
        before = {seed: float(losses[mask].mean()) for seed, losses in base.items()}
        after = {seed: float(losses[mask].mean()) for seed, losses in own.items()}
        gap = paired_gap(baseline, after, before, NATS)
        assert gap is not None
        means = [sum(side[seed] for seed in gap.seeds) / gap.n for side in (before, after)]
        size = float(mask.sum() / whole.sum())
        part = _part(size, gap, found[0].gap if found else gap)
        losses = (means[0], means[1])
        found.append(ClassGap(variant, split, name, size, losses=losses, gap=gap, part=part))
    return found


def _part(size: float, gap: PairedGap, whole: PairedGap) -> tuple[float, float, float] | None:
    """Return size · gap / whole gap with the ends of its interval, by Fieller's theorem."""
    if whole.low is None or whole.high is None or whole.low <= 0 <= whole.high:
        return None
    a = size * np.array(gap.differences)
    b = np.array(whole.differences)
    # The ends are the roots ρ of (a − ρ b)² = t² var(a − ρ b), quadratic in ρ; a, b are means here.
    (aa, ab), (_, bb) = np.cov(a, b) * stats.t.ppf((1 + CONFIDENCE) / 2, gap.n - 1) ** 2 / gap.n
    square = b.mean() ** 2 - bb
    mixed = a.mean() * b.mean() - ab
    root = math.sqrt(max(0.0, mixed**2 - square * (a.mean() ** 2 - aa)))
    return (
        float(a.mean() / b.mean()),
        float((mixed - root) / square),
        float((mixed + root) / square),
    )


def anatomy_document(
    groups: Groups[FinishedRun], measured: Sequence[tuple[FinishedRun, RunData, np.ndarray]]
) -> Document:
    """Return the report of all variants.

    Args:
        groups: the runs by variant.
        measured: of each run its data and the losses of `score`.
    """
    losses: dict[str, dict[int, np.ndarray]] = {group.name: {} for group in groups.groups}
    for run, data, own in measured:  # noqa: B007 # the data of all is the same
        losses[groups.name_of(run)][run.seed] = own
    ids = {name: own.blocks(np.arange(len(own))) for name, own in data.validation.items()}
    every = np.concatenate([*ids.values()])
    sources = np.repeat([*ids], [len(own) for own in ids.values()])
    splits = classify(every, sources, data.blend.train_counts(), data.boundary)
    pairs = {name: base for name, base in groups.compared_with.items() if name != base}
    found = [
        dissect(name, base, losses[name], base=losses[base], splits=splits)
        for name, base in pairs.items()
    ]
    rows = [gap for alike in zip(*found, strict=True) for gap in alike]
    in_short = [*map(in_words, found)]
    page: list[Block] = ["# Anatomy of the gap", "## In short", in_short]
    for split in dict.fromkeys(row.split for row in rows):
        table = Table(_HEADER, [row.cells for row in rows if row.split == split], (0, 1))
        page += [f"## By {split}" if split in splits else "## All", table]
    classes = [vars(row) | {"gap": gap_content(row.gap)} for row in rows]
    return Document(page, {"in_short": in_short, "classes": classes}, [in_short])


def in_words(gaps: Sequence[ClassGap]) -> str:
    """Return which class holds the most of a variant's gap, and whether that is MOST of it."""
    gap = gaps[0].gap
    few = f" < {FEWEST_SEEDS}: no claim" if gaps[0].gap.n < FEWEST_SEEDS else ""
    size = f"{NATS.signed(gap.mean)} {NATS.interval(gap)} {NATS.unit} (n = {gap.n}{few})"
    top = max((g for g in gaps if g.share < 1 and g.part), key=lambda g: g.part or (), default=None)
    answer = "Its interval has no ends or contains 0, so no class can be said to hold it."
    if top is not None and top.part is not None:
        answer = f"No class holds {share(MOST)} of it, the most has"
        if top.part[0] >= MOST:
            answer = "It is held by"
        size_of_class = f"{top.cells[-1]}, with {share(top.share)} of the tokens"
        answer += f' "{top.name}" ({top.split}): {size_of_class}.'
    return f"{gaps[0].variant} − {gap.baseline}: {size}. {answer}"
