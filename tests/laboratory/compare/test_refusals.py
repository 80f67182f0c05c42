"""compare refuses what cannot be compared or read, in one sentence that names it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from laboratory.compare.compare_runs import compare_runs
from laboratory.runs.finished import read_summary
from pretrain.errors import UserError
from pretrain.runs.directory import RunDirectory
from pretrain.runs.tags import GRADIENT_NORM, LOSS, PERPLEXITY_OF_SOURCE, VALIDATION_LOSS
from tests.fabricated_runs import STEPS, edit_json, write_run


def pair(root: Path, **changes: Any) -> list[Path]:
    """The baseline and another variant's run; `changes` are of that one."""
    return [write_run(root, "vanilla"), write_run(root, "o", "orthogonal", **changes)]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"data.fingerprint": "0" * 64}, "data.fingerprint is ffffffff… in"),
        ({"summary.tokens": 100}, "tokens is 204800 in"),
        ({"config.model.num_layers": 6}, "model.num_layers is 4 in"),
        ({"config.model.head_dim": 64}, "model.head_dim is 32 in"),
        ({"config.model.position_embedding": "learned"}, "model.position_embedding is rope"),
        ({"config.data.sequence_length": 256}, "data.sequence_length is 128 in"),
        ({"config.data.validation_samples": 8}, "data.validation_samples is 64 in"),
        ({"config.data.reset_at_document_end": True}, "data.reset_at_document_end is False in"),
        ({"data.validation_tokens": {"prose": 6000}}, "data.validation_tokens is"),
        ({"summary.validation.perplexity_by_source": {"prose": 1.0}}, "data.validation_sources is"),
    ],
)
def test_runs_that_saw_something_else_are_refused(
    tmp_path: Path, change: dict[str, Any], expected: str
) -> None:
    paths = pair(tmp_path, changes=change)
    with pytest.raises(UserError) as refusal:
        compare_runs(paths, "vanilla")
    name = expected.partition(" is")[0]
    assert expected in str(refusal.value) and "\n" not in str(refusal.value)
    assert f"--subject {name}" in str(refusal.value)


@pytest.mark.parametrize(
    ("subject", "message"),
    [
        ("model.num_layer", "is nothing these runs have; give a config key"),
        ("model.num_layers", "is 4 in every run; leave it out"),
        ("attention.variant", "is not needed: attention settings tell variants apart"),
    ],
)
def test_a_subject_that_is_none_is_refused(tmp_path: Path, subject: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        compare_runs(pair(tmp_path), "vanilla", [subject])


def test_one_seed_twice_is_refused_with_what_differs(tmp_path: Path) -> None:
    rate = {"config.optimizer.learning_rate": 2e-3}
    paths = [write_run(tmp_path, "a"), write_run(tmp_path, "b", changes=rate)]
    said = r"both 'vanilla' with run.seed=1: give one of them, or say --subject optimizer.learn"
    with pytest.raises(UserError, match=said):
        compare_runs(paths, "vanilla")
    with pytest.raises(UserError, match="a run was given twice"):
        compare_runs([paths[0], paths[0] / ".." / "a"], "vanilla")


@pytest.mark.parametrize("state", ["running", "continue", "stopped", None])
def test_an_unfinished_run_is_named(tmp_path: Path, state: str | None) -> None:
    paths = pair(tmp_path)
    (paths[1] / "state").unlink()
    if state is not None:
        (paths[1] / "state").write_text(state + "\n")
    with pytest.raises(UserError, match=rf"run 'o' .* \(its state is '{state or 'unknown'}'\)"):
        compare_runs(paths, "vanilla")


def test_a_run_none_of_whose_losses_is_finite_is_named(tmp_path: Path) -> None:
    null = dict.fromkeys((LOSS.tag, GRADIENT_NORM.tag), [None] * STEPS)
    path = write_run(tmp_path, "vanilla", loss=None, sources={"prose": None}, columns=null)
    with pytest.raises(UserError, match=r"metrics\.jsonl: no loss/train of this run is finite"):
        compare_runs([path], "vanilla")


def _spoil_line(path: Path, number: int, line: str | None) -> None:
    lines = (path / "metrics.jsonl").read_text().splitlines()
    lines[number - 1 : number] = [] if line is None else [line]
    (path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (None, "has no record of step 41, though telemetry.every was 1; restore the file"),
        ('{"step": 41, "tokens": 8, "loss/train": "low"}', 'step 41 has no number "loss/train"'),
        ('{"step": 41, "tokens": 8, "loss/train": NaN}', "line 41: it has NaN, which JSON does"),
        ('{"step": 41, "tokens": 1}', "metrics.jsonl has tokens 1, but by"),
    ],
)
def test_a_line_in_the_middle_that_is_lost_or_damaged_is_named(
    tmp_path: Path, line: str | None, message: str
) -> None:
    path = write_run(tmp_path, "vanilla")
    _spoil_line(path, 41, line)
    with pytest.raises(UserError, match=re.escape(message)):
        compare_runs([path], "vanilla")


def test_records_are_missed_only_where_they_were_made(tmp_path: Path) -> None:
    """Every second step until step 50, then every one; what a start said was missing is not said
    again."""
    was = {"telemetry.every": {"was": 2, "is": 1}}
    segments = [{"first_step": 1, "changes": {}}, {"first_step": 51, "changes": was}]
    path = write_run(tmp_path, "vanilla", changes={"environment.segments": segments})
    for step in range(49, 0, -2):
        _spoil_line(path, step, None)
    for number in (25, 24):  # steps 50 and 48, as if the file had ended before the second start
        _spoil_line(path, number, None)
    compare_runs([path], "vanilla")
    _spoil_line(path, 10, None)
    with pytest.raises(UserError, match=r"has no record of step 20, though telemetry\.every was 2"):
        compare_runs([path], "vanilla")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.yaml", None, "is not a run directory: it has no config.yaml"),
        ("summary.json", None, "summary.json is missing"),
        ("metrics.jsonl", None, "metrics.jsonl is missing"),
        ("metrics.jsonl", "", "metrics.jsonl has no record"),
        ("metrics.jsonl", '{"step": 1}\n', 'step 1 has no integer "tokens"'),
        ("metrics.jsonl", f'{{"step": {1 << 63}}}\n', "line 1 is not a JSON object with an int"),
        ("metrics.jsonl", f'{{"step": 1, "tokens": {1 << 63}}}\n', 'has no integer "tokens"'),
        ("audit.json", "{", "audit.json cannot be read"),
        ("config.yaml", "run: {}\nrun: {}\n", "it has the key .run. twice"),
        ("config.yaml", "run: !!bool x\n", "config.yaml cannot be read"),
        ("config.yaml", "#" * 300_000, "longer than 262,144 characters"),
        ("audit.json", '{"zero_stage": 1, "totals": {}}', "'totals.model_trainable_parameters'"),
    ],
)
def test_a_damaged_run_is_named(
    tmp_path: Path, file: str, content: str | None, message: str
) -> None:
    path = write_run(tmp_path, "vanilla")
    (path / file).unlink()
    if content is not None:
        (path / file).write_text(content)
    with pytest.raises(UserError, match=message) as refusal:
        compare_runs([path], "vanilla")
    assert str(path) in str(refusal.value)


EVERY = "telemetry.every"


@pytest.mark.parametrize(
    ("key", "value", "field", "said"),
    [
        ("audit.zero_stage", None, "zero_stage", "valid integer"),
        ("environment.world_size", 0, "world_size", "greater than or equal to 1"),
        ("environment.started", "today", "started", "time data 'today' does not"),
        ("environment.segments", [{}], "segments.0.first_step", "this version did not write it"),
        (
            "environment.segments",
            [{"first_step": 1, "changes": {EVERY: {"was": "2", "is": 1}}}],
            "segments.0.changes",
            "valid integer",
        ),
        ("data.validation_tokens.prose", 0, "validation_tokens.prose", "greater than"),
        ("summary.validation.loss", "4.0", "validation.loss", "valid number"),
        ("config.attention.adapters", 7, "attention.adapters", "valid list"),
    ],
)
def test_a_value_of_another_type_is_named_with_its_file_and_key(
    tmp_path: Path, key: str, value: object, field: str, said: str
) -> None:
    path = write_run(tmp_path, "vanilla", changes={key: value})
    with pytest.raises(UserError, match=rf"'{re.escape(field)}'.*{said}") as refusal:
        compare_runs([path], "vanilla")
    sentence = str(refusal.value)
    assert sentence.startswith(f"{path}/{key.partition('.')[0]}.") and "\n" not in sentence


def _edit_last(path: Path, **values: Any) -> None:
    lines = (path / "metrics.jsonl").read_text().splitlines()
    lines[-1] = json.dumps(json.loads(lines[-1]) | values)
    (path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))


CONTRADICTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "loss": ({"summary.validation.loss": 3.0}, "summary.json has loss/valid 3.0, but by"),
    "perplexity": ({"summary.validation.perplexity": 2.0}, "has perplexity/valid 2.0"),
    "training loss": ({"summary.loss": 1.0}, "summary.json has loss/train 1.0"),
    "samples": ({"summary.samples": 5}, "summary.json has samples 5"),
    "steps": ({"config.schedule.steps": 500}, "config.yaml has schedule.steps 500"),
    "rate": ({"config.optimizer.learning_rate": 2e-3}, "has optimizer.learning_rate 0.002"),
    "count": ({"audit.totals.gradient_bytes": 8}, "audit.json has totals.gradient_bytes 8"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_files_that_contradict_each_other_are_refused(tmp_path: Path, name: str) -> None:
    changes, said = CONTRADICTIONS[name]
    path = write_run(tmp_path, "vanilla", contradiction=changes)
    with pytest.raises(UserError, match=re.escape(said)) as refusal:
        compare_runs([path], "vanilla")
    assert "\n" not in str(refusal.value) and "restore the run's directory" in str(refusal.value)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"tokens": 900_000}, "summary.json has tokens 204800, but by"),
        ({VALIDATION_LOSS.tag: 1.0}, "summary.json has loss/valid 4.0, but by"),
        ({PERPLEXITY_OF_SOURCE.of("prose"): 2.0}, "has perplexity/valid/prose"),
    ],
)
def test_a_last_record_that_is_not_the_result_is_refused(
    tmp_path: Path, values: dict[str, Any], said: str
) -> None:
    path = write_run(tmp_path, "vanilla")
    _edit_last(path, **values)
    with pytest.raises(UserError, match=re.escape(said)):
        compare_runs([path], "vanilla")
    with pytest.raises(UserError, match=re.escape(said)):  # as a trial reads it
        read_summary(RunDirectory(path))


@pytest.mark.parametrize("lines", [50, 99])
def test_records_that_are_gone_at_the_end_are_missed(tmp_path: Path, lines: int) -> None:
    path = write_run(tmp_path, "vanilla")
    records = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (path / "metrics.jsonl").write_text("".join(records[:lines]) + records[lines][:40])
    with pytest.raises(UserError, match=f"summary.json has step 100, but by .* it is {lines}"):
        compare_runs([path], "vanilla")


def test_a_config_that_is_not_the_checkpoints_is_refused(tmp_path: Path) -> None:
    path = write_run(tmp_path, "vanilla")
    position = {"step": 100, "consumed_tokens": 204_800, "consumed_samples": 1600}
    about = path / "checkpoints/step_00000100/checkpoint.json"
    keys = {"run.seed": 1, "model.num_layers": 4, "model.initial_weights": "a" * 64}
    about.write_text(json.dumps({"keys": keys, "position": position}))
    compare_runs([path], "vanilla")
    edit_json(about, lambda content: content["keys"].update({"run.seed": 2}))
    with pytest.raises(UserError, match=r"config.yaml has run.seed 1, but by .* it is 2"):
        compare_runs([path], "vanilla")
    edit_json(about, lambda content: content.update(keys=keys, position=position | {"step": 99}))
    with pytest.raises(UserError, match=r"checkpoint.json has position.step 99"):
        compare_runs([path], "vanilla")
    edit_json(about, lambda content: content.update(position=position | {"consumed_tokens": 1}))
    with pytest.raises(UserError, match=r"checkpoint.json has position.consumed_tokens 1"):
        compare_runs([path], "vanilla")


def test_a_run_that_had_lost_its_settings_is_refused(tmp_path: Path) -> None:
    segments = [{"first_step": 1, "changes": {}}]
    lost = {"first_step": 51, "changes": {}, "lost": ["audit.json"]}
    path = write_run(tmp_path, "a", changes={"environment.segments": [*segments, lost]})
    compare_runs([path], "vanilla")
    lost["lost"] = ["config.yaml"]
    path = write_run(tmp_path, "b", changes={"environment.segments": [*segments, lost]})
    with pytest.raises(UserError, match=r"had lost its config.yaml when it started at step 51"):
        compare_runs([path], "vanilla")
