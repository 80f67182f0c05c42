"""Groups of seeds, tables of gaps, and reports as `compare`, `evaluate` and fine-tuning share
them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

import laboratory.study.packages
from laboratory.study.gaps import (
    NATS,
    POINTS,
    SCORES,
    PairedGap,
    Scale,
    adjust,
    gap_content,
    paired_gap,
)
from laboratory.study.report import Document, Picture, finish, page_text
from laboratory.study.seeds import group_by_settings, group_runs, refuse_twice
from laboratory.study.tables import (
    EFFECT,
    GAP,
    INTERVAL,
    PAIRS,
    PERPLEXITY,
    ROW_CLAIM,
    T_HOLM,
    GapRow,
    gap_sentence,
    gap_table,
    p_value,
)
from pretrain.errors import UserError
from pretrain.reporting.tables import Table


@dataclass(frozen=True)
class Model:
    path: Path
    name: str
    variant: str
    seed: int | None
    config: Mapping[str, Any] = field(default_factory=lambda: {"attention": {}})


def model(name: str, variant: str, seed: int | None) -> Model:
    return Model(Path(name), name, variant, seed)


def gap_of(differences: tuple[float, ...], scale: Scale) -> PairedGap:
    values = dict(enumerate(differences, start=1))
    (gap,) = adjust([paired_gap("base", values, dict.fromkeys(values, 0.0), scale)])
    assert gap is not None
    return gap


def test_groups_by_settings_of_the_caller() -> None:
    models = [model("a2", "a", 2), model("b1", "b", 1), model("a1", "a", 1), model("a9", "a", 9)]
    same = {"step": 1, "x.rate": None}
    settings: list[dict[str, Any]] = [same, {}, same, {"step": 5, "x.rate": [1, 2]}]
    groups = group_by_settings(models, ["a", "b", "a", "a"], settings)
    plain, other = "a (step=1, rate=none)", "a (step=5, rate=1+2)"
    assert [group.name for group in groups.groups] == [plain, "b", other]
    assert [run.name for run in groups.groups[0].runs] == ["a1", "a2"]
    assert groups.name_of(models[3]) == other
    assert groups.baseline == plain and groups.baseline_of(groups.groups[1]).name == plain
    for baseline in ("b", "b1"):
        assert group_by_settings(models, ["a", "b", "a", "a"], settings, baseline).baseline == "b"
    with pytest.raises(UserError, match="--baseline a is the variant of several groups of runs"):
        group_by_settings(models, ["a", "b", "a", "a"], settings, "a")
    foreign = [model("x", "x", None), model("y", "y", None)]
    assert len(group_by_settings(foreign, ["x", "y"], [{}, {}]).groups) == 2
    said = r"^x and y are both 'x' with run\.seed=None: give one of them$"
    with pytest.raises(UserError, match=said):
        group_by_settings(foreign, ["x", "x"], [{}, {}])


def test_ten_times_as_many_runs_of_a_method_take_ten_times_the_calls() -> None:
    calls: list[int] = []
    for count in (20, 200):
        models = [model(str(seed), "a", seed) for seed in range(count)]
        settings = [{"step": 1, "rate": [1, 2]} for _ in models]
        calls.append(0)

        def seen(*event: object) -> None:
            calls[-1] += 1

        sys.setprofile(seen)
        try:
            group_by_settings(models, ["a"] * count, settings)
        finally:
            sys.setprofile(None)
    assert calls[1] < 12 * calls[0]


def test_only_a_command_with_subjects_names_them_as_the_remedy() -> None:
    one, two = (
        replace(
            model(name, "v", 1),
            config={"attention": {}, "run": {"name": name}, "data": {"size": size}},
        )
        for name, size in (("a", 1), ("b", 2))
    )
    with pytest.raises(UserError, match=r"with run\.seed=1: give one of them$"):
        group_runs([one, two], "v")
    with pytest.raises(UserError, match=r"give one of them, or say --subject data\.size if that"):
        group_runs([one, two], "v", {})


def test_a_name_of_a_grid_is_not_taken_where_it_is_the_label_of_another_method() -> None:
    plain = {"attention": {"variant": "orthogonal", "adapters": []}}
    ranked = {"attention": {"variant": "orthogonal", "adapters": ["low_rank"]}}
    runs = [
        replace(model(name, "orthogonal", seed), config={**config, "run": {"name": name}})
        for name, seed, config in (("plain-seed_1", 1, plain), ("orthogonal-seed_2", 2, ranked))
    ]
    assert sorted(group.label for group in group_runs(runs, "plain-seed_1", {}).groups) == [
        "orthogonal",
        "orthogonal+low_rank",
    ]


def test_the_name_of_a_run_stands_for_its_label_within_each_value_of_the_subject() -> None:
    runs = [
        replace(
            model(f"{variant}-{layers}", variant, 1),
            config={"attention": {"variant": variant}, "model": {"num_layers": layers}},
        )
        for variant in ("a", "b")
        for layers in (4, 8)
    ]
    groups = group_runs(runs, "a-4", {"model.num_layers": [4, 8, 4, 8]})
    pairs = {group.name: groups.baseline_of(group).name for group in groups.groups}
    assert pairs["b num_layers=8"] == "a num_layers=8"


def test_a_path_given_twice_is_refused() -> None:
    refuse_twice([Path("a"), Path("b")])
    with pytest.raises(UserError, match=r"^a model was given twice: give each directory once$"):
        refuse_twice([Path("a"), Path("b/../a")], "model", "directory")


def test_one_policy_for_p_values() -> None:
    cases = ((0.01234, 5), (0.00009, 5), (None, 9), (0.01, 4), (0.01, 0))
    shown = [p_value(p, n) for p, n in cases]
    assert shown == ["0.0123", "< 0.0001", "–", "n < 5", "n < 5"]
    few = gap_of((0.1, 0.2), POINTS)
    many = gap_of((0.01, 0.02, 0.03, 0.04, 0.05), POINTS)
    rows = [GapRow(("few",), few), GapRow(("many",), many, "score"), GapRow(("none",), None)]
    columns = (PAIRS, replace(GAP, title="points"), INTERVAL, EFFECT, T_HOLM, ROW_CLAIM)
    table = gap_table(("variant",), rows, columns)
    assert table.header[:4] == ("variant", "pairs", "points", "95 % interval")
    assert table.rows[0][:3] == ("few", "2", "+15.00") and table.rows[0][-2] == "n < 5"
    assert table.rows[1][1:6] == ("5", "+3.00", "[+1.04, +4.96]", "+1.90", "0.0132")
    assert table.rows[1][6] == "score significantly higher at 5 % (p = 0.0132 after Holm, n = 5)"
    assert table.rows[2][1:6] == ("0", "–", "–", "–", "–")
    assert table.rows[2][6] == "no seed in common with the baseline, so no gap"
    assert set(table.text_columns) == {0, 6}


def test_a_gap_knows_its_scale() -> None:
    nats, points, scores = (gap_of((0.01, 0.02), scale) for scale in (NATS, POINTS, SCORES))
    assert "perplexity_ratio" in gap_content(nats) and "perplexity_ratio" not in gap_content(points)
    ratios = {f"perplexity_ratio{end}" for end in ("", "_low", "_high")}
    assert gap_content(nats).keys() - gap_content(scores).keys() == ratios
    for part in ("+0.0150 nats per token", "perplexity +1.5 %"):
        assert part in gap_sentence("v", nats)
    assert gap_sentence("v", points, "accuracy").startswith("v: +1.50 points (95 % interval")
    assert gap_sentence("v", scores, "accuracy").startswith("v: accuracy +0.0150 (95 % interval")
    assert [PERPLEXITY.cell(GapRow((), gap)) for gap in (nats, points)] == ["+1.5 %", "–"]


def test_a_page_and_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(("a", "n"), [("x", "1")])
    page = ["# Title", "", Picture("there"), Picture("gone"), table, ["one", "two"], []]
    text = (
        "# Title\n\n![there](there.png)\n\n| a | n |\n| --- | ---: |\n| x | 1 |\n\n* one\n* two\n"
    )
    assert page_text(page, ["there"]) == text
    figures = {"gone": lambda: None}
    document = Document(
        page=page, content={"x": float("nan")}, summary=["said", ["note"]], figures=figures
    )
    (tmp_path / "out").mkdir()
    (tmp_path / "out/another").touch()
    finish(document, tmp_path / "out", remark=" (again)")
    said = f"said\n* note\nwritten: {tmp_path / 'out/report.md'} (again)\n"
    assert capsys.readouterr().out == said
    files = {path.name: path.read_text() for path in (tmp_path / "out").iterdir()}
    assert files["report.json"] == '{\n "x": null\n}\n'
    assert "gone" not in files["report.md"] and "another" in files
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--out .*file cannot be written: "):
        finish(document, tmp_path / "file")


@pytest.mark.parametrize("package", ["matplotlib", "scipy"])
def test_a_missing_package_is_one_sentence(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        UserError, match=rf"need the package {package}, .*pip install .*'\.\[compare\]'"
    ):
        importlib.reload(laboratory.study.packages)
