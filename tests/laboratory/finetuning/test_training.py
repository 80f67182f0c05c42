"""Fine-tuning of tiny exports: what is frozen stays so bit for bit, and seeds repeat."""

from __future__ import annotations

import random
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("accelerate")

import torch
from transformers import DataCollatorWithPadding

from laboratory.finetuning.classification_data import TASKS, Example, TaskData
from laboratory.finetuning.encoding import encode_examples
from laboratory.finetuning.frozen_rows import freeze, frozen_digest, remember, what_changed
from laboratory.finetuning.glue import Plan, run_glue
from laboratory.finetuning.models import (
    HEAD,
    Pretrained,
    group_models,
    load_classifier,
    load_tokenizer,
    open_pretrained,
)
from laboratory.finetuning.training import Settings, begin, fine_tune
from laboratory.finetuning.verbs import require_packages
from pretrain.errors import UserError
from tests.tiny_exports import learned_rows, rotary_rows, tiny_export, tiny_language_model

pytestmark = pytest.mark.distributed
SST2 = TASKS["sst2"]
QUICK = Settings(learning_rate=5e-3, epochs=4, batch_size=16)


@pytest.fixture(scope="module")
def models(tiny_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pretrained]:
    require_packages("a test", "accelerate")
    directory = tmp_path_factory.mktemp("models")
    tiny_export(directory / "rotary", tiny_shards, "orthogonal")
    tiny_export(directory / "learned", tiny_shards, "orthogonal", rotary=False)
    return {
        name: open_pretrained(directory / name, trust_code=False) for name in ("rotary", "learned")
    }


def reviews(count: int, seed: int) -> list[Example]:
    """Two words decide, and stand anywhere."""
    drawn = random.Random(seed)
    found = []
    for index in range(count):
        words = drawn.choices(
            ["the", "film", "of", "a", "day", "with", "some", "people"], k=drawn.randint(2, 6)
        )
        words.insert(drawn.randint(0, len(words)), "good" if index % 2 else "bad")
        found.append(Example(" ".join(words), None, index % 2))
    return found


def plan_of(models: list[Pretrained], settings: Settings, seeds: int = 1) -> Plan:
    return Plan(models, group_models(models), settings, seeds)


@pytest.fixture(scope="module")
def sst2() -> TaskData:
    return TaskData(SST2, reviews(160, 0), reviews(60, 1))


@pytest.fixture(scope="module")
def trained(
    models: dict[str, Pretrained], sst2: TaskData, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Both models on the toy SST-2, seeds 1 and 2, and where the results are kept."""
    plan = plan_of(list(models.values()), QUICK, seeds=2)
    out = tmp_path_factory.mktemp("out")
    begun: list[str] = []
    temporary = tmp_path_factory.mktemp("temporary")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(temporary))
        trials, details = run_glue(plan, [sst2], out, begun.append)
    left = set(temporary.iterdir())
    found = {"plan": plan, "out": out, "begun": begun, "left": left}
    return found | {"trials": trials, "details": details}


def test_what_can_be_learned_is_learned(trained: dict[str, Any]) -> None:
    assert [trial.score > 0.9 for trial in trained["trials"]] == [True] * 4
    assert trained["begun"] == [
        f"{name}-sst2-{seed}" for name in ("rotary", "learned") for seed in (1, 2)
    ]
    for detail in trained["details"]:
        assert detail["examples"] == {
            "trained": 144,
            "set_aside": 16,
            "shortened": 0,
            "shortened_judged": 0,
        }
        labels = [example.label for example in reviews(60, 1)]
        correct = sum(np.equal(detail["predictions"]["validation"], labels))
        assert detail["score"] == correct / 60 and detail["items"] == 60
    first, second, *_ = trained["details"]
    assert (first["predictions"], first["training"]["looks"]) != (
        second["predictions"],
        second["training"]["looks"],
    )


def test_frozen_rows_and_the_rest_are_reported(
    trained: dict[str, Any], models: dict[str, Pretrained]
) -> None:
    rotary, _, learned, _ = (detail["weights"] for detail in trained["details"])
    assert rotary["frozen_bits_equal"] and learned["frozen_bits_equal"]
    assert rotary["frozen_entries"] == 2 * 24 * 32 + 2 * 32 * 32  # a head of layer 0 trained
    assert learned["frozen_entries"] == 2 * 64 * (32 + 1)  # with their biases
    assert rotary["unchanged_tensors"] == learned["unchanged_tensors"] == []
    untouched = load_classifier(models["rotary"], SST2, 2)
    assert rotary["frozen_sha256"] == frozen_digest(untouched, rotary_rows())


def test_what_is_finished_is_not_trained_again(trained: dict[str, Any], sst2: TaskData) -> None:
    again, details = run_glue(trained["plan"], [sst2], trained["out"], str)
    assert again == trained["trials"] and [detail["kept"] for detail in details] == [True] * 4
    assert [detail["kept"] for detail in trained["details"]] == [False] * 4


def test_the_same_seed_gives_the_same_numbers(
    trained: dict[str, Any], models: dict[str, Pretrained], sst2: TaskData, tmp_path: Path
) -> None:
    """Also where the one before was of something else: what is kept is of other examples here."""
    (tmp_path / "trials").mkdir()
    for path in (trained["out"] / "trials").iterdir():
        of_others = path.read_text().replace('"examples": "', '"examples": "0')
        (tmp_path / "trials" / path.name).write_text(of_others)
    plan = plan_of([models["rotary"]], QUICK)
    (trial,), (detail,) = run_glue(plan, [sst2], tmp_path, str)
    first = trained["details"][0]
    assert not detail["kept"] and trial == replace(trained["trials"][0], group="orthogonal")
    for key in ("metrics", "weights", "predictions"):
        assert detail[key] == first[key]
    assert detail["training"]["looks"] == first["training"]["looks"]


def test_nothing_is_left_and_nothing_is_said(
    trained: dict[str, Any],
    models: dict[str, Pretrained],
    sst2: TaskData,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert trained["left"] == set()
    quick = Settings(learning_rate=5e-3, epochs=1, batch_size=16)
    run_glue(plan_of([models["learned"]], quick), [sst2], tmp_path, str)
    assert capfd.readouterr() == ("", "")
    assert [path.name for path in tmp_path.iterdir()] == ["trials"]


@pytest.mark.parametrize("rotary", [True, False])
def test_weight_decay_moves_no_frozen_row(rotary: bool) -> None:
    torch.manual_seed(0)
    model = tiny_language_model(rotary)
    rows = rotary_rows() if rotary else learned_rows()
    if not rotary:
        rows = {name: [[8, 24], [40, 48]] for name in rows}  # some heads of Q, one of K
    freeze(model, rows)
    before = remember(model, rows)
    training = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(training, lr=0.1, weight_decay=0.5)
    ids = torch.arange(20)[None]
    for _ in range(2):
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    found = what_changed(model, rows, before, head="")
    assert found["frozen_bits_equal"] and found["unchanged_tensors"] == []
    fused = model.get_submodule(next(iter(rows)).removesuffix(".weight"))
    with torch.no_grad():
        fused.parametrizations.weight[0].frozen.add_(1e-3)
    with pytest.raises(RuntimeError, match="frozen rows of queries and keys changed"):
        what_changed(model, rows, before, head="")


def test_rows_that_the_model_does_not_have_are_refused() -> None:
    model = tiny_language_model(rotary=True)
    with pytest.raises(
        UserError, match=r"layers.9.self_attn.q_proj.weight is frozen, but the model has no"
    ):
        freeze(model, {"model.layers.9.self_attn.q_proj.weight": [[0, 32]]})
    with pytest.raises(UserError, match=r"rows 16 to 48 of .* are frozen, but it has 32"):
        freeze(model, {"model.layers.0.self_attn.q_proj.weight": [[16, 48]]})
    before = remember(model, {})
    with pytest.raises(UserError, match="fine-tuning changed no weight: raise --learning-rate"):
        what_changed(model, {}, before, head=HEAD)


@pytest.mark.parametrize("name", ["rotary", "learned"])
def test_padding_changes_no_answer(models: dict[str, Pretrained], name: str) -> None:
    """Every example gives the same numbers alone and beside a longer one."""
    tokenizer = load_tokenizer(models[name])
    begin(0)
    model = load_classifier(models[name], TASKS["rte"], tokenizer.start).eval()
    longer = ("a longer one of more words than the other", "and more of them")
    texts = [("good", "bad"), longer, ("", "")]
    examples = [Example(first, second, 0) for first, second in texts]
    items = encode_examples(
        TASKS["rte"], examples, tokenizer.ids, start=tokenizer.start, longest=64
    ).items
    collate = DataCollatorWithPadding(tokenizer.program)
    with torch.no_grad():
        together = model(**collate(items)).logits
        for item, expected in zip(items, together, strict=True):
            alone = model(**collate([item])).logits[0]
            torch.testing.assert_close(alone, expected, rtol=1e-5, atol=1e-6)
    assert (together[0] - together[1]).abs().max() > 1e-3
    assert model.config.problem_type == "single_label_classification" and model.num_labels == 2


def test_a_training_ends_early_with_its_best_weights(
    models: dict[str, Pretrained], sst2: TaskData
) -> None:
    """Of labels that mean nothing the loss of the examples set aside rises soon."""
    tokenizer = load_tokenizer(models["rotary"])
    items = encode_examples(
        SST2, sst2.train, tokenizer.ids, start=tokenizer.start, longest=64
    ).items
    drawn = random.Random(3).choices((0, 1), k=160)
    shuffled = [dict(item, labels=label) for item, label in zip(items, drawn, strict=True)]
    train, aside = shuffled[:120], shuffled[120:]
    begin(1)
    model = load_classifier(models["rotary"], SST2, tokenizer.start)
    settings = Settings(learning_rate=1e-2, epochs=30, batch_size=40, patience=2)

    def minus_loss(labels: np.ndarray, outputs: np.ndarray) -> float:
        made, wanted = map(torch.tensor, (outputs, labels))
        return -float(torch.nn.functional.cross_entropy(made, wanted))

    collator = DataCollatorWithPadding(tokenizer.program)
    course, outputs = fine_tune(
        model,
        train,
        aside,
        collator=collator,
        settings=settings,
        seed=1,
        judge=minus_loss,
        judged={"aside": aside},
    )
    steps = [step for step, _ in course["looks"]]
    assert course["steps"] == steps[-1] < 90 and course["best_step"] == steps[-3]
    best = minus_loss(np.array([item["labels"] for item in aside]), outputs["aside"])
    assert course["best"] == pytest.approx(best, rel=1e-4)
    assert course["best"] == max(value for _, value in course["looks"])


def test_a_loss_that_is_no_number_ends_it(
    models: dict[str, Pretrained], sst2: TaskData, tmp_path: Path
) -> None:
    plan = plan_of([models["rotary"]], Settings(learning_rate=1e30, epochs=1, batch_size=40))
    with pytest.raises(
        UserError, match=r"the loss of step 4 of a fine-tuning is nan; lower --learning-rate"
    ):
        run_glue(plan, [sst2], tmp_path, str)
    assert list(tmp_path.iterdir()) == []


def test_scores_are_learned_by_regression(models: dict[str, Pretrained], tmp_path: Path) -> None:
    task = TASKS["stsb"]

    def some(count: int, seed: int) -> list[Example]:
        return [Example(one.first, "bad film", 5.0 * one.label) for one in reviews(count, seed)]

    plan = plan_of([models["learned"]], replace(QUICK, epochs=10))
    (trial,), _ = run_glue(plan, [TaskData(task, some(96, 0), some(40, 1))], tmp_path, str)
    assert trial.metrics.keys() == {"pearson", "spearman"} and min(trial.metrics.values()) > 0.8
    assert trial.score == sum(trial.metrics.values()) / 2 and 0 < trial.standard_error < 0.1


def test_the_score_of_mnli_is_the_mean_of_both_sets(
    models: dict[str, Pretrained], tmp_path: Path
) -> None:
    some = [Example(one.first, "bad film", one.label) for one in reviews(48, 0)]
    data = TaskData(TASKS["mnli"], some, some[:20], some[20:])
    quick = Settings(learning_rate=5e-3, epochs=1, batch_size=16)
    plan = replace(plan_of([models["learned"]], quick), max_length=3)  # of no example all words
    (trial,), (detail,) = run_glue(plan, [data], tmp_path, str)
    assert detail["examples"]["shortened"] == detail["examples"]["shortened_judged"] == 48
    assert list(trial.metrics) == ["accuracy", "accuracy_mismatched"] and trial.items == 48
    errors = [p * (1 - p) / n for p, n in zip(trial.metrics.values(), (20, 28), strict=True)]
    assert trial.standard_error == pytest.approx(sum(errors) ** 0.5 / 2)
