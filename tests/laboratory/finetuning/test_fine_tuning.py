"""`evaluate glue` on tiny exports: groups, the whole command, what is refused."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

pytest.importorskip("accelerate")

from laboratory.finetuning.models import Pretrained, group_models, open_pretrained
from laboratory.finetuning.verbs import glue
from pretrain.errors import UserError
from tests.command_line import assert_refused
from tests.ranks import warm_cli
from tests.tiny_exports import tiny_export

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def exports(tiny_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("fine-tuned")
    for seed in (1, 2):
        tiny_export(directory / f"vanilla-{seed}", tiny_shards, "vanilla", seed=seed, frozen=False)
        tiny_export(directory / f"orthogonal-{seed}", tiny_shards, "orthogonal", seed=seed)
    data = directory / "data/sst2"
    data.mkdir(parents=True)
    for name, count in (("train", 48), ("validation", 24)):
        rows = [
            {"sentence": f"a {'good' if i % 2 else 'bad'} film {i}", "label": i % 2}
            for i in range(count)
        ]
        (data / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return directory


def group_names(models: list[Pretrained]) -> list[str]:
    groups = group_models(models)
    return [groups.name_of(model) for model in models]


def test_models_are_grouped_by_method_and_settings(exports: Path, tmp_path: Path) -> None:
    names = ("vanilla-1", "vanilla-2", "orthogonal-1")
    models = [open_pretrained(exports / name, False) for name in names]
    assert group_names(models) == ["vanilla", "vanilla", "orthogonal"]
    assert group_models(models).baseline == "vanilla"
    for baseline in ("orthogonal", "orthogonal-1"):
        assert group_models(models, baseline).baseline == "orthogonal"
    other = tmp_path / "longer"
    shutil.copytree(exports / "orthogonal-2", other)
    facts = json.loads((other / "export.json").read_text()) | {"step": 9}
    (other / "export.json").write_text(json.dumps(facts))
    found = group_names([*models, open_pretrained(other, False)])
    assert found[2:] == ["orthogonal (step=4)", "orthogonal (step=9)"]
    (other / "export.json").unlink()  # somebody else's
    foreign = open_pretrained(other, False)
    assert group_names([foreign]) == ["longer"]
    assert foreign.frozen_rows == {} and foreign.seed is None


def test_the_command_writes_a_report_and_goes_on_from_what_is_there(
    exports: Path, tmp_path: Path
) -> None:
    """A second command trains the seed that is new, and only that."""
    names = ("vanilla-1", "vanilla-2", "orthogonal-1", "orthogonal-2")
    out = tmp_path / "out"
    command = ["evaluate", "glue", *(str(exports / name) for name in names)]
    command += [f"--data={exports / 'data'}", f"--out={out}"]
    command += ["--tasks=sst2", "--epochs=1", "--learning-rate=3e-3"]
    done = warm_cli([*command, "--seeds", "1"])
    assert done.returncode == 0, done.stderr
    assert f"written: {out / 'report.md'}" in done.stdout and "orthogonal, sst2" in done.stdout
    lines = done.stderr.splitlines()
    assert lines[0] == "1/4: vanilla-1-sst2-1" and all("-sst2-" in line for line in lines)
    written = {"report.md", "report.html", "report.json", "scores.png", "scores.svg", "trials"}
    assert {path.name for path in out.iterdir()} == written
    report = json.loads((out / "report.json").read_text())
    assert len(report["trials"]) == 4 and report["baseline"] == "vanilla"
    (compared,) = report["comparisons"]
    assert compared["pair"] == "pretraining" and compared["gap"]["seeds"] == [1, 2]
    frozen = [one["weights"]["frozen_tensors"] for one in report["trainings"]]
    assert frozen == [0, 0, 4, 4]
    text = (out / "report.md").read_text()
    assert "sst2: the most frequent label, given always, scores 50.00" in text
    assert "vanilla-1, vanilla-2: nothing was frozen, so everything trains" in text
    before = {path: path.read_bytes() for path in (out / "trials").iterdir()}
    more = {"data": exports / "data", "out": out, "epochs": 1, "learning_rate": 3e-3, "seeds": 2}
    glue(models=[exports / "orthogonal-1"], **more)
    after = {path: path.read_bytes() for path in (out / "trials").iterdir()}
    assert len(after) == 5 and {path: after[path] for path in before} == before
    report = json.loads((out / "report.json").read_text())
    assert [one["kept"] for one in report["trainings"]] == [True, False]
    assert report["baseline"] == "orthogonal"


def test_query_and_key_train_if_that_is_asked_for(exports: Path, tmp_path: Path) -> None:
    quick = {"seeds": 1, "epochs": 1, "learning_rate": 3e-3, "out": tmp_path}
    data = exports / "data"
    glue(models=[exports / "orthogonal-1"], data=data, train_query_key=True, **quick)
    report = json.loads((tmp_path / "report.json").read_text())
    (training,) = report["trainings"]
    assert training["weights"]["frozen_tensors"] == 0 and training["query_key"] == "trained"
    assert training["weights"]["unchanged_tensors"] == []
    assert "--train-query-key: Q and K trained like everything else" in report["notes"]
    assert report["experiment"] == "E3" and report["trials"][0]["items"] == 24


def test_mistakes_are_refused_before_anything_is_trained(exports: Path, tmp_path: Path) -> None:
    done = warm_cli(
        ["evaluate", "glue", str(exports / "vanilla-1"), "--data", str(exports), "--tasks", "sst3"]
    )
    assert_refused(done, "--tasks: there is no task 'sst3'; there are cola, sst2")
    data = {"data": exports / "data"}
    shutil.copytree(exports / "vanilla-1", tmp_path / "model")
    (tmp_path / "model/tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"model has no tokenizer \(tokenizer.json\)"):
        glue(models=[tmp_path / "model"], **data)
    (tmp_path / "model/tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"transformers cannot load .*model: "):
        glue(models=[tmp_path / "model"], **data, out=exports / "out")
    (tmp_path / "model/export.json").write_text("{}")
    with pytest.raises(UserError, match=r"export.json has no key 'run': .*; export the run again"):
        glue(models=[tmp_path / "model"], **data)
    assert not (exports / "out").exists()


def test_a_missing_package_is_one_sentence(
    exports: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(
        UserError, match=r"evaluate glue needs the package accelerate .* pip install .*'\.\[eval\]'"
    ):
        glue(models=[exports / "vanilla-1"], data=exports / "data", out=tmp_path)
