"""Claims about the perplexity of a variant against a baseline's, and their answers."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal, get_args

from pretrain.errors import UserError

Question = Literal["better", "worse", "within"]
QUESTIONS = get_args(Question)
_SENTENCE = re.compile(r"(\S+) (better|worse|within)(?: (\d+(?:\.\d+)?) ?%?)? (?:than|of) (\S+)")


@dataclass(frozen=True)
class Hypothesis:
    """Claim about the perplexity of a design against a baseline's.

    `better` and `worse` claim a perplexity that is lower or higher by more than the margin, with
    margin 0 any difference; they are refuted where such a difference is excluded. `within` claims a
    ratio between 1 - margin and 1 + margin.

    Attributes:
        design: Name of a sweep's runs, without the seed.
        question: better, worse or within.
        margin: Percent of perplexity.
        baseline: Name of the design that the claim compares with.
    """

    design: str
    question: str
    margin: float
    baseline: str

    def __post_init__(self) -> None:
        if self.question not in QUESTIONS:
            raise UserError(f"a question is one of {', '.join(QUESTIONS)}, not '{self.question}'")
        if not 0 <= self.margin < 100 or (self.question == "within" and not self.margin):
            raise UserError(f"a margin of {self.margin:g} % must be above 0 and below 100 percent")

    @classmethod
    def parse(cls, text: str) -> Hypothesis:
        """Read `DESIGN better|worse|within 2% than|of BASELINE`; without a margin it is 0.

        Raises:
            UserError: the text is not of this form.
        """
        if match := _SENTENCE.fullmatch(" ".join(text.split())):
            return cls(match[1], match[2], float(match[3] or 0), match[4])
        raise UserError(
            f"'{text}' is not a hypothesis; write 'VARIANT better|worse|within MARGIN% than|of "
            "BASELINE', such as 'orthogonal within 5% of vanilla' or 'orthogonal worse 1% than "
            "vanilla'"
        )

    def __str__(self) -> str:
        link = "of" if self.question == "within" else "than"
        margin = f"{self.margin:g} % " if self.margin else ""
        return f"{self.design} {self.question} {margin}{link} {self.baseline}"

    @property
    def edges(self) -> tuple[float, float]:
        """Return the margin's lower and upper edge, in nats per token."""
        return math.log(1 - self.margin / 100), math.log(1 + self.margin / 100)

    @property
    def claimed(self) -> tuple[float, float]:
        """Return the lower and upper end of the gaps that are claimed, in nats per token."""
        lower, upper = self.edges
        return {"better": (-math.inf, lower), "worse": (upper, math.inf), "within": self.edges}[
            self.question
        ]

    def answer(self, yes: tuple[float, float], no: tuple[float, float]) -> str | None:
        """Return "yes", "no", or None for undecided.

        Args:
            yes: Interval of the gap that a "yes" is read from, (low, high) in nats per token.
            no: Interval of the gap that a "no" is read from.
        """
        lower, upper = self.edges
        low, high = self.claimed
        refuted = {
            "better": no[0] > lower,
            "worse": no[1] < upper,
            "within": no[0] > upper or no[1] < lower,
        }[self.question]
        return "yes" if low < yes[0] and yes[1] < high else "no" if refuted else None

    def answered(self, answer: str | None, undecided: str) -> str:
        """Return question and answer, without a full stop.

        Args:
            answer: "yes", "no" or None.
            undecided: Text for None.
        """
        margin = f"more than {self.margin:g} % " if self.margin else ""
        within = self.question == "within"
        asked = f"within ± {self.margin:g} % of" if within else f"{margin}{self.question} than"
        word = {"yes": "Yes", "no": "No", None: undecided}[answer]
        return f"Is {self.design} {asked} {self.baseline}? {word}"
