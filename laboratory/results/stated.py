"""Numbers that pages state, derived from the committed runs: docs/results/stated.yaml.

An entry of `passages` has a passage of a page, with {} for each of its numbers, and the contrast
whose gaps these numbers are. On every page of `pages` each other number with an interval has to
stand in a file that its paragraph links, or in the report beside that.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain, product
from pathlib import Path
from typing import Literal

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict

from laboratory.results.equal_cost import Losses, at_equal_share, read_losses, saved_share
from laboratory.results.tables import RESULTS, table
from laboratory.study.gaps import PairedGap, mean_over_seeds

PASSAGES = RESULTS / "stated.yaml"
Unit = Literal["nats", "percent", "points"]
MILLION = 1_024_000
"""Tokens that the pages call a million: 1,000 steps."""
WITH_INTERVAL = re.compile(r"([+−-]?\d+\.\d+)( %)? (?:\| )?\[([+−-]?\d+\.\d+), ([+−-]?\d+\.\d+)\]")
"""Number, sign of per cent, ends; in tables of reports the interval has a column of its own."""
LINK = re.compile(r"\]\(([^)#\s]+\.(?:md|csv|json))")


class Passage(BaseModel):
    """Passage of a page and the contrast that it states, in the order of its numbers.

    Attributes:
        page: Path of the page.
        text: The passage with {} for each number.
        runs: Tables of runs, in docs/results.
        of, to: First parts of the names of the runs that are compared.
        tokens: Millions of tokens of the runs; `end`: each where it ends; `doubling`: the slope of
            a line for each seed over the logarithm of the tokens.
        costs: Costs that are equal, of COSTS.
        measure: Column of the tables that is compared; one of the reservoir test's has its
            sentences for the tokens.
        unit: `nats`, `percent` of perplexity, or `points` of a hundred.
        signed: Whether numbers have a sign where the interval does not hold 0; where they have
            none, the passage says what is worse. None: nats have one, per cent has none.
        ends: Whether the interval stands behind each number.
        between: Shortest and longest length of a slope; None: all that both have.
        seeds: Seeds that are taken; None: all.
        saves: Share of the cost that the first saves, in place of the study's.
        beyond: Contrast that is subtracted, by seed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    page: Path
    text: str
    runs: tuple[Path, ...]
    of: str
    to: str
    tokens: tuple[float | Literal["end", "doubling"], ...]
    costs: tuple[str, ...] = ("tokens",)
    measure: str = "validation_loss"
    unit: Unit = "nats"
    signed: bool | None = None
    ends: bool = True
    between: tuple[float, float] | None = None
    seeds: tuple[int, ...] | None = None
    saves: float | None = None
    beyond: tuple[str, str] | None = None

    def derived(self) -> str:
        """Return the passage with its numbers."""
        signed = self.unit != "percent" if self.signed is None else self.signed
        gaps = [self._gap(*cell) for cell in product(self.tokens, self.costs)]
        numbers = [in_words(gap, self.unit, signed) for gap in gaps]
        if not self.ends:
            numbers = [number.partition(" [")[0] for number in numbers]
        return flat(self.text).format(*numbers)

    def _gap(self, tokens: float | Literal["end", "doubling"], cost: str) -> PairedGap | None:
        losses = losses_of(self.runs, self.measure)
        if tokens == "doubling":
            first, last = self.between or (0, math.inf)
            lengths = sorted(
                length
                for length in losses[self.of].keys() & losses[self.to].keys()
                if first * MILLION <= length <= last * MILLION
            )
            return mean_over_seeds(slopes([self._differences(at, cost) for at in lengths], lengths))
        length = None if tokens == "end" else round(tokens * MILLION)
        return mean_over_seeds(self._differences(length, cost))

    def _differences(self, tokens: int | None, cost: str) -> dict[int, float]:
        losses = losses_of(self.runs, self.measure)
        gaps = self._contrast(losses, (self.of, self.to), tokens, cost)
        if self.beyond:
            others = self._contrast(losses, self.beyond, tokens, cost)
            gaps = {seed: gap - others[seed] for seed, gap in gaps.items()}
        return {seed: gap for seed, gap in gaps.items() if not self.seeds or seed in self.seeds}

    def _contrast(
        self, losses: Losses, variants: tuple[str, str], tokens: int | None, cost: str
    ) -> dict[int, float]:
        shares = [saved_share(variant, cost) for variant in variants]
        if self.saves is not None:
            shares[0] = self.saves
        of, to = (
            at_equal_share(losses, variant, tokens or max(losses[variant]), share)
            for variant, share in zip(variants, shares, strict=True)
        )
        return {seed: of[seed] - to[seed] for seed in sorted(of.keys() & to.keys())}


@cache
def losses_of(runs: tuple[Path, ...], measure: str) -> Losses:
    """Return a column of tables in docs/results."""
    if measure == "validation_loss":
        return read_losses(RESULTS / path for path in runs)
    scores: dict[str, dict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for run in chain.from_iterable(table(RESULTS / path) for path in runs):
        scores[run["variant"]][int(run["sentences"])][int(run["seed"])] = float(run[measure])
    return scores


def slopes(gaps: Sequence[dict[int, float]], lengths: Sequence[int]) -> dict[int, float]:
    """Return the change of the gap with each doubling, for each seed that has it at all lengths."""
    seeds = set.intersection(*map(set, gaps))
    doublings = np.log2(lengths)
    return {
        seed: float(np.polyfit(doublings, [by_seed[seed] for by_seed in gaps], 1)[0])
        for seed in sorted(seeds)
    }


def in_words(gap: PairedGap | None, unit: Unit, signed: bool) -> str:
    """Return a gap as pages write it, each number rounded once."""
    assert gap is not None and gap.low is not None and gap.high is not None, gap
    values = [gap.mean, gap.low, gap.high]
    if unit == "percent":
        values = [100 * math.expm1(value) for value in values]
    if unit == "points":
        values = [100 * value for value in values]
    sign = "+" if signed or gap.low <= 0 <= gap.high else ""
    if not sign:
        mean, *ends = (abs(value) for value in values)
        values = [mean, *sorted(ends)]
    digits, end = {"nats": (3, ""), "percent": (1, " %"), "points": (1, "")}[unit]
    words = [f"{value:{sign}.{digits}f}".replace("-", "−") for value in values]
    return f"{words[0]}{end} [{words[1]}, {words[2]}]"


def flat(text: str) -> str:
    """Return a text with its lines joined."""
    return " ".join(text.split())


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs, items and table rows of a page outside its blocks of code."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for block in re.split(r"\n\s*\n|\n(?=\* |\d\. |\|)", prose):
        yield flat(block)


def linked(page: Path, paragraph: str) -> str:
    """Return the texts of the files that a paragraph links, and of the reports beside them."""
    files = [page.parent / target for target in LINK.findall(paragraph)]
    reports = [file.with_name("report.md") for file in files]
    return " ".join(flat(file.read_text()) for file in [*files, *reports] if file.is_file())


def gives(source: re.Match[str], number: re.Match[str]) -> bool:
    """Return whether a number with its interval, of as many digits or more, is the stated one.

    The sign is not looked at: a page may say what the other of the two gains.
    """
    digits = len(number[1].partition(".")[2])
    ends = [
        [abs(round(float(text.replace("−", "-")), digits)) for text in match.group(1, 3, 4)]
        for match in (source, number)
    ]
    return (
        source[2] == number[2] and ends[0][0] == ends[1][0] and sorted(ends[0]) == sorted(ends[1])
    )


def deviations() -> list[str]:
    """Return a sentence for each number of the pages that no run and no linked page gives."""
    content = yaml.safe_load(PASSAGES.read_text())
    entries = [Passage(**entry) for entry in content["passages"]]
    sentences = []
    for page in map(Path, content["pages"]):
        text = page.read_text()
        derived = [entry.derived() for entry in entries if entry.page == page]
        sentences += [f"{page}: lacks {words}" for words in derived if words not in flat(text)]
        for paragraph in paragraphs(text):
            sources = " ".join([*derived, linked(page, paragraph)])
            sentences += [
                f"{page}: nothing gives {number[0]}"
                for number in WITH_INTERVAL.finditer(paragraph)
                if not any(gives(source, number) for source in WITH_INTERVAL.finditer(sources))
            ]
    return sentences
