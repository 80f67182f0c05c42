"""Fine-tuning on translation: prompts, greedy translations of a test set, BLEU and chrF by sacreBLEU.

    [end of document] prompt translation [end of document]

The model learns to continue the prompt with the translation. Only the translation and its end have a part in
the loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from transformers import DataCollatorForSeq2Seq

from pretrain.errors import UserError
from pretrain.finetuning.encoding import IGNORED, Encoded, Ids
from pretrain.finetuning.models import Pretrained, Tokenizer, load_language_model, load_tokenizer
from pretrain.finetuning.records import Pair
from pretrain.finetuning.trials import ExportFineTuning, FineTuned, Plan
from pretrain.study.cache import content_digest

SOURCE = "{source}"
RESAMPLES = 1000


@dataclass(frozen=True)
class Texts:
    """Pairs to learn from and pairs to translate.

    Attributes:
        template: of the prompt.
        words: sacreBLEU's way to cut texts into words.
    """

    train: Sequence[Pair]
    test: Sequence[Pair]
    template: str
    words: str = "13a"


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

        Raises UserError: all are too long.
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


class TranslationFineTuning(ExportFineTuning):
    """Fine-tuning of an export on pairs of texts."""

    def __init__(
        self, plan: Plan, model: Pretrained, tokenizer: Tokenizer, texts: Texts, digest: str
    ) -> None:
        super().__init__(plan, model, tokenizer, "translation")
        self.texts = texts
        self.prompt = Prompt(texts.template, self.longest)
        self.train = self.prompt.encode(tokenizer, texts.train)
        self.collator = DataCollatorForSeq2Seq(tokenizer.program, label_pad_token_id=IGNORED)
        self.identity = {
            **self.common_identity("accelerate", "sacrebleu"),
            "prompt": asdict(self.prompt),
            "words": texts.words,
            "pairs": digest,
        }

    def load(self, seed: int) -> tuple[nn.Module, dict[str, Any]]:
        return load_language_model(self.model), {}

    def result(self, seed: int, tuned: FineTuned) -> dict[str, Any]:
        new_tokens = self.prompt.answer_length(self.train)
        sources = self.prompt.ids(self.tokenizer, self.texts.test)
        translations = translate(
            tuned.model, sources, self.tokenizer, self.longest, new_tokens, self.settings.batch_size
        )
        references = [pair.target for pair in self.texts.test]
        counts = {
            "trained": tuned.trained,
            "set_aside": tuned.set_aside,
            "left_out": self.train.shortened,
        }
        return {
            **translation_scores(translations, references, self.texts.words),
            "items": len(references),
            "examples": counts,
            "untranslated": sum(len(ids) + new_tokens > self.longest for ids in sources),
            "new_tokens": new_tokens,
            **self.training(tuned),
            "translations": translations,
        }


def translation_fine_tunings(plan: Plan, texts: Texts) -> Iterator[tuple[TranslationFineTuning, int]]:
    """Yield every model of the plan with the pairs, encoded when its turn comes, and every seed.

    Raises UserError: a wrong prompt, no pair that fits, or as `load_tokenizer`.
    """
    sets = (texts.train, texts.test)
    digest = content_digest([[(pair.source, pair.target) for pair in pairs] for pairs in sets])
    for model in plan.models:
        one = TranslationFineTuning(plan, model, load_tokenizer(model), texts, digest)
        yield from ((one, seed) for seed in range(1, plan.seeds + 1))


def translate(
    model: Any, prompts: Sequence[Ids], tokenizer: Tokenizer, longest: int, new_tokens: int, batch_size: int
) -> list[str]:
    """Translate each prompt by greedy decoding, until a document ends.

    `longest`: ids of a prompt and its translation at most; a prompt that leaves no room for `new_tokens` has
    the translation "".
    """
    translations = [""] * len(prompts)
    fitting = [index for index, ids in enumerate(prompts) if len(ids) + new_tokens <= longest]
    fitting.sort(key=lambda index: len(prompts[index]))  # so that few are padded much
    device = next(model.parameters()).device
    reduced = torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()
    with torch.inference_mode(), reduced:
        for first in range(0, len(fitting), batch_size):
            batch = fitting[first : first + batch_size]
            # Padded before the prompt: what follows it must follow at once.
            padded = tokenizer.program.pad(
                {"input_ids": [prompts[index] for index in batch]}, padding_side="left", return_tensors="pt"
            ).to(device)
            output = model.generate(
                **padded,
                max_new_tokens=new_tokens,
                do_sample=False,
                num_beams=1,
                use_cache=True,
                eos_token_id=tokenizer.start,
                pad_token_id=tokenizer.start,
            )
            for index, row in zip(batch, output[:, len(prompts[batch[-1]]) :].tolist(), strict=True):
                end = row.index(tokenizer.start) if tokenizer.start in row else len(row)
                translations[index] = tokenizer.text(row[:end]).strip()
    return translations


def translation_scores(translations: list[str], references: list[str], words: str) -> dict[str, Any]:
    """Compare translations with one reference each.

    `words`: sacreBLEU's way to cut texts into words.

    Returns:
        BLEU, which is the score, and chrF of the whole test set, from 0 to 1; BLEU's standard error over the
        choice of sentences, from the interval of its bootstrap; and its signature, which says which BLEU it
        is.
    """
    from sacrebleu.metrics import BLEU, CHRF

    # No warning of texts that look as if they had been cut before.
    metric = BLEU(tokenize=words, force=True)  # type: ignore[arg-type]
    bleu = metric.corpus_score(translations, [references], n_bootstrap=RESAMPLES)
    score, chrf = float(bleu.score) / 100, float(CHRF().corpus_score(translations, [references]).score) / 100
    return {
        "score": score,
        "metrics": {"BLEU": score, "chrF": chrf},
        "standard_error": float(bleu._ci / 1.96) / 100,  # half of a 95 % interval
        "signature": str(metric.get_signature()),
    }
