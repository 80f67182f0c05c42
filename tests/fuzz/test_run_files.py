"""Records, checkpoints, locks, and what `compare` reads, after damage."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from laboratory.compare.compare_runs import compare_runs
from laboratory.compare.report import as_json, report_page
from pretrain.checkpoint.listing import list_checkpoints, verified
from pretrain.checkpoint.loading import StoredCheckpoint
from pretrain.checkpoint.verify import verify
from pretrain.runs.directory import RunDirectory
from pretrain.runs.metrics_file import cut_back, last_record, read_metrics
from pretrain.runs.position import Position
from tests.fabricated_checkpoints import ROWS, about, write_two_ranks
from tests.fabricated_runs import write_run
from tests.fuzz.damage import (
    NO_OBJECTS,
    REFUSED,
    as_lines,
    damaged,
    damaged_json,
    holding,
    odd_json,
    odd_lines,
    right_or_refused,
)

RECORDS = [{"step": step, "tokens": 8 * step, "loss/train": 4.0 / step} for step in range(1, 9)]
METRICS = as_lines(RECORDS)


@given(st.one_of(damaged(METRICS), odd_lines(RECORDS), st.binary(max_size=200)), st.integers(0, 12))
@example(b"[" * 100_000 + b"\n", 3)
@example(b'{"step": true}\n', 3)
@example(b'{"step": 1, "x": ' + b"9" * 5000 + b"}\n", 3)
def test_metrics(folder: Path, content: bytes, resume_step: int) -> None:
    path = folder / "metrics.jsonl"
    path.write_bytes(content)
    records = right_or_refused(lambda: list(read_metrics(path)))
    if records != REFUSED:
        assert len(records) == content.count(b"\n")
        steps = [record["step"] for record in records]
        assert all(type(step) is int and step > 0 for step in steps)
        assert all(first < second for first, second in pairwise(steps))
        # As text: NaN is not itself.
        assert str(last_record(path)) == str(records[-1] if records else {})
    kept = right_or_refused(lambda: cut_back(path, resume_step, keep=3))
    left = path.read_bytes()
    assert left == content if kept == REFUSED else content.startswith(left)
    if kept != REFUSED:
        assert all(record["step"] <= resume_step for record in read_metrics(path))
        if records != REFUSED:
            remaining = [record for record in records if record["step"] <= resume_step]
            assert str([*read_metrics(path)]) == str(remaining)
            assert str([*kept]) == str(remaining[-3:])


@pytest.fixture(scope="module")
def whole_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint by two ranks, of one parameter in two blocks."""
    path = tmp_path_factory.mktemp("whole") / "run" / "checkpoints" / "step_00000004"
    layout = {
        "world_size": 2,
        "tensor_model_parallel_size": 2,
        "data_parallel_size": 1,
        "zero_stage": 1,
    }
    write_two_ranks(path, about(Position(4, 32, 1024), keys={"run.seed": 1}, layout=layout))
    return path


def read_everything(path: Path) -> dict[str, Any]:
    stored = StoredCheckpoint(path)
    tensors = {
        f"{kind}/{name}": stored.full(kind, name).tolist()
        for name, parameter in stored.parameters.items()
        for kind in parameter.kinds
    }
    part = stored.elements("master", "weight", block=ROWS[1], start=3, length=9)
    return {
        "about": stored.about,
        "parameters": stored.parameters,
        "tensors": tensors,
        "part": part.tolist(),
    }


@given(st.data())
@pytest.mark.parametrize("by_hash", [True, False])
def test_checkpoints(
    whole_checkpoint: Path, folder: Path, by_hash: bool, data: st.DataObject
) -> None:
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    path = run / "checkpoints" / whole_checkpoint.name
    shutil.copytree(whole_checkpoint, path)
    file = path / data.draw(
        st.sampled_from(sorted(checkpoint_file.name for checkpoint_file in path.iterdir()))
    )
    content = file.read_bytes()
    if file.suffix == ".safetensors":
        changed = data.draw(damaged(content))
    else:
        changed = data.draw(damaged_json(content))
    file.write_bytes(changed)
    expected = read_everything(whole_checkpoint)

    def resume() -> dict[str, Any]:
        verify(path, by_hash)
        return read_everything(path)

    resumed = right_or_refused(resume)
    if by_hash and resumed != REFUSED:
        assert resumed == expected
    listed = right_or_refused(
        lambda: [verified(checkpoint, print) for checkpoint in list_checkpoints(run)]
    )
    assert listed != REFUSED
    (entry,) = listed
    if resumed == REFUSED and by_hash:
        assert not entry.counts
    json.dumps(entry.as_json(0.0))


@given(st.data())
def test_what_the_run_directory_says(folder: Path, data: st.DataObject) -> None:
    run = RunDirectory(folder / "words")
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    for file, valid in ((run.latest, b"step_00000004\n"), (run.state_file, b"finished\n")):
        odd = st.sampled_from([b"\x80", b"", b"\xff\xfe\x00", b"[" * 100_000])
        file.write_bytes(data.draw(st.one_of(damaged(valid), st.binary(max_size=30), odd)))
    latest = right_or_refused(run.named_latest)
    assert latest == REFUSED or latest is None or latest.parent == run.checkpoints
    assert isinstance(run.state(), str)


def cut(content: bytes) -> st.SearchStrategy[bytes]:
    return st.integers(0, len(content)).map(lambda end: content[:end])


RUN_FILES = (
    "environment.json",
    "data.json",
    "audit.json",
    "summary.json",
    "config.yaml",
    "metrics.jsonl",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two comparable runs."""
    root = tmp_path_factory.mktemp("runs")
    was = {"telemetry.every": {"was": 1, "is": 1}}
    began = {"started": "2026-11-20T10:00:00+0000", "host": "h", "git_commit": "a" * 40}
    segments = [
        began | {"first_step": 1, "changes": {}},
        began | {"first_step": 51, "changes": was},
    ]
    facts = {f"environment.{key}": value for key, value in began.items()} | {
        "environment.segments": segments,
        "environment.packages": {"torch": "2.13.0"},
    }
    write_run(root, "baseline")
    write_run(root, "other", "orthogonal", changes=facts)
    return root


@given(st.data())
def test_runs_that_are_compared(runs: Path, data: st.DataObject) -> None:
    file = runs / "other" / data.draw(st.sampled_from(RUN_FILES))
    content = file.read_bytes()
    odd = odd_contents(file, content)
    changed = data.draw(
        st.one_of([cut(content), odd, odd, st.sampled_from(NO_OBJECTS), st.binary(max_size=60)])
    )
    match = data.draw(st.sampled_from(["tokens", "flops", "seconds"]))

    def compare() -> str:
        both = [file.parent.with_name("baseline"), file.parent]
        comparison = compare_runs(both, "vanilla", match=match)
        json.dumps(as_json(comparison))
        return "".join(map(str, report_page(comparison, [])))

    with holding(file, changed):
        right_or_refused(compare)


def odd_contents(file: Path, content: bytes) -> st.SearchStrategy[bytes]:
    """Values of another type, or near the right one, at any place of a run's file."""
    if file.suffix == ".jsonl":
        earlier, _, last = content[:-1].rpartition(b"\n")
        records = [json.loads(last)]
        lists = odd_json(records).filter(lambda odd: isinstance(odd, list))
        return lists.map(lambda odd: earlier + b"\n" + as_lines(odd))
    if file.suffix == ".yaml":
        return odd_json(yaml.safe_load(content)).map(
            lambda odd: yaml.dump(odd, allow_unicode=False).encode()
        )
    return odd_json(json.loads(content)).map(lambda odd: json.dumps(odd).encode())
