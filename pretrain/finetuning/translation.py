"""Fine-tuning on translation: every model and seed, greedy translations of a test set, BLEU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from pretrain.finetuning.bleu import Words, translation_scores
from pretrain.finetuning.classification_data import set_aside
from pretrain.finetuning.encoding import Collate, Encoded, Ids
from pretrain.finetuning.frozen_rows import freeze, remember, what_changed
from pretrain.finetuning.models import Tokenizer, load_language_model, load_tokenizer
from pretrain.finetuning.plan import ASIDE, MOST_ASIDE, Plan
from pretrain.finetuning.pretrained import Pretrained
from pretrain.finetuning.report import Trial
from pretrain.finetuning.training import Examples, begin, fine_tune
from pretrain.finetuning.translating import Prompt, translate
from pretrain.finetuning.translation_data import Pair
from pretrain.finetuning.trials import TrialFiles, content_digest

PACKAGES = ("accelerate", "sacrebleu")
TASK = "translation"


@dataclass(frozen=True)
class Texts:
    """What is learned and what is translated.

    Attributes:
        template: of the prompt.
        words: how BLEU counts words.
    """

    train: Sequence[Pair]
    test: Sequence[Pair]
    template: str
    words: Words = "13a"


@dataclass(frozen=True)
class _ModelOnPairs:
    """A model, and the pairs as its ids."""

    model: Pretrained
    tokenizer: Tokenizer
    prompt: Prompt
    train: Encoded
    test: list[Ids]
    identity: dict[str, Any]


def run_translation(
    plan: Plan, texts: Texts, files: TrialFiles, begins: Callable[[str], None]
) -> tuple[list[Trial], list[dict[str, Any]]]:
    """Every training, or its kept result; and what report.json has of each.

    Args:
        begins: is told of each before it begins.

    Raises:
        UserError: as `load_language_model` and `fine_tune`.
    """
    trials, details = [], []
    for model, group in zip(plan.models, plan.groups, strict=True):
        both = _encode(plan, texts, model)
        for seed in range(1, plan.seeds + 1):
            name = f"{model.name}-{TASK}-{seed}"
            begins(name)
            result, kept = files.find_or_make(
                f"{name}-{model.place}",
                {**both.identity, "seed": seed},
                partial(_train, plan, texts, both, seed),
            )
            trials.append(_trial(group, model, seed, result))
            details.append({"name": name, "kept": kept, **result})
    return trials, details


def _encode(plan: Plan, texts: Texts, model: Pretrained) -> _ModelOnPairs:
    tokenizer = load_tokenizer(model)
    prompt = Prompt(texts.template, plan.longest(tokenizer.longest))
    identity = {
        **plan.identity(model, PACKAGES),
        "prompt": asdict(prompt),
        "words": texts.words,
        "pairs": content_digest(
            [[(pair.source, pair.target) for pair in pairs] for pairs in (texts.train, texts.test)]
        ),
    }
    train = prompt.encode(tokenizer, texts.train)
    return _ModelOnPairs(model, tokenizer, prompt, train, prompt.ids(tokenizer, texts.test), identity)


def _train(plan: Plan, texts: Texts, both: _ModelOnPairs, seed: int) -> dict[str, Any]:
    """One training, from its seed to its translations and their scores."""
    rows = plan.frozen_rows(both.model)
    train, aside = set_aside(both.train.items, ASIDE, MOST_ASIDE, seed)
    begin(seed)
    model = load_language_model(both.model)
    freeze(model, rows)
    before = remember(model, rows)
    examples = Examples(train, aside, Collate(both.tokenizer.start))
    outcome, _ = fine_tune(model, examples, plan.settings, seed)
    weights = what_changed(model, rows, before, head=None)
    new_tokens, longest = both.prompt.answer_length(both.train), both.prompt.longest
    found = translate(model, both.test, both.tokenizer, longest, new_tokens, plan.settings.batch_size)
    references = [pair.target for pair in texts.test]
    return {
        **asdict(translation_scores(found, references, texts.words)),
        "items": len(references),
        "examples": {"trained": len(train), "set_aside": len(aside), "left_out": both.train.shortened},
        "untranslated": sum(len(ids) + new_tokens > longest for ids in both.test),
        "new_tokens": new_tokens,
        "training": outcome.as_dict(),
        "query_key": "trained" if plan.train_query_key else "as in the pretraining",
        "weights": weights,
        "translations": found,
    }


def _trial(group: str, model: Pretrained, seed: int, result: dict[str, Any]) -> Trial:
    return Trial(
        task=TASK,
        group=group,
        model=model.name,
        pretraining_seed=model.seed,
        seed=seed,
        score=result["bleu"] / 100,
        metrics={"BLEU": result["bleu"] / 100, "chrF": result["chrf"] / 100},
        standard_error=result["standard_error"] / 100,
        items=result["items"],
    )
