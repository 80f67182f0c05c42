"""Recordings: what counts as a difference."""

from __future__ import annotations

import pytest

from tools.record import differences, only_in_one


@pytest.mark.parametrize(
    ("part", "recorded", "after", "expected"),
    [
        (
            "export",
            {"vanilla/logits": "a1", "gaussian/logits": "b2"},
            {"vanilla": "refused", "gaussian/logits": "b2"},
            [
                "export/vanilla/logits differs: a1 before, missing now",
                "export/vanilla differs: missing before, refused now",
            ],
        ),
        (
            "bank",
            {"svd/head/64x8/query": "a1", "svd/layer/64x8": "refused"},
            {"svd/head/64x8": "refused", "svd/layer/64x8": "refused"},
            [
                "bank/svd/head/64x8/query differs: a1 before, missing now",
                "bank/svd/head/64x8 differs: missing before, refused now",
            ],
        ),
        ("train", {"vanilla/loss/train": "a1"}, {"vanilla/loss/train": "a1"}, []),
    ],
)
def test_what_becomes_refused_is_a_difference(
    part: str, recorded: dict[str, str], after: dict[str, str], expected: list[str]
) -> None:
    was = {"parts": {part: recorded}}
    now = {"parts": {part: after}}
    assert differences(was, now) == expected
    assert only_in_one(was, now) == []


def test_a_design_that_is_removed_or_added_is_told_and_is_no_difference() -> None:
    was = {"parts": {"bank": {"variant/old/query": "a1", "variant/kept/query": "b2"}}}
    now = {"parts": {"bank": {"variant/kept/query": "b2", "variant/mine": "refused"}}}
    assert differences(was, now) == []
    assert only_in_one(was, now) == ["bank: gone: variant/old", "bank: new: variant/mine"]
