"""evaluate tasks: what a user can do wrong, each one sentence; no hub, no extra, code of others."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.errors import DataError
from laboratory.evaluation.verbs import tasks
from pretrain.errors import UserError
from tests.laboratory.evaluation.tiny_models import own_cache, write_model, write_tasks
from tests.tiny_exports import export_facts

pytestmark = pytest.mark.slow

pytest.importorskip("lm_eval")


def fake_model(path: Path) -> Path:
    """A directory that looks like an export, and that nothing can load."""
    path.mkdir()
    (path / "export.json").write_text(json.dumps(export_facts(path.name, "vanilla", 1)))
    (path / "config.json").write_text("{}")
    (path / "tokenizer.json").write_text("{}")
    (path / "model.safetensors").touch()
    return path


@pytest.fixture(scope="module")
def models_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An export and the task files."""
    directory = tmp_path_factory.mktemp("tasks")
    write_model(directory / "model", "vanilla", 1)
    write_tasks(directory / "files", 4)
    with own_cache(directory / "cache"):
        yield directory


def refused(match: str, *arguments: Any, **options: Any) -> None:
    with pytest.raises((UserError, DataError), match=match):
        tasks(*arguments, **options)


@pytest.mark.distributed
def test_models_are_refused_before_they_are_loaded(models_root: Path, tmp_path: Path) -> None:
    model = fake_model(tmp_path / "model")
    again = fake_model(tmp_path / "again")
    files = {"include_path": models_root / "files", "out": tmp_path / "out"}
    refused("--tasks names no task", [model], " , ")
    refused("given twice", [model, model], "choice", **files)
    refused("neither a run directory nor an export", [tmp_path], "choice", **files)
    refused("--baseline base is none .* 'vanilla'", [model], "choice", baseline="base", **files)
    refused("both 'vanilla' with run.seed=1: give one of", [model, again], "choice", **files)
    refused("--step 3: .* is an export", [model], "choice", step=3, **files)
    (again / "modeling.py").write_text("raise SystemExit(3)\n")
    refused("modeling.py: read it, then give --trust-code", [again], "choice", **files)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text("run: {name: a}\n")
    refused("no complete checkpoint", [tmp_path / "run"], "choice", **files)
    refused(
        "--include-path .* is not a directory", [model], "choice", include_path=tmp_path / "none"
    )


@pytest.mark.distributed
def test_unknown_tasks_are_named_with_what_was_meant(models_root: Path) -> None:
    said = r"no task, group or tag arc_eazy \(did you mean arc_easy"
    refused(said, [models_root / "model"], "choice,arc_eazy", include_path=models_root / "files")


@pytest.mark.distributed
def test_what_a_task_does_wrong_is_one_sentence(models_root: Path, tmp_path: Path) -> None:
    files = write_tasks(tmp_path / "files", 4)
    text = (files / "choice.yaml").read_text()
    (files / "choice.yaml").write_text(text.replace("choice.jsonl", "nowhere.jsonl"))
    options = {"include_path": files, "out": tmp_path / "out"}
    refused(
        "--tasks choice cannot be loaded: .*nowhere", [models_root / "model"], "choice", **options
    )
    (files / "choice.yaml").write_text(text + "process_results: !function own.fail\n")
    (files / "own.py").write_text("def fail(doc, results):\n    raise KeyError('no such\\nkey')\n")
    said = "--tasks choice failed in the harness: .*no such.*key"
    refused(said, [models_root / "model"], "choice", **options)
    assert not list(tmp_path.glob("out/results/*/results.json"))
    (files / "choice.yaml").write_text(text + "unsafe_code: true\n")
    refused("choice which is marked as unsafe", [models_root / "model"], "choice", **options)


@pytest.mark.distributed
@pytest.mark.parametrize("module", ["lm_eval.evaluator", "sacrebleu"])
def test_a_missing_extra_is_named_before_a_run_is_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "config.yaml").write_text("run: {name: a}\n")  # a run, without a checkpoint
    refused(r"pip install .*'\.\[eval\]'", [tmp_path], "choice")
