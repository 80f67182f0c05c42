"""Tiny models in the form of exports, and tasks from local files, for tests of `evaluate tasks`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.tiny_exports import export_facts

WORDS = ["red", "green", "blue", "one", "two", "three"]
WORDS += ["cat", "dog", "is", "the", "a", "sees", "not"]


@contextmanager
def own_cache(directory: Path) -> Iterator[None]:
    """Data sets are cached in `directory`, and not in the home of whoever runs the tests."""
    import datasets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", directory)
        yield


def tokenizer_of(words: list[str], split: Any) -> Any:
    """A tokenizer whose pieces are these words, cut out of a text by `split`."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = split
    marks = dict.fromkeys(("bos_token", "eos_token", "pad_token"), "</s>")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **marks)


def write_model(path: Path, variant: str | None, seed: int) -> Path:
    """A Starcoder2 of one layer with random weights; with a `variant` it has an export.json.

    Its tokenizer knows WORDS with a space before each, so every text of these is one token a word.
    """
    from tokenizers import pre_tokenizers
    from transformers import Starcoder2Config, Starcoder2ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    vocabulary = ["</s>", "<unk>", *(f"▁{word}" for word in WORDS)]
    tokenizer_of(vocabulary, pre_tokenizers.Metaspace()).save_pretrained(path)
    torch.manual_seed(1000 * len(variant or "") + seed)
    config = Starcoder2Config(
        vocab_size=len(vocabulary),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=16,
        sliding_window=None,
        initializer_range=0.5,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    Starcoder2ForCausalLM(config).save_pretrained(path)
    if variant is not None:
        (path / "export.json").write_text(json.dumps(export_facts(path.name, variant, seed)))
    return path


def write_translator(path: Path, steps: int) -> Path:
    """A GPT2 of two layers, trained on the sentences of toy_translation, one token a word."""
    from tokenizers import pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel

    from laboratory.evaluation.toy_tasks.toy_translation import pairs

    lines = [f"{pair['source']} = {pair['target']} ." for pair in pairs(held_out=False)]
    words = ["</s>", "<unk>", *dict.fromkeys(word for line in lines for word in line.split())]
    tokenizer = tokenizer_of(words, pre_tokenizers.WhitespaceSplit())
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(words), n_embd=64, n_layer=2, n_head=2, n_positions=64, resid_pdrop=0.0
    )
    model = GPT2LMHeadModel(config)
    ids = torch.tensor(tokenizer(lines)["input_ids"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        batch = ids[torch.randint(len(ids), (64,))]
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval().save_pretrained(path)
    return path


def write_tasks(directory: Path, items: int = 24) -> Path:
    """`choice` (multiple choice), `last_word` (shaped like lambada), `both`, a group of choices."""
    directory.mkdir(parents=True)
    choices = [
        {
            "text": f"the {WORDS[i % 8]} sees",
            "choices": [WORDS[i % 3], WORDS[3 + i % 3]],
            "gold": i % 2,
        }
        for i in range(items)
    ]
    texts = [{"text": f"the {WORDS[6 + i % 2]} sees the {WORDS[i % 6]}"} for i in range(items)]
    common: dict[str, Any] = {
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    _write_task(directory, "choice", choices, common)
    for name, part in (("early", choices[: items // 4]), ("late", choices[items // 4 :])):
        _write_task(directory, name, part, common)
    group = {
        "group": "both",
        "task": ["early", "late"],
        "aggregate_metric_list": [{"metric": "acc"}],
    }
    (directory / "both.yaml").write_text(yaml.safe_dump(group))
    lambada = {
        "output_type": "loglikelihood",
        "doc_to_text": "{{text.split(' ')[:-1]|join(' ')}}",
        "doc_to_target": "{{' '+text.split(' ')[-1]}}",
        "metric_list": [
            {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
            {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
        ],
    }
    _write_task(directory, "last_word", texts, lambada)
    return directory


def _write_task(directory: Path, name: str, items: Sequence[Any], settings: dict[str, Any]) -> None:
    data = directory / f"{name}.jsonl"
    data.write_text("".join(json.dumps(item) + "\n" for item in items))
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "metadata": {"version": 1.0},
        **settings,
    }
    (directory / f"{name}.yaml").write_text(yaml.safe_dump(task))
