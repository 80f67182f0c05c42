"""compare: reads runs of the run-directory contract, refuses unfair comparisons, reports the rest."""

from __future__ import annotations

import copy
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from pretrain.compare import Comparison, compare_runs
from pretrain.compare_report import comparison_markdown, footnotes, print_comparison, write_comparison
from pretrain.errors import UserError

CONFIG: dict[str, Any] = {
    "run": {"name": "vanilla", "directory": "runs", "seed": 1234},
    "model": {
        "num_layers": 4,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_query_groups": 4,
        "head_dim": 32,
        "ffn_hidden_size": 512,
        "vocab_size": 4000,
        "position_embedding": "learned",
        "rotary_base": 10000,
        "dropout": 0.1,
        "tied_embeddings": True,
    },
    "attention": {"variant": "vanilla", "seed": None, "construction": None},
    "optimizer": {"learning_rate": 1e-3, "betas": [0.9, 0.98]},
    "data": {
        "directory": "data/demo",
        "sequence_length": 128,
        "micro_batch_size": 4,
        "global_batch_size": 16,
        "validate_every": 50,
        "validation_samples": 64,
    },
}


def write_run(root: Path, name: str, perplexity: float | None = 50.0, **changes: Any) -> Path:
    """A finished run as `train` leaves it; a change is named FILE__KEY__KEY."""
    files: dict[str, Any] = {
        "config": copy.deepcopy(CONFIG),
        "environment": {"device": "cpu", "world_size": 4},
        "data": {
            "fingerprint": "f" * 64,
            "directory": "data/demo",
            "sequence_length": 128,
            "train_tokens": 400_000,
            "validation_tokens": {"prose": 6000, "topics": 2000},
            "unigram_perplexity": 200.0,
        },
        "audit": {
            "ranks": [],
            "totals": {
                "model_trainable_parameters": 900_000,
                "model_frozen_parameters": 0,
                "gradient_bytes": 4_000_000,
                "optimizer_state_bytes": 8_000_000,
            },
            "frozen_in_zero": 0,
        },
        "summary": {
            "step": 100,
            "tokens": 204_800,
            "validation": {
                "loss": None if perplexity is None else 3.9,
                "perplexity": perplexity,
                "perplexity_by_source": {"prose": perplexity, "topics": 70.0},
            },
        },
    }
    files["config"]["run"]["name"] = name
    for key, value in changes.items():
        *parents, last = key.split("__")
        place = files
        for parent in parents:
            place = place[parent]
        place[last] = value
    path = root / name
    checkpoint = path / "checkpoints" / "step_00000100"
    (checkpoint / "shard").mkdir(parents=True)
    (checkpoint / "shard" / "weights.pt").write_bytes(bytes(10_000))
    (checkpoint / "COMPLETE").write_bytes(bytes(24))
    (path / "checkpoints" / "latest").write_text("step_00000100\n")
    older = path / "checkpoints" / "step_00000050"
    older.mkdir()
    (older / "weights.pt").write_bytes(bytes(99_999))
    (path / "config.yaml").write_text(yaml.safe_dump(files["config"]))
    for stem in ("environment", "data", "audit", "summary"):
        (path / f"{stem}.json").write_text(json.dumps(files[stem]))
    (path / "state").write_text("finished\n")
    # The first tenth is slow; then 1000 and 2000 alternate around one step of 1500.
    speeds = [10.0] * 10 + [1500.0] + [1000.0] * 44 + [2000.0] * 44 + [None]
    lines = [
        {"step": step, "throughput/tokens_per_second": speed} for step, speed in enumerate(speeds, start=1)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def orthogonal(root: Path, name: str = "orthogonal", **changes: Any) -> Path:
    settings: dict[str, Any] = {
        "config__attention__variant": "orthogonal",
        "config__attention__construction": "qr",
        "audit__totals__model_trainable_parameters": 765_000,
        "audit__totals__model_frozen_parameters": 135_000,
        "audit__totals__gradient_bytes": 3_000_000,
        "audit__totals__optimizer_state_bytes": 6_000_000,
        "perplexity": 52.0,
    }
    settings.update(changes)
    return write_run(root, name, **settings)


@pytest.fixture
def pair(tmp_path: Path) -> Comparison:
    return compare_runs([orthogonal(tmp_path), write_run(tmp_path, "vanilla")], "vanilla")


def test_measures_and_gaps(pair: Comparison) -> None:
    base, other = pair.runs
    assert (base.name, other.name, pair.baseline) == ("vanilla", "orthogonal", "vanilla")
    assert (pair.tokens, pair.sequence_length, pair.unigram_perplexity) == (204_800, 128, 200.0)
    assert (base.validation_perplexity, other.validation_perplexity) == (50.0, 52.0)
    assert other.perplexity_over_unigram == pytest.approx(0.26)
    assert base.tokens_per_second == 1500.0
    assert other.gradient_and_optimizer_bytes == 9_000_000
    assert other.checkpoint_bytes == 10_024
    assert set(base.gaps.values()) == {0.0, None}
    assert other.gaps["validation_perplexity"] == pytest.approx(0.04)
    assert other.gaps["trainable_parameters"] == pytest.approx(-0.15)
    assert other.gaps["gradient_and_optimizer_bytes"] == pytest.approx(-0.25)
    assert other.gaps["frozen_parameters"] is None


def test_report_files(pair: Comparison, tmp_path: Path) -> None:
    json_path, markdown_path = write_comparison(pair, tmp_path / "new" / "out")
    content = json.loads(json_path.read_text())
    assert [run["variant"] for run in content["runs"]] == ["vanilla", "orthogonal"]
    assert content["runs"][1]["gaps"]["validation_perplexity"] == pytest.approx(0.04)
    assert content["runs"][1]["perplexity_by_source"] == {"prose": 52.0, "topics": 70.0}
    markdown = markdown_path.read_text()
    assert "| orthogonal | orthogonal | 52.00 (+4.0 %) | 0.260 | 1,500 | 765,000 (-15.0 %) |" in markdown
    assert "| vanilla | vanilla | 50.00 | 0.250 |" in markdown
    assert "| orthogonal | 52.00 | 70.00 |" in markdown
    assert "reach: 200.00." in markdown
    assert "n = 1 per variant" in markdown and "no statistical significance is claimed" in markdown
    assert sorted(path.name for path in json_path.parent.iterdir()) == ["comparison.json", "comparison.md"]


def printed(comparison: Comparison, width: int) -> str:
    output = io.StringIO()
    print_comparison(comparison, Console(file=output, width=width))
    return output.getvalue()


@pytest.mark.parametrize(("number_of_runs", "width"), [(2, 80), (3, 80), (6, 140)])
def test_table_shows_every_number_whole(tmp_path: Path, number_of_runs: int, width: int) -> None:
    names = ["orthogonal", *(f"other-{number}" for number in range(number_of_runs - 2))]
    paths = [write_run(tmp_path, "vanilla"), *(orthogonal(tmp_path, name) for name in names)]
    text = printed(compare_runs(paths, "vanilla"), width)
    assert max(map(len, text.splitlines())) <= width
    expected = (
        "52.00",
        "(+4.0 %)",
        "765,000",
        "135,000",
        "8.58 MiB",
        "9.79 KiB",
        "1,500",
        "0.260",
        "orthogonal",
    )
    for number in expected:
        assert number in text
    assert "Each run trained on 204,800 tokens" in text and "n = 1" in text


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"data__fingerprint": "0" * 64}, "data fingerprint is f"),
        ({"summary__tokens": 1}, "tokens consumed is 204800 in vanilla but 1 in orthogonal"),
        ({"config__model__num_layers": 6}, "model.num_layers is 4 in vanilla but 6 in orthogonal"),
        ({"config__model__position_embedding": "rope"}, "model.position_embedding is learned"),
        ({"config__data__sequence_length": 256}, "data.sequence_length is 128 in vanilla but 256"),
        ({"config__data__validation_samples": 8}, "data.validation_samples is 64 in vanilla but 8"),
        ({"data__validation_tokens": {"prose": 6000}}, "validation tokens per source is"),
        ({"summary__validation__perplexity_by_source": {"prose": 1.0}}, "validated sources is"),
    ],
)
def test_runs_that_saw_something_else_are_refused(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    paths = [write_run(tmp_path, "vanilla"), orthogonal(tmp_path, **change)]
    with pytest.raises(UserError) as refusal:
        compare_runs(paths, "vanilla")
    assert named in str(refusal.value) and "\n" not in str(refusal.value)


def test_defaults_left_open_are_the_same_shape(tmp_path: Path) -> None:
    open_keys: dict[str, Any] = {
        f"config__model__{key}": None for key in ("num_query_groups", "head_dim", "ffn_hidden_size")
    }
    comparison = compare_runs([write_run(tmp_path, "vanilla"), orthogonal(tmp_path, **open_keys)], "vanilla")
    assert len(comparison.notes) == 1


def test_other_differences_are_told(tmp_path: Path) -> None:
    changed = orthogonal(tmp_path, config__optimizer__learning_rate=3e-4, environment__device="NVIDIA H100")
    comparison = compare_runs([write_run(tmp_path, "vanilla"), changed], "vanilla")
    assert comparison.notes[1:] == (
        "The runs also differ in environment.device: cpu in vanilla, NVIDIA H100 in orthogonal.",
        "The runs also differ in optimizer.learning_rate: 0.001 in vanilla, 0.0003 in orthogonal.",
    )
    assert "optimizer.learning_rate" in comparison_markdown(comparison)
    assert footnotes(comparison)[-2:] == list(comparison.notes[1:])


def test_baseline_is_a_name_or_a_variant(tmp_path: Path) -> None:
    paths = [write_run(tmp_path, "plain"), orthogonal(tmp_path, "ora-1"), orthogonal(tmp_path, "ora-2")]
    assert compare_runs(paths, "ora-2").runs[0].name == "ora-2"
    by_variant = compare_runs(paths, "vanilla")
    assert by_variant.baseline == "plain"
    assert "n = 1 for vanilla, 2 for orthogonal" in by_variant.notes[0]
    with pytest.raises(
        UserError, match="variant of several runs: give the name of one of them: ora-1, ora-2"
    ):
        compare_runs(paths, "orthogonal")
    with pytest.raises(
        UserError, match=r"--baseline none is none of the runs given; present are: plain \(variant vanilla\)"
    ):
        compare_runs(paths, "none")


def test_runs_of_one_name_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / "a", "run"), orthogonal(tmp_path / "b", "run")]
    comparison = compare_runs(paths, "vanilla")
    assert [run.name for run in comparison.runs] == [str(path) for path in paths]


def test_one_run_twice_is_refused(tmp_path: Path) -> None:
    path = write_run(tmp_path, "vanilla")
    with pytest.raises(UserError, match="given twice"):
        compare_runs([path, path / ".." / "vanilla"], "vanilla")


@pytest.mark.parametrize("state", ["running", "continue", "stopped", None])
def test_an_unfinished_run_is_named(tmp_path: Path, state: str | None) -> None:
    unfinished = orthogonal(tmp_path)
    (unfinished / "state").unlink()
    if state is not None:
        (unfinished / "state").write_text(state + "\n")
    with pytest.raises(UserError, match=rf"run 'orthogonal' .* \(its state is '{state or 'unknown'}'\)"):
        compare_runs([write_run(tmp_path, "vanilla"), unfinished], "vanilla")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.yaml", None, "is not a run directory: it has no config.yaml"),
        ("summary.json", None, "summary.json is missing"),
        ("metrics.jsonl", None, "metrics.jsonl is missing"),
        ("audit.json", "{", "audit.json cannot be read"),
        ("audit.json", '{"totals": {}}', "has no key 'totals.model_trainable_parameters'"),
        ("checkpoints/latest", None, "has no complete checkpoint"),
        ("checkpoints/latest", "step_00000050", "has no COMPLETE marker"),
    ],
)
def test_a_damaged_run_is_named(tmp_path: Path, file: str, content: str | None, message: str) -> None:
    path = write_run(tmp_path, "vanilla")
    (path / file).unlink()
    if content is not None:
        (path / file).write_text(content)
    with pytest.raises(UserError, match=message) as refusal:
        compare_runs([path], "vanilla")
    assert str(path) in str(refusal.value)


def test_a_diverged_run_is_shown_without_gap(tmp_path: Path) -> None:
    diverged = orthogonal(tmp_path, perplexity=None)
    comparison = compare_runs([write_run(tmp_path, "vanilla"), diverged], "vanilla")
    assert comparison.runs[1].gaps["validation_perplexity"] is None
    assert "| orthogonal | orthogonal | not finite | not finite |" in comparison_markdown(comparison)
    write_comparison(comparison, tmp_path / "out")


def test_comparing_needs_no_torch() -> None:
    code = "import sys, pretrain.compare_report; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).resolve().parents[2])
