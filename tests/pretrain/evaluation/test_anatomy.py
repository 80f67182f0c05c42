"""Anatomy of a gap: classes of predictions by hand, sums over classes, shares, words, refusals."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pretrain.evaluation.heads.anatomy import classify, dissect, in_words
from tests.command_line import assert_refused
from tests.fabricated_runs import write_run
from tests.ranks import warm_cli

SEEDS = range(1, 6)


def test_classes_of_a_sample_that_can_be_read() -> None:
    """Ids 5 6 5 6 7 5 7 0 5 6: at 6 the pair (5, 6) is seen; 0 ends a document."""
    ids = np.array([[5, 6, 5, 6, 7, 5, 7, 0, 5, 6]])
    counts = np.array([0, 0, 0, 0, 0, 8, 4, 4])  # 5 is half of the text
    of = classify(ids, np.array(["a"]), counts, boundary=None)
    assert not of["frequency"]["third quarter"].any()
    assert {split: list(classes) for split, classes in of.items()} == {
        "recall": ["pair seen before", "token alone seen before", "not seen"],
        "frequency": ["rarest quarter", "second quarter", "third quarter", "most frequent quarter"],
        "position": ["1 to 3", "4 to 5", "6 to 7", "8 to 9"],
        "source": ["a"],
    }
    # targets:                                                 6  5  6  7  5  7  0  5  6
    assert of["recall"]["pair seen before"].astype(int).tolist() == [[0, 0, 1, 0, 0, 0, 0, 0, 1]]
    assert of["recall"]["token alone seen before"].astype(int).tolist() == [
        [0, 1, 0, 0, 1, 1, 0, 1, 0]
    ]
    assert of["frequency"]["most frequent quarter"].astype(int).tolist() == [
        [0, 1, 0, 0, 1, 0, 0, 1, 0]
    ]
    # With documents that stand alone, nothing before 0 counts as seen, nor what follows 0.
    alone = classify(np.repeat(ids, 2, axis=0), np.array(["a", "b"]), counts, boundary=0)
    for row in (0, 1):
        assert np.flatnonzero(alone["recall"]["pair seen before"][row]).tolist() == [2]
        assert alone["recall"]["not seen"][row].astype(int).tolist() == [1, 0, 0, 1, 0, 0, 1, 0, 1]
    assert alone["source"]["b"].sum() == 8


def fabricated(extra: dict[str, float]) -> tuple[Any, Any, Any]:
    """Losses in eighths, whose sums are exact; the variant loses `extra` on classes of recall."""
    numbers = np.random.default_rng(3)
    ids = numbers.integers(1, 40, (24, 33))
    splits = classify(ids, np.repeat(["a", "b", "c"], 8), np.arange(40), boundary=1)
    base = {seed: numbers.integers(16, 48, (24, 32)) / 8 for seed in SEEDS}
    own = {
        seed: losses
        + sum(splits["recall"][name] * more for name, more in extra.items())
        + numbers.integers(-1, 2, (24, 32)) / 8
        for seed, losses in base.items()
    }
    return own, base, splits


def test_the_classes_of_every_split_add_up_to_the_whole_gap() -> None:
    own, base, splits = fabricated({"pair seen before": 4.0, "not seen": 0.5})
    whole, *classes = dissect("v", "b", own, base=base, splits=splits)
    for split, masks in splits.items():
        of = [one for one in classes if one.split == split]
        counts = [int(mask.sum()) for mask in masks.values()]
        total = sum(counts)
        assert np.sum([*masks.values()], axis=0).max() == 1  # no prediction in two classes
        for number, seed in enumerate(SEEDS):
            parts = [
                count * one.gap.differences[number] for count, one in zip(counts, of, strict=True)
            ]
            exact = sum(float((own[seed] - base[seed])[mask].sum()) for mask in masks.values())
            assert sum(parts) == pytest.approx(exact, rel=1e-12)
            assert whole.gap.differences[number] == pytest.approx(exact / total, rel=1e-12)
        assert sum(one.share for one in of) == pytest.approx(1, rel=1e-12)
        assert sum(one.part[0] for one in of if one.part) == pytest.approx(1, rel=1e-12)
        assert sum(one.share * one.gap.mean for one in of) == pytest.approx(
            whole.gap.mean, rel=1e-12
        )


def test_words_name_the_class_that_holds_the_gap_or_say_that_none_does() -> None:
    held = dissect("v", "b", *fabricated({"pair seen before": 4.0}))
    assert 'It is held by "pair seen before" (recall): ' in in_words(held)
    pair = next(one for one in held if one.name == "pair seen before")
    assert pair.part and pair.part[1] < pair.part[0] < pair.part[2] and pair.part[0] > 0.8
    spread = dissect("v", "b", *fabricated({"token alone seen before": 1.5, "not seen": 0.5}))
    assert "No class holds 80 % of it" in in_words(spread)
    nothing = dissect("v", "b", *fabricated({}))
    assert "contains 0" in in_words(nothing) and not any(one.part for one in nothing)
    own, base, splits = fabricated({"not seen": 1.0})
    one_pair = in_words(dissect("v", "b", {1: own[1]}, base=base, splits=splits))
    assert "(n = 1 < 5: no claim)" in one_pair and "no ends" in one_pair


@pytest.mark.distributed
def test_fiellers_interval_covers_the_true_share() -> None:
    """Hold the share 3/4 in about 95 % of the intervals of 400 campaigns of five pairs."""
    numbers = np.random.default_rng(5)
    inside = 0
    splits = {"recall": {"a": np.array([[True, False]]), "b": np.array([[False, True]])}}
    for _ in range(400):
        own = {seed: np.array([[1.5, 0.5]]) + numbers.normal(0, 0.3, (1, 2)) for seed in SEEDS}
        base = dict.fromkeys(SEEDS, np.zeros((1, 2)))
        part = dissect("v", "b", own, base=base, splits=splits)[1].part
        inside += part is None or part[1] <= 0.75 <= part[2]
    assert 368 <= inside <= 392


@pytest.mark.distributed
def test_what_cannot_be_compared_is_refused_in_one_sentence(tmp_path: Path) -> None:
    runs = {name: str(write_run(tmp_path, name)) for name in ("vanilla", "bare")}
    runs["longer"] = str(
        write_run(tmp_path, "longer", "orthogonal", changes={"config.data.sequence_length": 64})
    )
    runs["seeded"] = str(write_run(tmp_path, "seeded", "orthogonal", seed=2))
    runs["fitting"] = str(write_run(tmp_path, "fitting", "orthogonal"))
    runs["other"] = str(write_run(tmp_path, "other", "gaussian", changes={"data.fingerprint": "f"}))
    for checkpoint in (tmp_path / "bare" / "checkpoints").iterdir():
        shutil.rmtree(checkpoint) if checkpoint.is_dir() else checkpoint.unlink()
    for names, words in (
        (("vanilla",), "all runs are 'vanilla'; give runs of two variants or more"),
        (("vanilla", "longer"), "these runs differ in data.sequence_length (128, 64)"),
        (("vanilla", "seeded"), "'orthogonal' and 'vanilla' have no seed in common"),
        (("vanilla", "other"), "have no held-out text in common"),
        (("bare", "fitting"), "bare has no complete checkpoint"),
    ):
        done = warm_cli(
            ["evaluate", "anatomy", *(runs[name] for name in names), "--out", str(tmp_path / "o")]
        )
        assert_refused(done, words)
    assert not (tmp_path / "o").exists()
