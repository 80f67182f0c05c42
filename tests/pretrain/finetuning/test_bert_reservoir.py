"""evaluate bert-reservoir on a tiny BERT: what is put in, what stays frozen, pairs, resuming, refusals."""

from __future__ import annotations

import gc
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pretrain.__main__ import main
from tests.pretrain.finetuning.tiny_bert import HIDDEN, make_tiny_bert

pytestmark = pytest.mark.distributed


@pytest.fixture(autouse=True, scope="module")
def collected_once() -> Iterator[None]:
    """accelerate collects garbage after each training, which takes a second among all that pytest holds."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    room = tmp_path_factory.mktemp("reservoir")
    make_tiny_bert(room)
    return room


def evaluate(monkeypatch: pytest.MonkeyPatch, room: Path, *options: str, **changes: Any) -> None:
    """The real command, in this process."""
    given = {
        "model": room / "bert",
        "train": room / "train.tsv",
        "validation": room / "validation.tsv",
        "out": room / "out",
        "seeds": 2,
        "epochs": 5,
        "batch_size": 8,
        "learning_rate": 0.01,
        "max_length": 16,
        **changes,
    }
    words = [word for key, value in given.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    monkeypatch.setattr(sys, "argv", ["pretrain", "evaluate", "bert-reservoir", *words, *options])
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise


RESUMED = ("orthonormal-layers-1-seed-2", "unfrozen-seed-1", "frozen-layers-1-seed-1")


def test_all_conditions_end_to_end(room: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    evaluate(monkeypatch, room, "--layers", "1", "--layers", "0%-50%")
    report = json.loads((room / "out/report.json").read_text())
    runs = {(run["arm"], run["seed"]): run for run in report["runs"]}
    assert len(runs) == len(report["runs"]) == 2 * (1 + 2 * 4)
    everything = runs["unfrozen", 1]["trainable_parameters"]
    for (arm, seed), run in runs.items():
        proof, frozen = run["proof"], arm != "unfrozen"
        assert proof["frozen_bits_equal"] and proof["pooler_changed"] and proof["classifier_changed"]
        assert proof["frozen_entries"] == (2 * (HIDDEN * HIDDEN + HIDDEN) if frozen else 0)
        assert run["trainable_parameters"] == everything - proof["frozen_entries"]
        assert run["items"] == 16 and run["made_anew"] == [
            f"{name}.{part}" for name in ("bert.pooler.dense", "classifier") for part in ("bias", "weight")
        ]
        trained = {f"bert.encoder.layer.{layer}.attention.self.query.weight" for layer in (0, 1)}
        assert not trained & set(proof["unchanged_tensors"])
        if arm == "orthonormal, layers 1":
            assert [max(part["errors"]) < 1e-6 for part in run["replaced"]] == [True, True]
            other = runs["orthonormal, layers 1", 3 - seed]  # another bank for another seed
            assert run["replaced"][0]["digest"] != other["replaced"][0]["digest"]
    assert max(run["score"] for run in runs.values()) > 0.8, "nothing was learned"
    assert {len(c["gap"]["seeds"]) for c in report["comparisons"]} == {2}
    text = (room / "out/report.md").read_text()
    assert "significance is not claimed" in text
    assert "| orthonormal, layers 0%-50% | frozen, layers 0%-50% | 2 of fine-tuning |" in text
    _resumes(room, monkeypatch, capsys)


def _resumes(room: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """What is missing, was cut off, or is of other settings is made again, with the same bits."""
    report = json.loads((room / "out/report.json").read_text())
    trials = room / "out/trials"
    gone, cut, other = (trials / f"{name}.json" for name in RESUMED)
    gone.unlink()
    cut.write_text(cut.read_text()[:40])
    other.write_text(other.read_text().replace('"norm": "unit"', '"norm": "match"'))
    times = {path: path.stat().st_mtime_ns for path in trials.iterdir()}
    evaluate(monkeypatch, room, "--layers", "1", "--layers", "0%-50%")
    changed = {path for path in trials.iterdir() if path.stat().st_mtime_ns != times.get(path)}
    assert changed == {gone, cut, other}
    assert _lasting(json.loads((room / "out/report.json").read_text())) == _lasting(report)


def _lasting(report: dict[str, Any]) -> dict[str, Any]:
    measured = ("seconds", "kept")
    runs = [{key: value for key, value in run.items() if key not in measured} for run in report["runs"]]
    return {**report, "runs": runs}


def _without(*names: str) -> Callable[[Path], None]:
    return lambda model: [(model / name).unlink(missing_ok=True) for name in names] and None


def _config(**changes: Any) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        path = model / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


DAMAGED = {
    "another kind of model": (_config(model_type="gpt2"), "of type 'gpt2', not 'bert'"),
    "no configuration": (_without("config.json"), "config.json or tokenizer cannot be read"),
    "no weights": (
        _without("model.safetensors"),
        "weights cannot be read: Error no file named model",
    ),
    "weights cut off": (lambda model: (model / "model.safetensors").write_bytes(b"{}"), "cannot be read"),
    "no tokenizer": (_without("tokenizer.json"), "has no tokenizer: none of tokenizer.json"),
    "another model's tokenizer": (_config(vocab_size=7), "its tokenizer has"),
    "fewer layers in the weights": (_config(num_hidden_layers=3), "lacks bert.encoder.layer.2"),
    "few positions": (_config(max_position_embeddings=12), "--max-length 16 is more than the 12 positions"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_directory_that_cannot_serve_is_refused(
    room: Path, tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    shutil.copytree(room / "bert", tmp_path / "bert")
    change, message = DAMAGED[damage]
    change(tmp_path / "bert")
    _assert_refused(message, monkeypatch, capsys, room, model=tmp_path / "bert", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no directory": ({"model": "nowhere"}, "nowhere is not a directory; download one"),
    "layers": ({"layers": "1-2"}, "layers '1-2' do not exist: the model has layers 0 to 1"),
    "condition": ({"conditions": "frozen,orthonormol"}, "there is no 'orthonormol'; there are unfrozen"),
    "examples": ({"train": "nowhere.tsv"}, "nowhere.tsv"),
    "a rate that moves nothing": ({"learning_rate": 0}, "raise --learning-rate"),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_mistakes_are_refused_with_one_sentence(
    room: Path, tmp_path: Path, mistake: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    changes, message = REFUSED[mistake]
    _assert_refused(message, monkeypatch, capsys, room, **{"out": tmp_path / "out", **changes})


def test_a_package_that_is_missing_is_named(room: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    _assert_refused("pip install 'ora-pretrain[eval]'", monkeypatch, capsys, room, out=room / "never")
    assert not (room / "never").exists()


def _assert_refused(
    message: str, monkeypatch: pytest.MonkeyPatch, capsys: Any, room: Path, **changes: Any
) -> None:
    with pytest.raises(SystemExit) as end:
        evaluate(monkeypatch, room, **changes)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert end.value.code == 2 and len(said) == 1 and message in said[0]
