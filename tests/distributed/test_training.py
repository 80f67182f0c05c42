"""Short real runs of every kind, and what is true of the model whatever it learns."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from laboratory.compare.compare_runs import compare_runs
from laboratory.compare.theory import expected_cost
from laboratory.runs.finished import read_finished_run
from pretrain.runs.metrics_file import read_metrics
from pretrain.runs.tags import METRICS, PERPLEXITY_OF_SOURCE, When
from tests.command_line import logged_steps
from tests.fabricated_runs import write_run
from tests.pretrain.telemetry.records import read_scalars, tags_of
from tests.ranks import run_ranks
from tests.tiny import tiny_overrides

VARIED = {  # each trains 2 steps on one rank; every kind of attention does in test_designs.py
    "learned positions": {"model__position_embedding": "learned"},
    "rope": {"model__position_embedding": "rope"},
    "learned positions in bf16": {
        "model__position_embedding": "learned",
        "precision__dtype": "bf16",
    },
    "grouped queries": {"model__num_query_groups": 2},
    "grouped queries, vanilla": {"model__num_query_groups": 2, "attention__variant": "vanilla"},
    "untied embeddings": {"model__tied_embeddings": "false"},
    "construction svd": {"attention__construction": "svd"},
    "no clipping": {"optimizer__gradient_clip": 0.0},
    "dropout in bf16, ZeRO-3": {
        "model__dropout": 0.2,
        "precision__dtype": "bf16",
        "deepspeed__config": "zero3",
    },
}
FULL = {  # 3 steps with everything that leaves something on disk
    "schedule__steps": 3,
    "data__validate_every": 2,
    "checkpoint__every": 1,
    "checkpoint__keep_last": 1,
}
TOKENS_PER_STEP = 8 * 32
SPARSE = {"schedule__steps": 5, "telemetry__every": 2}
BY_TOKENS = {"schedule__steps": "null", "schedule__tokens": 2 * TOKENS_PER_STEP + 1}
SOURCES = ("PydocTopics", "StdlibComments", "StdlibDocstrings")
ALWAYS = tags_of(When.ALWAYS)
VALIDATED = tags_of(When.VALIDATED) | {PERPLEXITY_OF_SOURCE.of(source) for source in SOURCES}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("training")


@pytest.fixture(scope="module")
def single(tiny_shards: Path, runs: Path) -> dict[str, Any]:
    """What one rank answers; the run directories are under `runs`."""

    def overrides(name: str, **changes: object) -> list[str]:
        return tiny_overrides(
            tiny_shards,
            runs,
            name.replace(" ", "_"),
            **{"schedule__steps": 2, "schedule__warmup_steps": 1, **changes},
        )

    quiet = {"telemetry__tensorboard": "false"}
    planned = {name: overrides(name, **quiet, **changes) for name, changes in VARIED.items()}
    planned["full"] = overrides("full", **FULL)
    planned["sparse"] = overrides("sparse", **SPARSE)
    planned["by tokens"] = overrides("by tokens", **quiet, **BY_TOKENS)
    planned["full again"] = overrides("full", **FULL)
    planned["under a file"] = overrides(
        "under a file", run__directory=tiny_shards / "manifest.json"
    )
    model = overrides("model", model__hidden_size=256, model__position_embedding="learned")
    payload = {"runs": planned, "model": model}
    return run_ranks(1, "tests.distributed.workers.training:runs_and_models", payload)


def records(run: Path) -> list[dict[str, Any]]:
    return list(read_metrics(run / "metrics.jsonl"))


@pytest.mark.parametrize("name", VARIED)
def test_every_kind_of_run_finishes_with_finite_numbers(
    single: dict[str, Any], runs: Path, name: str
) -> None:
    assert single["runs"][name] == "finished"
    last = records(runs / name.replace(" ", "_"))
    assert [record["step"] for record in last] == [1, 2]
    assert all(math.isfinite(value) for record in last for value in record.values())
    assert last[0]["loss/train"] != last[1]["loss/train"]
    assert 0.8 * math.log(512) < last[1]["loss/valid"] < 1.2 * math.log(512)


def test_no_option_is_read_and_then_ignored(single: dict[str, Any], runs: Path) -> None:
    """Losses after one update differ from kind to kind.

    Without clipping not, for the gradients are small.
    """
    losses = {name: records(runs / name.replace(" ", "_"))[1]["loss/train"] for name in VARIED}
    assert losses.pop("no clipping") == losses["rope"]
    assert len(set(losses.values())) == len(losses), losses


def test_tags_are_exactly_those_of_a_cpu_run_on_disk_and_in_tensorboard(
    single: dict[str, Any], runs: Path
) -> None:
    assert single["runs"]["full"] == "finished"
    tags = [set(record) - {"step", "tokens", "samples"} for record in records(runs / "full")]
    # The second save waited for the first, the run for the last.
    saved = tags_of(When.SAVED, When.WRITTEN)
    assert tags[0] - tags_of(When.WRITTEN) == ALWAYS | tags_of(When.SAVED)
    assert tags[1:] == [ALWAYS | saved | VALIDATED] * 2
    events = EventAccumulator(str(runs / "full/tensorboard")).Reload()
    scalars = {tag for tag in events.Tags()["scalars"] if not tag.startswith("_hparams_")}
    results = {tag for tag in scalars if tag.startswith("summary/")}
    assert len(results) == 9  # of a run on CUDA 10, with the device's peak
    sizes = {
        metric.charted for metric in METRICS if metric.unit == "bytes" and metric.tag in tags[-1]
    }
    assert len(sizes) > 1 and scalars - results == ALWAYS | saved | VALIDATED | sizes


@pytest.mark.parametrize("name", VARIED)
def test_the_formulas_count_what_the_engine_held(
    single: dict[str, Any], runs: Path, name: str
) -> None:
    run = read_finished_run(runs / name.replace(" ", "_"))
    theory = expected_cost(run)
    assert theory.size == run.size
    for part in ("weight", "frozen", "gradient", "optimizer_state"):
        assert getattr(theory.states, f"{part}_bytes") == getattr(run.states, f"{part}_bytes"), part
    # Headers, names, the run's identity.
    headers = run.states.checkpoint_bytes - theory.states.checkpoint_bytes
    assert 0 < headers < 40_000


def test_written_run_files_have_the_form_of_real_ones(
    single: dict[str, Any], runs: Path, tmp_path: Path
) -> None:
    """What the tests of `compare` write is what `train` leaves."""
    real = runs / "full"
    written = write_run(tmp_path, "written", "orthogonal")
    assert len(compare_runs([real], "full").runs) == 1
    config, other = (yaml.safe_load((path / "config.yaml").read_text()) for path in (real, written))
    assert {key: list(section) for key, section in other.items()} == {
        key: list(section) for key, section in config.items()
    }
    for stem in ("environment", "data", "audit", "summary"):
        expected, fabricated = (
            json.loads((path / f"{stem}.json").read_text()) for path in (real, written)
        )
        assert (
            fabricated.keys() <= expected.keys()
            if stem == "environment"
            else fabricated.keys() == expected.keys()
        )
    assert fabricated["validation"].keys() == expected["validation"].keys()
    totals = [
        json.loads((path / "audit.json").read_text())["totals"].keys() for path in (real, written)
    ]
    assert totals[0] == totals[1]
    plain = records(real)[0].keys() - tags_of(When.SAVED, When.WRITTEN)
    assert list(records(written)[0]) == [key for key in records(real)[0] if key in plain]


def test_keep_last_keeps_one_and_training_a_finished_run_again_changes_nothing(
    single: dict[str, Any], runs: Path
) -> None:
    assert single["runs"]["full again"] == "finished"
    checkpoints = runs / "full/checkpoints"
    assert [path.name for path in checkpoints.iterdir() if path.is_dir()] == ["step_00000003"]
    assert (checkpoints / "step_00000003/COMPLETE").is_file()
    assert (checkpoints / "latest").read_text() == "step_00000003\n"  # the worker had spoilt it
    assert logged_steps(runs / "full") == [1, 2, 3]
    for tag, values in read_scalars(runs / "full").items():
        steps = [step for step, _ in values]
        assert len({*steps}) == len(steps), tag
    summary = json.loads((runs / "full/summary.json").read_text())
    assert (summary["step"], summary["samples"], summary["tokens"]) == (3, 24, 3 * TOKENS_PER_STEP)
    assert summary["validation"]["loss"] == records(runs / "full")[-1]["loss/valid"]


def test_sparse_telemetry_writes_every_second_step_and_the_last(
    single: dict[str, Any], runs: Path
) -> None:
    assert single["runs"]["sparse"] == "finished"
    assert logged_steps(runs / "sparse") == [2, 4, 5]
    assert [record["tokens"] for record in records(runs / "sparse")] == [
        k * TOKENS_PER_STEP for k in (2, 4, 5)
    ]


def test_a_schedule_in_tokens_is_rounded_up_to_whole_steps(
    single: dict[str, Any], runs: Path
) -> None:
    assert single["runs"]["by tokens"] == "finished"
    assert logged_steps(runs / "by_tokens") == [1, 2, 3]


def test_an_impossible_place_is_one_sentence(single: dict[str, Any]) -> None:
    error = single["runs"]["under a file"]
    assert (
        error.startswith("error: ") and "manifest.json" in error and "check run.directory" in error
    )


def test_scores_at_init_have_unit_scale(single: dict[str, Any]) -> None:
    """Orthonormal and Gaussian rows."""
    for name, sd in single["models"]["score_sd"].items():
        assert sd == pytest.approx(1.0, rel=0.1), name


@pytest.mark.parametrize("groups", [4, 2])
def test_frozen_and_trainable_models_with_equal_weights_agree(
    single: dict[str, Any], groups: int
) -> None:
    report = single["models"]["equal_weights"][str(groups)]
    assert report["loss"] < 1e-6
    assert report["gradient"] < 1e-6
    # Embeddings; V, output, MLP and norms of 2 layers; last norm.
    assert report["shared_gradients"] == 2 + 2 * 8 + 2


@pytest.mark.parametrize("groups", [4, 2])
def test_freezing_saves_exactly_the_weight_gradients_of_query_and_key(
    single: dict[str, Any], groups: int
) -> None:
    """4 L d² FLOPs a token for ordinary multi-head attention; 2 L d (H + G) head_dim in general."""
    flops = single["models"]["flops"][str(groups)]
    layers, hidden, heads, head_dim = 2, 256, 4, 64
    saved = 2 * layers * hidden * (heads + groups) * head_dim * single["models"]["tokens"]
    assert flops["vanilla"] - flops["orthogonal"] == saved
    assert flops["orthogonal_trainable"] == flops["vanilla"]
    if groups == heads:
        assert saved == 4 * layers * hidden**2 * single["models"]["tokens"]
