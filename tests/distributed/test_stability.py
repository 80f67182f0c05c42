"""Bad numbers: what is not finite moves no weight, and no checkpoint holds it. On two ranks."""

import json
import math
import re
import shutil
from collections.abc import Callable
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest

from laboratory.runs.finished import read_finished_run
from pretrain.errors import UserError
from pretrain.runs.directory import RunDirectory
from pretrain.runs.metrics_file import read_metrics
from tests.command_line import assert_resumed_exactly
from tests.ranks import run_ranks
from tests.tiny import tiny_overrides

pytestmark = pytest.mark.slow

ENGINES: dict[str, dict[str, object]] = {
    f"zero{stage}-{dtype}": {"deepspeed__config": f"zero{stage}", "precision__dtype": dtype}
    for stage, dtype in ((0, "fp32"), (1, "bf16"), (2, "fp32"), (3, "bf16"))
}
"""Each optimizer of DeepSpeed once."""
UNCHECKED = {  # DeepSpeed itself would make this update
    "deepspeed__overrides": "{bf16: {check_grad_overflow: false}}",
    "precision__dtype": "bf16",
    "precision__grad_accum_dtype": "bf16",
}
PADDED = {
    "deepspeed__config": "zero3",
    "model__num_attention_heads": 3,
    "model__hidden_size": 24,
    "model__head_dim": 5,
    "model__position_embedding": "learned",
    "attention__adapters": "[channel_scale]",
}
"""Fifteen numbers on two ranks, of which ZeRO-3 gives each eight."""
WORKER = "tests.distributed.workers.stability:"
TRAIN_ALL = "tests.distributed.workers.runs:train_all"
STEADY = {
    "schedule__kind": "constant",
    "schedule__warmup_steps": 1,
    "telemetry__tensorboard": "false",
}

Overrides = Callable[..., list[str]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stability")


@pytest.fixture(scope="module")
def overrides(tiny_shards: Path, runs: Path) -> Overrides:
    def of(name: str, **changes: object) -> list[str]:
        return tiny_overrides(tiny_shards, runs, name, **{**STEADY, **changes})

    return of


def records(run: Path) -> list[dict[str, Any]]:
    return list(read_metrics(run / "metrics.jsonl"))


def complete(run: Path) -> list[str]:
    return [path.name for path in RunDirectory(run).complete_checkpoints()]


@pytest.fixture(scope="module")
def skipped(overrides: Overrides) -> dict[str, Any]:
    planned = {name: overrides(f"skip-{name}", **engine) for name, engine in ENGINES.items()}
    planned["unchecked"] = overrides("skip-unchecked", **UNCHECKED)
    planned["padded"] = overrides("skip-padded", **PADDED)
    return run_ranks(2, WORKER + "skipped_updates", {"runs": planned})


@pytest.mark.parametrize("engine", [*ENGINES, "unchecked", "padded"])
def test_one_ranks_nan_leaves_weights_moments_and_steps_bit_for_bit(
    engine: str, skipped: dict[str, Any]
) -> None:
    answer = skipped[engine]
    assert answer["made"] == [[True, False, True]] * 2
    assert answer["unchanged"] == [False, True, False]
    assert math.isinf(answer["norms"][1]) and math.isfinite(answer["norms"][0] + answer["norms"][2])
    assert answer["position"] == [3, 24, 1]


@pytest.mark.parametrize("engine", [*ENGINES, "padded"])
def test_one_ranks_infinite_weight_is_seen_by_all(engine: str, skipped: dict[str, Any]) -> None:
    assert skipped[engine]["weights_finite"] == [[True, False]] * 2


def test_nan_in_the_padding_of_a_partition_is_no_weight(skipped: dict[str, Any]) -> None:
    assert skipped["padded"]["padding"] > 0 and skipped["padded"]["weights_finite"][0][0]


@pytest.fixture(scope="module")
def spoilt(overrides: Overrides) -> dict[str, str]:
    """{run: state or refusal}; rank 1's gradient is spoilt at the given steps."""
    every_two = {"checkpoint__every": 2}
    rarely = {**every_two, "telemetry__every": 5}
    planned: dict[str, tuple[list[str], list[int]]] = {
        "once": (overrides("once", **ENGINES["zero3-bf16"], **every_two), [4]),
        "row": (overrides("row", **ENGINES["zero1-bf16"], **every_two), [4, 5, 6]),
        "twice": (overrides("twice", **rarely), [2, 3]),
        "last": (overrides("last", **rarely), [6]),
        "first": (overrides("first", **rarely, stability__max_skipped=1), [1]),
    }
    return run_ranks(2, WORKER + "spoilt_runs", {"runs": planned})


def test_a_skipped_step_counts_its_samples_and_saves_nothing(
    spoilt: dict[str, str], runs: Path
) -> None:
    run = runs / "once"
    assert spoilt["once"] == "finished"
    recorded = records(run)
    assert [record["stability/skipped_steps"] for record in recorded] == [0, 0, 0, 1, 1, 1]
    assert [record["samples"] for record in recorded] == [8, 16, 24, 32, 40, 48]
    assert [record["optim/grad_norm"] is None for record in recorded] == [False] * 3 + [True] + [
        False
    ] * 2
    assert complete(run) == ["step_00000006", "step_00000002"]


def test_three_in_a_row_stop_the_run_and_name_the_last_good_checkpoint(
    spoilt: dict[str, str], runs: Path
) -> None:
    run = runs / "row"
    assert spoilt["row"] == (
        "error: the gradient norm is not finite at step 6, 3 steps in a row; lower "
        "optimizer.learning_rate or raise schedule.warmup_steps; the run resumes from "
        "step_00000002"
    )
    assert (run / "state").read_text() == "diverged\n"
    assert records(run)[-1]["stability/skipped_steps"] == 3
    assert complete(run) == ["step_00000002"]
    with pytest.raises(UserError, match=r"^run 'row' .* has diverged, .*: resume it with a lower"):
        read_finished_run(run)


def test_skips_that_end_stop_nothing_and_each_is_on_record(
    spoilt: dict[str, str], runs: Path
) -> None:
    assert spoilt["twice"] == spoilt["last"] == "finished"
    assert [record["step"] for record in records(runs / "twice")] == [2, 3, 4, 5, 6]
    assert complete(runs / "twice") == ["step_00000006", "step_00000004"]
    assert records(runs / "last")[-1]["stability/skipped_steps"] == 1
    assert read_finished_run(runs / "last").result.validation_loss is not None


def test_the_limit_is_a_key_and_without_a_checkpoint_the_start_is_named(
    spoilt: dict[str, str], runs: Path
) -> None:
    assert spoilt["first"].startswith(
        "error: the gradient norm is not finite at step 1; lower optimizer.learning"
    )
    assert spoilt["first"].endswith("the run resumes from the start")
    assert complete(runs / "first") == []


def test_an_exploding_update_ruins_no_checkpoint(overrides: Overrides, runs: Path) -> None:
    """A good run, an explosion at the last step, one at a save, and a cure."""
    huge = {"optimizer__learning_rate": 1e9}
    keys = {**ENGINES["zero3-bf16"], "checkpoint__every": 2, "checkpoint__keep_last": 1}
    planned = [
        overrides("exploded", **keys, schedule__steps=4),
        overrides("exploded", **keys, schedule__steps=5, **huge),
        overrides("exploded", **{**keys, "checkpoint__every": 1}, schedule__steps=9, **huge),
        overrides("exploded", **keys, schedule__steps=9),
    ]
    endings = run_ranks(2, TRAIN_ALL, {"runs": planned})
    good, last_step, at_checkpoint, cured = endings
    remedy = (
        "lower optimizer.learning_rate or raise schedule.warmup_steps; the run resumes from "
        "step_00000004"
    )
    assert good == cured == "finished"
    assert last_step == f"error: the validation loss is nan after step 5; {remedy}"
    assert at_checkpoint == f"error: the training loss is nan at step 8, 3 steps in a row; {remedy}"
    run = runs / "exploded"
    assert (run / "state").read_text() == "finished\n"
    assert all(record["loss/train"] is not None for record in records(run))
    assert complete(run) == ["step_00000009"]
    assert (run / "checkpoints/step_00000005/RUINED").is_file()
    segments = json.loads((run / "environment.json").read_text())["segments"]
    assert [segment["first_step"] for segment in segments] == [1, 5, 5, 5]
    assert segments[1]["changes"]["optimizer.learning_rate"] == {"was": 0.003, "is": 1e9}


NEW_VALUES = {
    "learning_rate": 1e-3,
    "weight_decay": 0.5,
    "betas": "[0.5, 0.6]",
    "eps": 0.1,
    "gradient_clip": 0.01,
}
RESUMED = ("zero0-fp32", "zero3-bf16")
"""Engines that a run is resumed with."""
ENGINE_OF = dict(zip(NEW_VALUES, cycle(RESUMED), strict=False))
"""{key: engine}: each engine meets two keys or three."""


@pytest.fixture(scope="module")
def resumed(overrides: Overrides, runs: Path) -> None:
    """From the same checkpoint: as before, and with the keys of the optimizer given anew."""
    bases = [
        overrides(f"resumed-{engine}", **ENGINES[engine], schedule__steps=2) for engine in RESUMED
    ]
    assert run_ranks(2, TRAIN_ALL, {"runs": bases}) == ["finished"] * len(bases)
    planned = []
    for engine, key in [
        *product(RESUMED, ["nothing"]),
        *((e, key) for key, e in ENGINE_OF.items()),
    ]:
        name = f"resumed-{engine}-{key}"
        shutil.copytree(runs / f"resumed-{engine}", runs / name)
        change = {} if key == "nothing" else {f"optimizer__{key}": NEW_VALUES[key]}
        planned.append(overrides(name, **ENGINES[engine], schedule__steps=4, **change))
    assert run_ranks(2, TRAIN_ALL, {"runs": planned}) == ["finished"] * len(planned)


@pytest.mark.usefixtures("resumed")
@pytest.mark.parametrize("key", NEW_VALUES)
def test_a_key_of_the_optimizer_given_anew_takes_effect(key: str, runs: Path) -> None:
    engine = ENGINE_OF[key]
    unchanged, after = (records(runs / f"resumed-{engine}-{name}") for name in ("nothing", key))
    losses = [[record["loss/train"] for record in recorded] for recorded in (unchanged, after)]
    assert losses[0][:3] == losses[1][:3]  # the third is of the weights in the checkpoint
    assert losses[0][3] != losses[1][3]
    segment = json.loads((runs / f"resumed-{engine}-{key}/environment.json").read_text())[
        "segments"
    ][-1]
    assert segment["first_step"] == 3
    assert segment["changes"].keys() == {"schedule.steps", f"optimizer.{key}"}


SPIKES = {38: "norm", 42: "loss alone"}
EARLY = {9: "small norm"}  # before a spike is judged; it widens what is usual
FACTOR = {"stability__spike_factor": 8.0}


@pytest.fixture(scope="module")
def spiked(overrides: Overrides) -> dict[str, str]:
    """{run: state or refusal}, with spikes after the 32 steps that are only watched, and before."""
    judged = {**FACTOR, "checkpoint__every": 40, "schedule__steps": 44}
    planned = {
        "judged": (overrides("judged", **judged), EARLY | SPIKES),
        "again": (overrides("again", **judged), SPIKES),
        "not-judged": (overrides("not-judged"), {3: "norm", 5: "loss alone"}),
        "stops": (
            overrides("stops", **FACTOR, schedule__steps=44),
            dict.fromkeys((38, 39, 40), "loss"),
        ),
    }
    payload = {"runs": planned, "of": "judged", "after": 40}
    return run_ranks(2, WORKER + "spiked_runs", payload)


def test_a_spike_of_loss_or_norm_is_left_out_where_that_was_asked_for(
    spiked: dict[str, str], runs: Path
) -> None:
    assert spiked["judged"] == spiked["not-judged"] == "finished"
    recorded = records(runs / "judged")
    skipped = [record["stability/skipped_steps"] for record in recorded]
    assert skipped == [0] * 37 + [1] * 4 + [2] * 3  # step 9 comes too early to be judged
    assert [record["samples"] for record in recorded] == [8 * step for step in range(1, 45)]
    assert all(record["loss/train"] is not None for record in recorded)
    assert recorded[37]["optim/grad_norm"] > 10 * recorded[36]["optim/grad_norm"]
    assert recorded[41]["loss/train"] > 2 * recorded[40]["loss/train"]
    assert recorded[41]["optim/grad_norm"] < 2 * recorded[40]["optim/grad_norm"]
    kept = [record["stability/skipped_steps"] for record in records(runs / "not-judged")]
    assert kept == [0] * 6


def test_spikes_in_a_row_stop_the_run_in_words(spiked: dict[str, str], runs: Path) -> None:
    assert re.match(
        r"error: the training loss is \S+, more than 8 standard deviations above its mean \S+, at "
        r"step 40, 3 steps in a row; if the data are meant to be so, raise "
        r"stability\.spike_factor; lower optimizer",
        spiked["stops"],
    )
    assert (runs / "stops/state").read_text() == "diverged\n"


def test_what_is_usual_survives_a_resume_exactly(spiked: dict[str, str], runs: Path) -> None:
    """The spike of step 42 is judged by the steps before the checkpoint of step 40, bit for bit."""
    assert spiked["again"] == "finished"
    assert_resumed_exactly(runs / "judged", runs / "again")
