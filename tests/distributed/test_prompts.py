"""`telemetry.sample_prompts` in any layout.

What the model's own logits say, and the same training.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pretrain.telemetry.event_file import markdown_of
from pretrain.telemetry.records import Sample
from tests.command_line import (
    assert_refused,
    assert_same_checkpoint,
    deterministic_metrics,
)
from tests.ranks import run_ranks, train_on_warm_ranks
from tests.tiny import tiny_overrides

pytestmark = pytest.mark.slow
PROMPTS = ("Return the", "  class A", "T")
PROMPTED = {
    "telemetry__sample_prompts": f"{list(PROMPTS)}",
    "telemetry__sample_tokens": 10,
    "data__validate_every": 2,
    "checkpoint__every": 2,
}
WITHOUT = {"telemetry__sample_prompts": "[]"}
VARIED = {  # a model that does not repeat one token for ever
    "schedule__steps": 4,
    "optimizer__learning_rate": 2e-3,
    "model__init_std": 0.2,
    "model__tied_embeddings": False,
}
TWO_RANKS: dict[str, dict[str, Any]] = {
    "sequence": {  # blocks of 15 and 16 tokens, which two ranks share
        "parallel__tensor_model_parallel_size": 2,
        "parallel__sequence_parallel": True,
        "attention__variant": "hybrid",
        "data__reset_at_document_end": True,
        "model__position_embedding": "learned",
        "model__dropout": 0.1,
    },
    "zero3": {"deepspeed__config": "zero3", "model__dropout": 0.1},
    "tensor": {
        "parallel__tensor_model_parallel_size": 2,
        "precision__dtype": "bf16",
        "model__tied_embeddings": True,
        "model__vocab_multiple": 96,
    },
}
ONE_RANK: dict[str, dict[str, Any]] = {
    # Scores of a fixed length; and three prompts are more than a forward pass of training has
    # tokens.
    "scores": {
        "attention__variant": "synthesizer_random",
        "data__micro_batch_size": 1,
        "model__dropout": 0.1,
    }
}
EXACT = ("sequence", "zero3", "scores")
"""In bf16 equal logits are common, and with other blocks others are equal."""


@pytest.fixture(scope="module")
def runs(tiny_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every run with prompts and without."""
    runs = tmp_path_factory.mktemp("prompts")

    def both(changes: dict[str, dict[str, Any]]) -> list[list[str]]:
        return [
            tiny_overrides(
                tiny_shards, runs, f"{name}{end}", **{**VARIED, **PROMPTED, **settings, **more}
            )
            for name, settings in changes.items()
            for end, more in (("", {}), ("-without", WITHOUT))
        ]

    for ranks, changes in ((2, TWO_RANKS), (1, ONE_RANK)):
        states = run_ranks(
            ranks, "tests.distributed.workers.runs:train_all", {"runs": both(changes)}
        )
        assert states == ["finished"] * 2 * len(changes)
    return runs


@pytest.fixture(scope="module")
def plain(runs: Path) -> dict[str, Any]:
    """What one rank says of each prompt, with the model of the checkpoint of the same step."""
    payload = {"paths": {name: str(runs / name) for name in EXACT}, "steps": [2, 4]}
    answer: dict[str, Any] = run_ranks(1, "tests.distributed.workers.prompts:continue_all", payload)
    return answer


def shown(run: Path) -> dict[str, dict[int, str]]:
    """{tag: {step: markdown}} of a run's page TEXT."""
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    return {
        tag: {
            event.step: event.tensor_proto.string_val[0].decode() for event in events.Tensors(tag)
        }
        for tag in events.Tags()["tensors"]
        if tag.startswith("samples/")
    }


@pytest.mark.parametrize("name", EXACT)
def test_each_token_is_the_likeliest_of_the_live_model(
    runs: Path, plain: dict[str, Any], name: str
) -> None:
    pages = shown(runs / name)
    assert pages.keys() == {f"samples/{number}" for number in range(len(PROMPTS))}
    tokens = 0
    for step, continuations in plain[name].items():
        for number, (text, added, ended, sure) in enumerate(continuations):
            page = pages[f"samples/{number}"][int(step)]
            expected = markdown_of(Sample(PROMPTS[number], text, added, ended))
            if not sure:  # from there on either token is right
                page = page.partition("**Cont")[0]
                expected = expected.partition("**Cont")[0]
            assert page == expected
            tokens += added if sure else 0
    assert tokens > 20
    different = {page for by_step in pages.values() for page in by_step.values()}
    assert len(different) > len(PROMPTS)  # it has learned something between


@pytest.mark.parametrize("name", [*TWO_RANKS, *ONE_RANK])
def test_a_training_with_prompts_has_the_bits_of_one_without(runs: Path, name: str) -> None:
    run = runs / name
    other = runs / f"{name}-without"
    assert deterministic_metrics(run) == deterministic_metrics(other)
    assert {step for page in shown(run).values() for step in page} == {2, 4} and shown(other) == {}
    for step in (2, 4):
        saved = f"checkpoints/step_{step:08d}"
        assert_same_checkpoint(run / saved, other / saved)


def test_a_prompt_without_room_ends_the_start_and_leaves_nothing(
    tiny_shards: Path, runs: Path
) -> None:
    long = {**PROMPTED, "telemetry__sample_tokens": 31}
    done = train_on_warm_ranks(tiny_overrides(tiny_shards, runs, "refused", **long), ranks=1)
    assert_refused(done, "telemetry.sample_prompts.0 has", "data.sequence_length=32")
    assert not (runs / "refused").exists()
