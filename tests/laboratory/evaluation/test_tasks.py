"""evaluate tasks: the harness on tiny models and local files, end to end."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from scipy import stats

from laboratory.evaluation.verbs import tasks
from tests.laboratory.evaluation.tiny_models import (
    WORDS,
    own_cache,
    write_model,
    write_tasks,
    write_translator,
)

pytest.importorskip("lm_eval")
pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SEEDS = range(1, 6)
ITEMS = 24


@pytest.fixture(scope="module")
def models_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
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


def models(models_root: Path) -> list[Path]:
    return [
        models_root / f"{variant}-{seed}" for variant in ("vanilla", "orthogonal") for seed in SEEDS
    ]


@pytest.fixture(scope="module")
def report(models_root: Path) -> dict[str, Any]:
    out = models_root / "out"
    tasks(
        models(models_root), "choice, last_word,both", include_path=models_root / "files", out=out
    )
    content: dict[str, Any] = json.loads((out / "report.json").read_text())
    return content


def samples(out: Path, model: str, task: str) -> list[dict[str, Any]]:
    (file,) = out.glob(f"results/{model}-*/samples_{task}.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def score(report: dict[str, Any], variant: str, seed: int, task: str, metric: str) -> float:
    (model,) = (
        entry for entry in report["models"] if (entry["variant"], entry["seed"]) == (variant, seed)
    )
    return float(model["tasks"][task][metric]["value"])


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


def test_the_items_are_those_that_transformers_gives(
    models_root: Path, report: dict[str, Any]
) -> None:
    """Six items of `last_word`, which the others repeat, and six of `choice`."""
    model = models_root / "orthogonal-2"
    texts = [
        json.loads(line)["text"]
        for line in (models_root / "files/last_word.jsonl").read_text().splitlines()
    ]
    ours = [log_likelihood(model, *_cut(text)) for text in texts[:6]]
    items = samples(models_root / "out", "orthogonal-2", "last_word")
    assert [item["perplexity"] for item in items[:6]] == pytest.approx(
        [value for value, _ in ours], abs=1e-5
    )
    assert [bool(item["acc"]) for item in items[:6]] == [greedy for _, greedy in ours]
    mean = sum(item["perplexity"] for item in items) / ITEMS
    perplexity = score(report, "orthogonal", 2, task="last_word", metric="perplexity")
    assert perplexity == pytest.approx(math.exp(-mean))
    right = []
    for line in (models_root / "files/choice.jsonl").read_text().splitlines()[:6]:
        item = json.loads(line)
        choices = [log_likelihood(model, item["text"], f" {word}")[0] for word in item["choices"]]
        right.append(float(np.argmax(choices) == item["gold"]))
    items = samples(models_root / "out", "orthogonal-2", "choice")
    assert [item["acc"] for item in items[:6]] == right


def _cut(text: str) -> tuple[str, str]:
    context, _, last = text.rpartition(" ")
    return context, f" {last}"


def test_one_metric_of_each_task_is_tested(report: dict[str, Any]) -> None:
    tested = {
        (contrast["task"], contrast["metric"])
        for contrast in report["contrasts"]
        if contrast["tested"]
    }
    assert tested == {("choice", "acc"), ("last_word", "acc"), ("both", "acc")}
    others = {
        (contrast["task"], contrast["metric"])
        for contrast in report["contrasts"]
        if not contrast["tested"]
    }
    assert others == {("choice", "acc_norm"), ("last_word", "perplexity")}
    for contrast in report["contrasts"]:
        ours, base = (
            [
                score(report, variant, seed, task=contrast["task"], metric=contrast["metric"])
                for seed in SEEDS
            ]
            for variant in ("orthogonal", "vanilla")
        )
        assert contrast["gap"]["seeds"] == list(SEEDS)
        assert contrast["gap"]["differences"] == pytest.approx(np.subtract(ours, base))


def test_models_are_held_against_one_another_item_by_item(
    models_root: Path, report: dict[str, Any]
) -> None:
    assert len(report["items"]) == 15
    (comparison,) = (
        t for t in report["items"] if (t["task"], t["compared"]) == ("choice", "orthogonal-3")
    )
    ours, base = (
        [item["acc"] for item in samples(models_root / "out", f"{variant}-3", "choice")]
        for variant in ("orthogonal", "vanilla")
    )
    differences = np.subtract(ours, base)
    gap = comparison["gap"]
    assert (gap["baseline"], gap["n"]) == ("vanilla-3", ITEMS)
    assert gap["mean"] == pytest.approx(differences.mean()) and differences.any()
    half = stats.t.ppf(0.975, ITEMS - 1) * differences.std(ddof=1) / ITEMS**0.5
    assert gap["high"] - gap["mean"] == pytest.approx(half)
    ps = [t["gap"]["t_p"] for t in report["items"]]
    smallest = min(p for p in ps if p is not None)
    assert min(t["gap"]["t_p_holm"] for t in report["items"] if t["gap"]["t_p"]) == pytest.approx(
        min(1, smallest * sum(p is not None for p in ps))
    )


def test_a_group_has_the_number_of_its_parts(report: dict[str, Any]) -> None:
    """The group's two tasks have the items of `choice`, a quarter and the rest."""
    for seed in SEEDS:
        assert score(report, "vanilla", seed, task="both", metric="acc") == pytest.approx(
            score(report, "vanilla", seed, task="choice", metric="acc")
        )
    choice, both = (
        [comparison["gap"] for comparison in report["items"] if comparison["task"] == task]
        for task in ("choice", "both")
    )
    assert [gap["mean"] for gap in choice] == pytest.approx([gap["mean"] for gap in both])
    assert report["tasks"]["early"] == {"version": 1.0, "shots": 0, "items": ITEMS // 4}


def test_the_report_says_it(models_root: Path, report: dict[str, Any]) -> None:
    text = (models_root / "out/report.md").read_text()
    assert "lm-eval 0.4." in text and "sacrebleu 2." in text
    assert "| last_word | perplexity ↓ | vanilla | 5 |" in text
    assert "| early | 1.0 | 0 | 6 |" in text and "Fewer than" not in text


def test_responses_are_kept_by_the_harness(models_root: Path, report: dict[str, Any]) -> None:
    """A model whose answers are all on disk is asked nothing."""
    from lm_eval.models.huggingface import HFLM

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HFLM, "_loglikelihood_tokens", None)
        some = [models_root / "vanilla-1"]
        tasks(some, "choice", include_path=models_root / "files", out=models_root / "out")
    later_report = json.loads((models_root / "out/report.json").read_text())
    expected = score(report, "vanilla", 1, task="choice", metric="acc")
    assert score(later_report, "vanilla", 1, task="choice", metric="acc") == expected
    assert later_report["contrasts"] == later_report["items"] == []


def test_two_models_without_seeds_are_compared_by_items(models_root: Path, tmp_path: Path) -> None:
    pair = [models_root / "other", models_root / "stranger"]
    options = {"include_path": models_root / "files", "limit": 20, "out": tmp_path / "out"}
    tasks(pair, "last_word", baseline="other", num_fewshot=0, **options)
    content = json.loads((tmp_path / "out/report.json").read_text())
    (comparison,) = content["items"]
    gap = comparison["gap"]
    assert (comparison["compared"], gap["baseline"], gap["n"]) == ("stranger", "other", 20)
    assert "first 20 items" in " ".join(content["notes"])


def test_a_learned_translation_scores_as_sacrebleu_says(tmp_path: Path) -> None:
    """The shipped task, by a model that learns it, and by the same model before."""
    import sacrebleu

    for name, steps in (("learned", 700), ("unlearned", 0)):
        write_translator(tmp_path / name, steps)
    out = tmp_path / "out"
    tasks([tmp_path / "unlearned", tmp_path / "learned"], "toy_translation", limit=40, out=out)
    content = json.loads((out / "report.json").read_text())
    scores = {model["name"]: model["tasks"]["toy_translation"] for model in content["models"]}
    for name in scores:
        items = samples(out, name, "toy_translation")
        said = [item["filtered_resps"][0] for item in items]
        wanted = [[item["doc"]["target"] for item in items]]
        bleu = sacrebleu.corpus_bleu(said, wanted).score
        assert scores[name]["bleu"]["value"] == pytest.approx(bleu)
        assert scores[name]["chrf"]["value"] == pytest.approx(
            sacrebleu.corpus_chrf(said, wanted).score
        )
    assert scores["learned"]["bleu"]["value"] > 90 > 10 > scores["unlearned"]["bleu"]["value"]
    gaps = {contrast["metric"]: contrast["gap"]["mean"] for contrast in content["contrasts"]}
    difference = scores["learned"]["bleu"]["value"] - scores["unlearned"]["bleu"]["value"]
    assert gaps["bleu"] == pytest.approx(difference)


def test_a_task_of_the_harness_on_local_files(models_root: Path, tmp_path: Path) -> None:
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
    exports = [models_root / "vanilla-1"]
    tasks(exports, "sst2_local", include_path=tmp_path / "own", num_fewshot=2, out=tmp_path / "out")
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["tasks"]["sst2_local"]["shots"] == 2
    assert report["tasks"]["sst2_local"]["items"] == 8
    assert 0 <= report["models"][0]["tasks"]["sst2_local"]["acc"]["value"] <= 1
