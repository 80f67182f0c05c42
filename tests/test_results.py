"""laboratory.results: the published numbers again, from what is committed."""

from __future__ import annotations

import csv
import hashlib
import json
import re
import shutil
import subprocess
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from laboratory.results import documentation, numbers, records, stated
from laboratory.results.equal_cost import SAVED
from pretrain.api import plan
from pretrain.config.load import load_config
from pretrain.runs.environment import STARTED
from tests.fabricated_runs import BATCH, LENGTH, STEPS, write_run
from tests.ranks import ROOT


@pytest.mark.parametrize("page", ["headline", "a3_heads"])
def test_the_published_numbers_come_from_the_committed_runs(page: str, tmp_path: Path) -> None:
    """Gaps, intervals and tests at equal FLOPs, and the line through the gaps over a subject."""
    folder = shutil.copytree(ROOT / "docs/results" / page, tmp_path / page)
    assert numbers.deviations(folder) == []
    runs = folder / "runs.csv"
    loss = next(iter(csv.DictReader(runs.open())))["validation_loss"]
    runs.write_text(runs.read_text().replace(loss, str(float(loss) + 0.01)))
    sentences = numbers.deviations(folder)
    assert any("variants.csv: gap.mean of " in line for line in sentences)
    assert any("report.md: lacks | " in line for line in sentences)


@pytest.mark.distributed  # seconds
def test_what_the_pages_state_comes_from_the_committed_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is of its own contrast: another one in its place is found, and one of no run."""
    monkeypatch.chdir(ROOT)
    assert stated.deviations() == []
    for path in ("README.md", "docs/results"):
        (shutil.copytree if path.startswith("docs") else shutil.copy)(ROOT / path, tmp_path / path)
    monkeypatch.chdir(tmp_path)
    readme = tmp_path / "README.md"
    text = readme.read_text()
    readme.write_text(text.replace("2.6 % [0.7, 4.5]", "2.0 % [1.0, 3.0]"))
    (sentence,) = stated.deviations()
    assert sentence.startswith("README.md: lacks both with the convolution: 2.6 % [0.7, 4.5] is")
    readme.write_text(text + "\nAnother is 2.7 % [0.7, 4.5].\n")
    assert stated.deviations() == ["README.md: nothing gives 2.7 % [0.7, 4.5]"]
    readme.write_text(
        text + "\nIt is −0.056 [−0.065, −0.047] ([page](docs/results/wiki/README.md)).\n"
    )
    assert stated.deviations() == []


def test_records_hold_what_a_run_ended_with_and_what_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"config.optimizer.learning_rate": 0.02}
    runs = [
        write_run(tmp_path, "vanilla-seed_3", seed=3, loss=3.5, changes=changes),
        write_run(tmp_path, "orthogonal-seed_3", "orthogonal", seed=3, loss=3.75, changes=changes),
    ]
    out = tmp_path / "records.json"
    assert records.main([*map(str, runs), "--out", str(out)]) == 0
    content = json.loads(out.read_text())
    written = content["runs"]["vanilla-seed_3"]
    assert (written["seed"], written["validation_loss"], written["training_loss"]) == (3, 3.5, 4.0)
    assert (written["steps"], written["tokens"]) == (STEPS, STEPS * BATCH * LENGTH)
    settings = content["settings"][written["settings"]]
    assert settings["optimizer.learning_rate"] == 0.02 and "run.seed" not in settings
    assert content["environments"][written["environment"]]["cpu_kernels"] == "AVX2"
    other = content["runs"]["orthogonal-seed_3"]
    assert other["settings"] != written["settings"]
    assert other["environment"] == written["environment"]
    path = runs[0] / "environment.json"  # of what a resume changes, the first start counts
    facts = json.loads(path.read_text())
    first = {"first_step": 1, "changes": {}, "started": "2001-01-01T00:00:00+0000"}
    later = {"first_step": 6, "changes": {}, "started": "2001-01-02T00:00:00+0000"}
    path.write_text(json.dumps(facts | {"segments": [first, later]}))
    assert records.main([str(runs[0]), "--out", str(tmp_path / "resumed.json")]) == 0
    resumed = json.loads((tmp_path / "resumed.json").read_text())["runs"]["vanilla-seed_3"]
    assert resumed == written | {"started": first["started"]}
    assert records.main([str(runs[0]), str(runs[0]), "--out", str(out)]) == 2
    assert "another run is called vanilla-seed_3 too" in capsys.readouterr().err
    assert records.main([str(tmp_path), "--out", str(out)]) == 2
    assert json.loads(out.read_text()) == content


def test_the_committed_records_are_the_sealed_runs(tmp_path: Path) -> None:
    """And another loss, setting or start is found, as is a run that was left out."""
    folder = shutil.copytree(ROOT / "docs/results/modern", tmp_path / "modern")
    assert records.deviations(folder) == []
    path = folder / "records.json"
    text = path.read_text()
    name = "vanilla_conv4-t4000-seed_21"

    def sentences(**changed: object) -> list[str]:
        content = json.loads(text)
        content["runs"][name] |= changed
        path.write_text(json.dumps(content))
        return records.deviations(folder)

    losses = sentences(validation_loss=3.0)
    assert losses and all("validation_loss of" in line for line in losses)
    other = json.loads(text)["runs"]["orthogonal-t500-seed_21"]["settings"]
    (sentence,) = sentences(settings=other)
    assert sentence.endswith(f"{name} has other settings than 4590af20be90.json")
    assert "ran before 4590af20be90.json" in sentences(started="2026-11-26T00:00:00+0000")[0]
    sealed = json.loads((folder / "seals/4590af20be90.json").read_text())["sealed"]["sealed"]
    ahead = datetime.strptime(sealed, STARTED).astimezone(timezone(timedelta(hours=9)))
    assert sentences(started=ahead.strftime(STARTED)) == []  # the same moment elsewhere
    content = json.loads(text)
    del content["runs"][name]
    path.write_text(json.dumps(content))
    assert "only 191 of 192 runs of 4590af20be90.json" in records.deviations(folder)[0]


VANILLA = "attention.variant=vanilla"
TRAINED = "attention.variant=monarch_trainable attention.shared=true"
AFTER_A_QUARTER = 'attention.phases=[{"at":0.25,"freeze":"all"}]'
SETTINGS = {
    "multi_query_conv4": f"{VANILLA} model.num_query_groups=1",
    "grouped_query_conv4": f"{VANILLA} model.num_query_groups=4",
    "small_mlp_conv4": f"{VANILLA} model.ffn_hidden_size=2144",
    "three_layers_conv4": f"{VANILLA} model.num_layers=18 model.ffn_hidden_size=3584",
    "monarch_shared_conv4": "attention.variant=monarch attention.shared=true",
    "trained_monarch_shared_conv4": TRAINED,
    "early_monarch_shared_conv4": f"{TRAINED} {AFTER_A_QUARTER}",
    "early_vanilla_conv4": f"{VANILLA} {AFTER_A_QUARTER}",
}


def test_what_is_spent_on_tokens_is_what_plan_says() -> None:
    def costs(settings: str) -> tuple[float, float]:
        adapters = "attention.adapters=[short_convolution,query_key_bias,channel_scale]"
        overrides = [*settings.split(), adapters]
        made = plan("large_modern", overrides, gpus=64)
        return load_config("large_modern", overrides).total_flops, made.chosen.speed.run_gpu_hours

    flops, hours = costs(VANILLA)
    assert SETTINGS.keys() == SAVED.keys()
    for name, settings in SETTINGS.items():
        own_flops, own_hours = costs(settings)
        assert SAVED[name].flops == pytest.approx(1 - own_flops / flops, abs=6e-4), name
        assert SAVED[name].hours == pytest.approx(1 - own_hours / hours, abs=6e-4), name


def test_a_page_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        numbers.main(["a1"])
    assert ended.value.code == 2 and "there is no page 'a1'" in capsys.readouterr().err


def test_a_page_shows_no_figure_that_is_not_committed() -> None:
    for text in (ROOT / "docs/results").rglob("*.md"):
        for shown in re.findall(r"!\[[^]]+\]\(([^)]+)\)", text.read_text()):
            assert shown.endswith(".svg") and (text.parent / shown).is_file(), f"{text}: {shown}"


class Archive:
    """An archive of packages on this disk, which apt reads in place of its own.

    Args:
        root: an empty folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        for folder in ("archive", "lists/partial", "cache/archives/partial"):
            (root / folder).mkdir(parents=True)
        (root / "sources.list").write_text(f"deb [trusted=yes] file:{root}/archive ./\n")
        (root / "apt.conf").write_text(
            f'Dir::Etc::sourcelist "{root}/sources.list";\nDir::Etc::sourceparts "-";\n'
            f'Dir::State::lists "{root}/lists";\nDir::Cache "{root}/cache";\n'
            'APT::Sandbox::User "";\n'
        )

    def hold(self, version: str, text: str) -> None:
        """Hold one version of the package `prose`, whose only document is `text`."""
        tree = self.root / f"tree-{version}"
        (tree / "DEBIAN").mkdir(parents=True, exist_ok=True)
        fields = (
            f"Package: prose\nVersion: {version}\nArchitecture: all\nMaintainer: me <me@here>\n"
        )
        (tree / "DEBIAN/control").write_text(f"{fields}Description: text\n")
        (tree / "doc.txt").write_text(text)
        archive = self.root / "archive"
        for old in archive.iterdir():
            old.unlink()
        deb = archive / f"prose_{version}_all.deb"
        subprocess.run(["dpkg-deb", "--build", tree, deb], check=True, capture_output=True)
        sha256 = hashlib.sha256(deb.read_bytes()).hexdigest()
        file_fields = f"Filename: ./{deb.name}\nSize: {deb.stat().st_size}\nSHA256: {sha256}\n"
        (archive / "Packages").write_text(f"{fields}{file_fields}Description: text\n")
        subprocess.run(["apt-get", "update"], check=True, capture_output=True)


@pytest.mark.skipif(not shutil.which("apt-get"), reason="apt-get is needed")
def test_a_text_is_that_of_the_study_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By version and by digest, with real packages; nothing is left of a text that is refused."""
    archive = Archive(tmp_path / "apt")
    monkeypatch.setenv("APT_CONFIG", str(archive.root / "apt.conf"))
    monkeypatch.setattr(documentation, "TEXTS", {"code": {"prose": ("*.txt",)}})
    monkeypatch.setattr(documentation, "TEXTS_OF_THE_STUDIES", tmp_path)
    text = "A sentence of the study. " * 20
    digest = hashlib.sha256(text.encode()).hexdigest()
    recorded = {"version": "1:1.0-1", "documents": 1, "text": digest}
    (tmp_path / "code.json").write_text(json.dumps({"packages": {"prose": recorded}}))

    archive.hold("1:1.0-1", text)
    corpus = tmp_path / "corpus"
    assert documentation.main([str(corpus), "code"]) == 0
    assert {path.name for path in corpus.iterdir()} == {"prose.jsonl.zst", "corpus.json"}
    assert json.loads((corpus / "corpus.json").read_text())["packages"]["prose"] == recorded
    assert documentation.main([str(corpus), "code"]) == 2
    assert "is already there" in capsys.readouterr().err

    archive.hold("1:1.0-1", f"{text}Another.")  # one version, rebuilt
    other = tmp_path / "other"
    assert documentation.main([str(other), "code"]) == 2
    assert (
        f"in the studies 1 documents of 1:1.0-1, SHA-256 {digest[:12]}" in capsys.readouterr().err
    )
    archive.hold("1:1.1-1", text)
    assert documentation.main([str(other), "code"]) == 2
    error = capsys.readouterr().err
    assert "apt-get download prose=1:1.0-1 failed; apt knows 1:1.1-1: run" in error
    assert not other.exists() and not [*tmp_path.glob("tmp*")]
    assert documentation.main([str(other), "code", "--newest"]) == 0
    assert "note: the text of prose is 1 documents of 1:1.1-1" in capsys.readouterr().out
