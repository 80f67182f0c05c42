"""Fine-tuning on translation: every model, greedy translations of a test set, BLEU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from pretrain.finetuning.encoding import Ids
from pretrain.finetuning.models import Tokenizer, load_language_model, load_tokenizer
from pretrain.finetuning.plan import ExportFineTuning, Plan
from pretrain.finetuning.translating import Prompt, Words, translate, translation_scores
from pretrain.finetuning.translation_data import Pair
from pretrain.finetuning.trials import FineTuned
from pretrain.study.cache import content_digest

PACKAGES = ("accelerate", "sacrebleu")
TASK = "translation"


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
    words: Words = "13a"


@dataclass(frozen=True)
class TranslationFineTuning(ExportFineTuning):
    """Fine-tuning of an export on pairs of texts. `sources` are the ids of the prompts of the test set."""

    texts: Texts
    tokenizer: Tokenizer
    prompt: Prompt
    sources: Sequence[Ids]

    def load(self, seed: int) -> tuple[nn.Module, dict[str, Any]]:
        return load_language_model(self.model), {}

    def result(self, seed: int, tuned: FineTuned) -> dict[str, Any]:
        new_tokens, longest = self.prompt.answer_length(self.train), self.prompt.longest
        translations = translate(
            tuned.model, self.sources, self.tokenizer, longest, new_tokens, self.settings.batch_size
        )
        references = [pair.target for pair in self.texts.test]
        return {
            **asdict(translation_scores(translations, references, self.texts.words)),
            "items": len(references),
            "examples": {
                "trained": tuned.trained,
                "set_aside": tuned.set_aside,
                "left_out": self.train.shortened,
            },
            "untranslated": sum(len(ids) + new_tokens > longest for ids in self.sources),
            "new_tokens": new_tokens,
            **self.training(tuned),
            "translations": translations,
        }

    def scores(self, result: Mapping[str, Any]) -> tuple[float, Mapping[str, float], float]:
        bleu, chrf = result["bleu"] / 100, result["chrf"] / 100
        return bleu, {"BLEU": bleu, "chrF": chrf}, result["standard_error"] / 100


def translation_fine_tunings(plan: Plan, texts: Texts) -> Iterator[TranslationFineTuning]:
    """Yield every model of the plan with the pairs, encoded when its turn comes.

    Raises:
        UserError: a wrong prompt, no pair that fits, or as `load_tokenizer`.
    """
    digest = content_digest(
        [[(pair.source, pair.target) for pair in pairs] for pairs in (texts.train, texts.test)]
    )
    for model, group in zip(plan.models, plan.groups, strict=True):
        tokenizer = load_tokenizer(model)
        prompt = Prompt(texts.template, plan.longest(tokenizer.longest))
        identity = {"prompt": asdict(prompt), "words": texts.words, "pairs": digest}
        yield TranslationFineTuning(
            identity={**plan.identity(model, PACKAGES), **identity},
            settings=plan.settings,
            frozen_rows=plan.frozen_rows(model),
            train=prompt.encode(tokenizer, texts.train),
            judged={},
            pad_id=tokenizer.start,
            model=model,
            group=group,
            train_query_key=plan.train_query_key,
            task=TASK,
            texts=texts,
            tokenizer=tokenizer,
            prompt=prompt,
            sources=prompt.ids(tokenizer, texts.test),
        )
