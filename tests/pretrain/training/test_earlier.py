"""A run's own records that are damaged or gone when it resumes: refused, or kept aside and told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pretrain.checkpoint.resuming import Start
from pretrain.config.load import load_config
from pretrain.config.resolved import resolve
from pretrain.config.tree import Config
from pretrain.errors import UserError
from pretrain.runs.position import Position
from pretrain.training.earlier import Earlier, read_earlier
from pretrain.training.run_files import write_run_files

RESUMED = Start(position=Position(4, 32, 1024))
SEGMENTS = [{"first_step": 1, "changes": {}, "started": "2026-11-20T10:00:00+0000"}]


def written(tmp_path: Path, *overrides: str) -> Config:
    """The configuration of a run whose files are there."""
    config = load_config("demo", ["run.name=r", f"run.directory={tmp_path}", *overrides])
    run = config.run_directory
    run.path.mkdir(exist_ok=True)
    run.config.write_text(config.to_yaml())
    run.environment.write_text(json.dumps({"segments": SEGMENTS, "deepspeed_config_sha256": None}))
    run.audit.write_text(json.dumps({"phases": [{"phase": 0}]}))
    return config


def test_what_is_whole_is_read_and_from_step_0_nothing(tmp_path: Path) -> None:
    config = written(tmp_path)
    earlier = read_earlier(config.run_directory, RESUMED, fall_back=False)
    assert earlier.settings == config.values and earlier.environment["segments"] == SEGMENTS
    assert earlier.audit == {"phases": [{"phase": 0}]} and earlier.lost == earlier.notes == ()
    config.run_directory.config.write_text("[")
    assert read_earlier(config.run_directory, Start(), fall_back=False) == Earlier()


def test_a_start_that_dies_before_its_record_is_compared_with_the_settings_before(
    tmp_path: Path,
) -> None:
    """Else the next start finds its own settings there, and no change to record."""
    earlier_config = written(tmp_path).run_directory.config.read_text()
    overrides = ["run.name=r", f"run.directory={tmp_path}", "optimizer.learning_rate=0.01"]
    changed = resolve(load_config("demo", overrides), 2)
    with pytest.raises(TypeError):
        write_run_files(changed, RESUMED, {}, environment={"segments": object()}, data={})
    assert changed.directory.config.read_text() == earlier_config


def cut(text: str) -> str:
    return text[: text.index("telemetry:")]


DAMAGES = {
    "cut off at a section": ("config.yaml", cut, "it has lost 'deepspeed'"),
    "a line gone": (
        "config.yaml",
        lambda text: text.replace("  learning_rate:", "  # learning_rate:"),
        "it has lost 'optimizer.learning_rate'",
    ),
    "not YAML": ("config.yaml", lambda text: "{", "config.yaml cannot be read"),
    "no mapping": ("config.yaml", lambda text: "model: 3", "config.yaml: 'model'"),
    "half a file": ("environment.json", lambda text: text[:-9], "environment.json cannot be read"),
    "odd segments": (
        "environment.json",
        lambda text: text.replace('"first_step": 1', '"first_step": -1'),
        "'segments.0.first_step'",
    ),
    "a key twice": (
        "environment.json",
        lambda text: text[:-1] + ', "segments": []}',
        "it has the key 'segments' twice",
    ),
    "odd phases": ("audit.json", lambda text: '{"phases": [{}]}', "audit.json has no key"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_is_refused_or_kept_aside_and_told(damage: str, tmp_path: Path) -> None:
    name, spoil, said = DAMAGES[damage]
    config = written(tmp_path)
    file = config.run_path / name
    file.write_text(spoil(file.read_text()))
    content = file.read_text()
    with pytest.raises(UserError) as refusal:
        read_earlier(config.run_directory, RESUMED, fall_back=False)
    sentence = str(refusal.value)
    assert sentence.startswith(str(file)) and said in sentence and "\n" not in sentence
    assert "restore it, or set checkpoint.fall_back=true" in sentence
    assert file.read_text() == content

    earlier = read_earlier(config.run_directory, RESUMED, fall_back=True)
    assert earlier.lost == (name,) and not file.exists()
    assert file.with_name(f"{name}.damaged").read_text() == content
    aside, unknown = earlier.notes
    assert aside.startswith(f"kept aside as {name}.damaged: ") and said in aside
    assert unknown.endswith("is not known from before step 5")


def test_a_missing_record_is_told(tmp_path: Path) -> None:
    config = written(tmp_path)
    config.run_directory.config.unlink()
    earlier = read_earlier(config.run_directory, RESUMED, fall_back=False)
    assert earlier.lost == ("config.yaml",) and earlier.settings == {}
    (note,) = earlier.notes
    assert note == (
        f"{config.run_directory.config} is missing: which settings it had is not known "
        "from before step 5"
    )
