"""BLEU and chrF by sacreBLEU, with the signature that says which BLEU it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RESAMPLES = 1000
Words = Literal["13a", "intl", "char", "zh", "none"]


@dataclass(frozen=True)
class TranslationScores:
    """Of a whole test set, as sacreBLEU prints them: 0 to 100.

    Attributes:
        standard_error: of BLEU over the choice of sentences, from the interval of its bootstrap.
        signature: of BLEU.
    """

    bleu: float
    chrf: float
    standard_error: float
    signature: str


def translation_scores(found: list[str], references: list[str], words: Words = "13a") -> TranslationScores:
    """Compare translations with one reference each.

    Args:
        words: how sacreBLEU cuts texts into words.
    """
    from sacrebleu.metrics import BLEU, CHRF

    bleu = BLEU(tokenize=words, force=True)  # no warning of texts that look as if they had been cut before
    score = bleu.corpus_score(found, [references], n_bootstrap=RESAMPLES)
    chrf = CHRF().corpus_score(found, [references])
    error = score._ci / 1.96  # half of a 95 % interval
    return TranslationScores(float(score.score), float(chrf.score), float(error), str(bleu.get_signature()))
