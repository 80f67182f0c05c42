"""evaluate tasks: the harness on tiny models and local files, end to end."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from scipy import stats

from laboratory.evaluation.tasks.harness import load_tasks, require_harness
from laboratory.evaluation.verbs import tasks
from pretrain.export.models import model_digest
from tests.laboratory.evaluation.tiny_models import WORDS, own_cache, write_model, write_tasks

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.distributed

SEEDS = range(1, 6)
ITEMS = 24


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Ten exports, two models that say nothing of themselves, and the task files."""
    directory = tmp_path_factory.mktemp("tasks")
    for seed in SEEDS:
        for variant in ("vanilla", "orthogonal"):
            write_model(directory / f"{variant}-{seed}", variant, seed)
    write_model(directory / "stranger", None, 7)
    write_model(directory / "other", None, 8)
    write_tasks(directory / "files", ITEMS)
    with own_cache(directory / "cache"):
        yield directory


def models(place: Path) -> list[Path]:
    return [place / f"{variant}-{seed}" for variant in ("orthogonal", "vanilla") for seed in SEEDS]


@pytest.fixture(scope="module")
def report(place: Path) -> dict[str, Any]:
    out = place / "out"
    tasks(models(place), "choice, last_word,both", include_path=place / "files", out=out)
    found: dict[str, Any] = json.loads((out / "report.json").read_text())
    return found


def kept(out: Path, model: str, task: str) -> dict[str, Any]:
    (file,) = out.glob(f"results/{model}-*/{task}-*.json")
    content: dict[str, Any] = json.loads(file.read_text())
    return content


def score(report: dict[str, Any], variant: str, seed: int, task: str, metric: str) -> float:
    (model,) = (one for one in report["models"] if (one["variant"], one["seed"]) == (variant, seed))
    return float(model["tasks"][task]["scores"][metric]["value"])


def log_likelihood(directory: Path, context: str, continuation: str) -> tuple[float, bool]:
    """Of the continuation by transformers alone, and whether it is the model's own."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(directory))
    model = AutoModelForCausalLM.from_pretrained(str(directory)).eval()
    ids = tokenizer(context + continuation, return_tensors="pt", add_special_tokens=False)[
        "input_ids"
    ]
    start = len(tokenizer(context, add_special_tokens=False)["input_ids"])
    with torch.no_grad():
        logits = model(ids).logits[0, start - 1 : -1].log_softmax(-1)
    targets = ids[0, start:]
    return float(logits.gather(1, targets[:, None]).sum()), bool(
        (logits.argmax(-1) == targets).all()
    )


def test_the_items_are_those_that_transformers_gives(place: Path, report: dict[str, Any]) -> None:
    """Six items of each task; the others repeat them."""
    model = place / "orthogonal-2"
    texts = [
        json.loads(line)["text"]
        for line in (place / "files/last_word.jsonl").read_text().splitlines()
    ]
    ours = [log_likelihood(model, *_cut(text)) for text in texts[:6]]
    scores = kept(place / "out", "orthogonal-2", "last_word")["scores"]
    assert scores["perplexity"]["items"][:6] == pytest.approx(
        [value for value, _ in ours], abs=1e-5
    )
    assert scores["acc"]["items"][:6] == [float(greedy) for _, greedy in ours]
    mean = sum(scores["perplexity"]["items"]) / ITEMS
    assert scores["perplexity"]["value"] == pytest.approx(math.exp(-mean))
    items = [json.loads(line) for line in (place / "files/choice.jsonl").read_text().splitlines()]
    right = []
    for item in items[:6]:
        values = [
            log_likelihood(model, item["text"], f" {choice}")[0] for choice in item["choices"]
        ]
        right.append(float(values.index(max(values)) == item["gold"]))
    assert kept(place / "out", "orthogonal-2", "choice")["scores"]["acc"]["items"][:6] == right


def _cut(text: str) -> tuple[str, str]:
    context, _, last = text.rpartition(" ")
    return context, f" {last}"


def test_the_standard_error_is_the_harness_s_own(place: Path, report: dict[str, Any]) -> None:
    scores = kept(place / "out", "vanilla-1", "choice")["scores"]["acc"]
    assert scores["stderr"] == pytest.approx(np.std(scores["items"], ddof=1) / math.sqrt(ITEMS))
    (result,) = (
        one
        for one in report["results"]
        if (one["task"], one["metric"], one["variant"]) == ("choice", "acc", "vanilla")
    )
    errors = [
        kept(place / "out", f"vanilla-{seed}", "choice")["scores"]["acc"]["stderr"]
        for seed in SEEDS
    ]
    assert result["stderr"] == pytest.approx(np.mean(errors)) and result["items"] == ITEMS


def test_one_metric_of_each_task_is_tested(report: dict[str, Any]) -> None:
    """How gaps are computed and corrected: test_task_statistics.py."""
    tested = {(one["task"], one["metric"]) for one in report["contrasts"] if one["tested"]}
    assert tested == {("choice", "acc"), ("last_word", "acc"), ("both", "acc")}
    others = {(one["task"], one["metric"]) for one in report["contrasts"] if not one["tested"]}
    assert others == {("choice", "acc_norm"), ("last_word", "perplexity")}
    for one in report["contrasts"]:
        ours, base = (
            [score(report, variant, seed, task=one["task"], metric=one["metric"]) for seed in SEEDS]
            for variant in ("orthogonal", "vanilla")
        )
        assert one["gap"]["seeds"] == list(SEEDS)
        assert one["gap"]["differences"] == pytest.approx(np.subtract(ours, base))


def test_models_are_held_against_one_another_item_by_item(
    place: Path, report: dict[str, Any]
) -> None:
    tests = report["item_tests"]
    assert len(tests) == 15 and {one["items"] for one in tests} == {ITEMS}
    (one,) = (t for t in tests if (t["task"], t["model"]) == ("choice", "orthogonal-3"))
    ours, base = (
        kept(place / "out", f"{variant}-3", "choice")["scores"]["acc"]["items"]
        for variant in ("orthogonal", "vanilla")
    )
    only_ours = sum(a > b for a, b in zip(ours, base, strict=True))
    only_base = sum(a < b for a, b in zip(ours, base, strict=True))
    assert (one["base"], one["only_model"], one["only_base"]) == ("vanilla-3", only_ours, only_base)
    assert only_ours + only_base > 0
    assert one["p"] == pytest.approx(stats.binomtest(only_ours, only_ours + only_base).pvalue)


def test_a_group_has_the_number_of_its_parts(place: Path, report: dict[str, Any]) -> None:
    """The group's two tasks have the items of `choice`, a quarter and the rest."""
    for seed in SEEDS:
        assert score(report, "vanilla", seed, task="both", metric="acc") == pytest.approx(
            score(report, "vanilla", seed, task="choice", metric="acc")
        )
    pairs = {one["model"]: one["p"] for one in report["item_tests"] if one["task"] == "choice"}
    both = {one["model"]: one["p"] for one in report["item_tests"] if one["task"] == "both"}
    assert both == pairs
    assert [part["task"] for part in report["tasks"]["both"]] == ["early", "late"]


def test_the_report_says_it(place: Path, report: dict[str, Any]) -> None:
    text = (place / "out/report.md").read_text()
    assert "lm-evaluation-harness 0.4." in text
    assert "| last_word | perplexity ↓ | vanilla | 5 |" in text
    assert "over the 3 tested gaps" in text and "over the 15 tests of this kind" in text
    assert "| both | early | 1.0 | 0 |" in text and "--tasks 'choice, last_word,both'" in text
    assert "Fewer than" not in text


def test_what_was_measured_is_not_measured_again(place: Path, report: dict[str, Any]) -> None:
    out = place / "again"
    shutil.copytree(place / "out/results", out / "results")
    (first,) = out.glob("results/vanilla-1-*/choice-*.json")
    (second,) = out.glob("results/vanilla-2-*/choice-*.json")
    (third,) = out.glob("results/vanilla-3-*/choice-*.json")
    content = json.loads(first.read_text())
    content["scores"]["acc"]["value"] = 0.125  # no model's: it shows that the file was read
    first.write_text(json.dumps(content))
    second.write_text(second.read_text()[:100])  # of a kill, as an older version could have left it
    content = json.loads(third.read_text())
    content["identity"]["lm-eval"] = "0.4.0"
    content["scores"]["acc"]["value"] = 0.125
    third.write_text(json.dumps(content))
    some = [place / f"vanilla-{seed}" for seed in (1, 2, 3)]
    tasks(some, "choice", include_path=place / "files", out=out)
    found = json.loads((out / "report.json").read_text())
    assert score(found, "vanilla", 1, task="choice", metric="acc") == 0.125
    for seed in (2, 3):
        expected = score(report, "vanilla", seed, task="choice", metric="acc")
        assert score(found, "vanilla", seed, task="choice", metric="acc") == expected
    assert found["contrasts"] == found["item_tests"] == []


def test_other_data_and_other_weights_are_measured(
    place: Path, report: dict[str, Any], tmp_path: Path
) -> None:
    require_harness("cpu")
    asked = load_tasks(["choice"], place / "files", None, None)[0].tasks[0].asked
    assert asked == report["tasks"]["choice"][0]["asked"]
    assert load_tasks(["choice"], place / "files", None, 4)[0].tasks[0].asked != asked
    assert load_tasks(["choice"], place / "files", 1, None)[0].tasks[0].asked != asked
    files = write_tasks(tmp_path / "files", ITEMS)  # the same content elsewhere
    assert load_tasks(["choice"], files, None, None)[0].tasks[0].asked == asked
    data = files / "choice.jsonl"
    data.write_text(data.read_text().replace('"gold": 1', '"gold": 0', 1))
    assert load_tasks(["choice"], files, None, None)[0].tasks[0].asked != asked
    assert model_digest(place / "vanilla-1") != model_digest(place / "vanilla-2")


def test_two_models_without_seeds_are_compared_by_items(place: Path, tmp_path: Path) -> None:
    """And one item is longer than the 16 positions of the models; two were asked for."""
    out = tmp_path / "out"
    files = write_tasks(tmp_path / "files", ITEMS)
    data = files / "last_word.jsonl"
    data.write_text(json.dumps({"text": "the cat sees " * 8 + "red"}) + "\n" + data.read_text())
    pair = [place / "stranger", place / "other"]
    tasks(pair, "last_word", baseline="other", include_path=files, limit=20, num_fewshot=0, out=out)
    found = json.loads((out / "report.json").read_text())
    assert [one["name"] for one in found["models"]] == ["other", "stranger"]
    (one,) = found["item_tests"]
    assert (one["model"], one["base"], one["items"]) == ("stranger", "other", 20)
    assert found["models"][0]["tasks"]["last_word"]["cut"] == 1
    notes = " ".join(found["notes"])
    assert "first 20 items" in notes and "up to 1 of last_word" in notes and "n = 1" in notes


def test_generations_that_lose_their_beginning_are_counted(place: Path, tmp_path: Path) -> None:
    """The models have 16 positions, of which four are kept for what they write."""
    texts = ["the cat sees", "the cat sees " * 5, "the cat sees " * 8]
    data = tmp_path / "said.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    task = {
        "task": "said",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "red",
        "generation_kwargs": {"max_gen_toks": 4, "until": ["."]},
        "metric_list": [{"metric": "exact_match"}],
    }
    (tmp_path / "said.yaml").write_text(yaml.safe_dump(task))
    tasks([place / "vanilla-1"], "said", include_path=tmp_path, out=tmp_path / "out")
    found = json.loads((tmp_path / "out/report.json").read_text())
    assert found["models"][0]["tasks"]["said"]["cut"] == 2


def test_a_task_of_the_harness_on_local_files(place: Path, tmp_path: Path) -> None:
    """As docs/evaluation.md has it: the task's own code, and three other keys."""
    import lm_eval.tasks

    data = {}
    for split in ("train", "validation"):
        data[split] = str(tmp_path / f"{split}.jsonl")
        items = [{"sentence": f"the {WORDS[i]} sees", "label": i % 2} for i in range(8)]
        Path(data[split]).write_text("".join(json.dumps(item) + "\n" for item in items))
    original = Path(lm_eval.tasks.__file__).parent / "glue/sst2/default.yaml"
    task = {
        "include": str(original),
        "task": "sst2_local",
        "dataset_path": "json",
        "dataset_name": None,
    }
    (tmp_path / "own").mkdir()
    text = yaml.safe_dump({**task, "dataset_kwargs": {"data_files": data}})
    (tmp_path / "own/sst2_local.yaml").write_text(text)
    one = [place / "vanilla-1"]
    tasks(one, "sst2_local", include_path=tmp_path / "own", num_fewshot=2, out=tmp_path / "out")
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["tasks"]["sst2_local"][0]["shots"] == 2
    scores = report["models"][0]["tasks"]["sst2_local"]
    assert (
        scores["items"] == 8 and scores["cut"] == 16 and 0 <= scores["scores"]["acc"]["value"] <= 1
    )
