"""`evaluate glue` and `evaluate reservoir` on tiny models: learned, frozen, kept, refused."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("datasets")

import torch

from laboratory.finetuning.glue_data import TASKS, read_task
from laboratory.finetuning.models import load_tokenizer, open_pretrained
from laboratory.finetuning.training import encode
from laboratory.finetuning.verbs import glue, require_packages, reservoir
from pretrain.errors import UserError
from tests.command_line import assert_refused
from tests.laboratory.evaluation.tiny_models import own_cache
from tests.ranks import warm_cli
from tests.tiny_exports import tiny_export

pytestmark = pytest.mark.distributed
FILLERS = ["the", "film", "of", "a", "day", "with", "some", "people"]
QUICK: dict[str, Any] = {"seeds": 1, "learning_rate": 5e-3, "batch_size": 16}


def reviews(count: int, seed: int) -> list[dict[str, Any]]:
    """Two words decide, and stand anywhere."""
    drawn = random.Random(seed)
    rows = []
    for index in range(count):
        words = drawn.choices(FILLERS, k=drawn.randint(2, 6))
        words.insert(drawn.randint(0, len(words)), "good" if index % 2 else "bad")
        rows.append({"sentence": " ".join(words), "label": index % 2})
    return rows


def write_bert(path: Path) -> Path:
    """A BERT of two layers with random weights, whose tokenizer knows the words of `reviews`."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    words = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *FILLERS, "good", "bad"]
    tokenizer = Tokenizer(models.WordLevel(dict(zip(words, range(14), strict=True)), "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    marks = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", model_max_length=32, **marks
    ).save_pretrained(path)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=14,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    BertModel(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def models_root(tiny_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two exports, a BERT, and the data."""
    require_packages("a test")
    directory = tmp_path_factory.mktemp("fine-tuned")
    tiny_export(directory / "vanilla-1", tiny_shards, "vanilla", frozen=False)
    tiny_export(directory / "orthogonal-1", tiny_shards, "orthogonal", rotary=False)
    write_bert(directory / "bert")
    data = directory / "data/sst2"
    data.mkdir(parents=True)
    for split, count, seed in (("train", 160, 0), ("validation", 60, 1)):
        rows = "\n".join(map(json.dumps, reviews(count, seed)))
        (data / f"{split}.jsonl").write_text(rows)
    with own_cache(directory / "cache"):
        yield directory


def report_of(out: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    return report


def results_of(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [trial["result"] for trial in report["trials"]]


def test_exports_learn_with_their_rows_frozen_again(models_root: Path, tmp_path: Path) -> None:
    exports = [models_root / "vanilla-1", models_root / "orthogonal-1"]
    options = {**QUICK, "data": str(models_root / "data"), "out": tmp_path, "epochs": 4}
    glue(exports, **options)
    report = report_of(tmp_path)
    assert [trial["kept"] for trial in report["trials"]] == [False, False]
    first, second = results_of(report)
    assert [result["metrics"]["score"] > 0.9 for result in (first, second)] == [True, True]
    assert first["frozen_parameters"] == 0
    assert second["frozen_parameters"] == 2 * 64 * (32 + 1)  # with their biases
    assert second["items"] == 60 and 1 <= second["best_epoch"] <= 4
    looked = second["score_aside_by_epoch"]
    assert looked[second["best_epoch"] - 1] == max(looked)
    (compared,) = report["comparisons"]
    assert (compared["group"], compared["gap"]["baseline"]) == ("orthogonal", "vanilla")
    assert compared["pair"] == "fine-tuning" and compared["gap"]["seeds"] == [1]
    glue(exports, **options)  # nothing is trained again
    again = report_of(tmp_path)
    assert [trial["kept"] for trial in again["trials"]] == [True, True]
    assert results_of(again) == results_of(report)


def test_query_and_key_train_if_that_is_asked_for(models_root: Path, tmp_path: Path) -> None:
    options = {**QUICK, "data": str(models_root / "data"), "out": tmp_path, "epochs": 1}
    glue([models_root / "orthogonal-1"], train_query_key=True, baseline="orthogonal-1", **options)
    report = report_of(tmp_path)
    assert report["baseline"] == "orthogonal"  # the group of that name of a run
    assert results_of(report)[0]["frozen_parameters"] == 0
    assert "--train-query-key: Q and K trained like everything else" in report["notes"]


def test_the_four_arms_of_the_reservoir_test(models_root: Path, tmp_path: Path) -> None:
    options = {**QUICK, "data": str(models_root / "data"), "out": tmp_path, "epochs": 4}
    reservoir(models_root / "bert", **options)
    report = report_of(tmp_path)
    groups = [trial["group"] for trial in report["trials"]]
    assert groups == ["trained", "frozen", "per head", "one matrix"]
    results = results_of(report)
    frozen = 2 * 2 * 32 * 33
    assert [result["frozen_parameters"] for result in results] == [0, *[frozen] * 3]
    for result in results:
        assert result["metrics"]["accuracy"] > 0.8 and result["metrics"]["f1"] > 0.8
    measured = [(result["metrics"], result["score_aside_by_epoch"]) for result in results]
    assert measured[1] != measured[2]
    metrics = [(comparison["group"], comparison["metric"]) for comparison in report["comparisons"]]
    arms = ("frozen", "per head", "one matrix")
    assert metrics == [(arm, metric) for metric in ("accuracy", "f1") for arm in arms]


def test_texts_are_joined_as_the_model_knows_them(models_root: Path) -> None:
    from datasets import Dataset

    rows = Dataset.from_list([{"sentence1": "good film", "sentence2": "bad day", "label": 1}])
    bert = load_tokenizer(open_pretrained(models_root / "bert", False))
    (encoded,) = encode(TASKS["rte"], rows, bert, None)
    assert encoded["input_ids"] == [1, 12, 5, 2, 13, 8, 2] and encoded["labels"] == 1
    (cut,) = encode(TASKS["rte"], rows, bert, 6)
    assert len(cut["input_ids"]) == 6
    export = load_tokenizer(open_pretrained(models_root / "vanilla-1", False))
    (encoded,) = encode(TASKS["rte"], rows, export, None)
    assert encoded["input_ids"][0] == export.pad_token_id == export.eos_token_id
    text = export.decode(encoded["input_ids"][1:])
    assert text.strip() == "good film\nbad day"


def test_mistakes_are_refused_before_anything_is_trained(models_root: Path, tmp_path: Path) -> None:
    command = [
        "evaluate",
        "reservoir",
        str(models_root / "bert"),
        "--data",
        str(models_root / "data"),
    ]
    done = warm_cli([*command, "--task", "sst3"])
    assert_refused(done, "--task: there is no task 'sst3'; there are cola, sst2")
    options = {**QUICK, "out": tmp_path}
    with pytest.raises(UserError, match="1 training examples are too few to set some aside"):
        few = tmp_path / "few/sst2"
        few.mkdir(parents=True)
        for split in ("train", "validation"):
            (few / f"{split}.jsonl").write_text(json.dumps(reviews(1, 0)[0]) + "\n")
        glue([models_root / "vanilla-1"], data=str(tmp_path / "few"), **options)
    with pytest.raises(UserError, match="the loss of a fine-tuning is nan; lower --learning-rate"):
        far = {**options, "learning_rate": 1e30, "epochs": 1}
        glue([models_root / "vanilla-1"], data=str(models_root / "data"), **far)
    assert not list(tmp_path.glob("trials/*"))
    assert read_task(TASKS["sst2"], str(models_root / "data"))["train"].num_rows == 160
