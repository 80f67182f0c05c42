"""Translation by a language model: prompts, greedy decoding, BLEU and chrF by sacreBLEU.

    [end of document] prompt translation [end of document]

The model learns to continue the prompt with the translation. Only the translation and its end have a part in
the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch

from pretrain.errors import UserError
from pretrain.finetuning.encoding import IGNORED, Encoded, Ids
from pretrain.finetuning.models import Tokenizer
from pretrain.finetuning.translation_data import Pair

SOURCE = "{source}"
RESAMPLES = 1000
Words = Literal["13a", "intl", "char", "zh", "none"]


@dataclass(frozen=True)
class Prompt:
    """Text before a translation.

    Attributes:
        template: has SOURCE in it, which becomes the text to translate.
        longest: ids of a prompt and its translation at most.
    """

    template: str
    longest: int

    def __post_init__(self) -> None:
        if self.template.count(SOURCE) != 1:
            raise UserError(f"--prompt '{self.template}' must have {SOURCE} in it, once")

    def ids(self, tokenizer: Tokenizer, pairs: Sequence[Pair]) -> list[Ids]:
        """Return the ids of each pair's prompt, with the end of a document before the prompt."""
        texts = [self.template.replace(SOURCE, pair.source) for pair in pairs]
        return [[tokenizer.start, *ids] for ids in tokenizer.ids(texts)]

    def encode(self, tokenizer: Tokenizer, pairs: Sequence[Pair]) -> Encoded:
        """Encode pairs to train on; those that are too long are left out and counted.

        Raises:
            UserError: all are too long.
        """
        items = []
        targets = tokenizer.ids([pair.target for pair in pairs])
        for prompt, target in zip(self.ids(tokenizer, pairs), targets, strict=True):
            ids = [*prompt, *target, tokenizer.start]
            if len(ids) <= self.longest:
                labels = [IGNORED] * len(prompt) + ids[len(prompt) :]
                items.append({"input_ids": ids, "labels": labels})
        if not items:
            raise UserError(
                f"no pair of --train fits into {self.longest} tokens: give shorter texts or more --max-length"
            )
        return Encoded(items, len(pairs) - len(items))

    def answer_length(self, train: Encoded) -> int:
        """Return the most tokens of a translation: twice as many as the longest of the training pairs."""
        longest = max(sum(label != IGNORED for label in item["labels"]) for item in train.items)
        return min(2 * longest, self.longest // 2)


def translate(
    model: Any, prompts: Sequence[Ids], tokenizer: Tokenizer, longest: int, new_tokens: int, batch_size: int
) -> list[str]:
    """Translate each prompt by greedy decoding, until a document ends.

    Args:
        longest: ids of a prompt and its translation at most; a prompt that leaves no room for `new_tokens`
            has the translation "".
    """
    translations = [""] * len(prompts)
    fitting = [index for index, ids in enumerate(prompts) if len(ids) + new_tokens <= longest]
    fitting.sort(key=lambda index: len(prompts[index]))  # so that few are padded much
    device = next(model.parameters()).device
    reduced = torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()
    with torch.inference_mode(), reduced:
        for first in range(0, len(fitting), batch_size):
            batch = fitting[first : first + batch_size]
            width = len(prompts[batch[-1]])
            # Padded before the prompt: what follows it must follow at once.
            ids = [[tokenizer.start] * (width - len(prompts[index])) + prompts[index] for index in batch]
            mask = [[0] * (width - len(prompts[index])) + [1] * len(prompts[index]) for index in batch]
            output = model.generate(
                torch.tensor(ids, device=device),
                attention_mask=torch.tensor(mask, device=device),
                max_new_tokens=new_tokens,
                do_sample=False,
                num_beams=1,
                use_cache=True,
                eos_token_id=tokenizer.start,
                pad_token_id=tokenizer.start,
            )
            for index, row in zip(batch, output[:, width:].tolist(), strict=True):
                end = row.index(tokenizer.start) if tokenizer.start in row else len(row)
                translations[index] = tokenizer.text(row[:end]).strip()
    return translations


@dataclass(frozen=True)
class TranslationScores:
    """Scores of a whole test set, as sacreBLEU prints them: 0 to 100.

    Attributes:
        standard_error: of BLEU over the choice of sentences, from the interval of its bootstrap.
        signature: of BLEU: says which BLEU it is.
    """

    bleu: float
    chrf: float
    standard_error: float
    signature: str


def translation_scores(
    translations: list[str], references: list[str], words: Words = "13a"
) -> TranslationScores:
    """Compare translations with one reference each.

    Args:
        words: sacreBLEU's way to cut texts into words.
    """
    from sacrebleu.metrics import BLEU, CHRF

    bleu = BLEU(tokenize=words, force=True)  # no warning of texts that look as if they had been cut before
    score = bleu.corpus_score(translations, [references], n_bootstrap=RESAMPLES)
    chrf = CHRF().corpus_score(translations, [references])
    error = score._ci / 1.96  # half of a 95 % interval
    return TranslationScores(float(score.score), float(chrf.score), float(error), str(bleu.get_signature()))
