"""Data through the real program: the same global batches for any layout; resuming on other data."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from data_pipeline.shards.manifest import read_manifest
from tests.conftest import data_pipeline
from tests.ranks import run_ranks
from tests.tiny import tiny_overrides

SMALL = {"telemetry__tensorboard": "false", "data__sequence_length": 16}


@pytest.fixture(scope="module")
def fewer_shards(tiny_shards: Path) -> Path:
    """Shards of half the corpus files, with the same tokenizer."""
    root = tiny_shards.parent
    files = sorted((root / "corpus").glob("*.zst"))
    out = root / "fewer"
    arguments = ("--tokenizer", root / "tokenizer.model", "--out", out, "--name", "fewer")
    data_pipeline("tokenize", *files[: len(files) // 2], *arguments)
    return out


def blend_of(*members: str) -> dict[str, object]:
    return {"data__directory": "null", "data__blend": f"[{', '.join(members)}]"}


def whole(directory: Path, weight: float) -> str:
    return f"{{directory: {directory}, weight: {weight}}}"


def test_global_batches_are_the_same_for_any_layout(
    tiny_shards: Path, fewer_shards: Path, tmp_path: Path
) -> None:
    batches = {}
    for ranks, tensor_parallel in ((1, 1), (2, 1), (4, 1), (2, 2)):
        micro_batches = (1, 2)
        overrides = [
            tiny_overrides(
                tiny_shards,
                tmp_path,
                f"{ranks}-{tensor_parallel}-{size}",
                **SMALL,
                **blend_of(whole(tiny_shards, 0.7), whole(fewer_shards, 0.3)),
                data__micro_batch_size=size,
                parallel__tensor_model_parallel_size=tensor_parallel,
            )
            for size in micro_batches
        ]
        answers = run_ranks(
            ranks, "tests.distributed.workers.data:global_batches", {"runs": overrides}
        )
        for size, answer in zip(micro_batches, answers, strict=True):
            if tensor_parallel == 2:  # both ranks of the pair read the same
                rounds = [
                    answer[start : start + 2 * size] for start in range(0, len(answer), 2 * size)
                ]
                assert all(pair[:size] == pair[size:] for pair in rounds)
                answer = list(itertools.chain.from_iterable(pair[:size] for pair in rounds))
            batches[ranks, tensor_parallel, size] = answer
    reference = batches[1, 1, 1]
    assert len(reference) == 3 * 8 and len({tuple(sample) for sample in reference}) == 24
    assert all(samples == reference for samples in batches.values())


def test_a_resume_on_other_data_is_refused_with_what_changed(
    tiny_shards: Path, fewer_shards: Path, tmp_path: Path
) -> None:
    def overrides(name: str, **changes: object) -> list[str]:
        return tiny_overrides(
            tiny_shards,
            tmp_path,
            name,
            **{**SMALL, "schedule__steps": 2, "checkpoint__every": 1, **changes},
        )

    blend = blend_of(whole(tiny_shards, 0.5), whole(fewer_shards, 0.5))
    cases = {
        "directory": {"data__directory": fewer_shards},
        "blend": blend,
        "length": {"data__sequence_length": 8},
        "seed": {"data__seed": 5},
        "unchanged": {},
        "allowed": {**blend, "data__sequence_length": 8, "data__allow_change": "true"},
    }
    changed = [overrides(name, schedule__steps=3, **changes) for name, changes in cases.items()]
    payload = {"runs": [overrides("trained"), *changed]}
    answers = dict(
        zip(cases, run_ranks(1, "tests.distributed.workers.data:resumes", payload), strict=True)
    )

    words = {name: answers[name]["error"] for name in ("directory", "blend", "length", "seed")}
    for text in words.values():
        assert text.startswith(f"UserError: checkpoint {tmp_path}")
        assert "was trained on other data: " in text and "restore the shards" in text
        assert text.endswith("or set data.allow_change=true to continue with what there is now")
    old = read_manifest(tiny_shards)
    new = read_manifest(fewer_shards)
    source = new.sources("train")[0]
    assert f"{fewer_shards} is used in place of {tiny_shards}" in words["directory"]
    counts = f"{new.tokens('train', source):,} tokens, was {old.tokens('train', source):,}"
    assert f"{fewer_shards} source {source} has {counts}" in words["directory"]
    assert f"{fewer_shards} is new; {tiny_shards} gives 1/2 of the samples, was 1" in words["blend"]
    assert "data.sequence_length is 8, was 16" in words["length"]
    assert "data.seed is 5, was 1234" in words["seed"]

    assert answers["unchanged"]["changes"] == []
    assert ["data.sequence_length is 8, was 16", 3] in answers["allowed"]["changes"]
    assert [record["step"] for record in answers["unchanged"]["records"]] == [1, 2, 3]
    assert [record["tokens"] for record in answers["unchanged"]["records"]] == [128, 256, 384]
    # Going on with another length counts the tokens that were really trained on.
    assert [record["tokens"] for record in answers["allowed"]["records"]] == [128, 256, 256 + 64]
