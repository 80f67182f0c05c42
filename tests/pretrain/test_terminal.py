"""What a terminal of 80 columns shows: nothing is cut, and nothing runs over.

Settings given as options.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import data_pipeline.__main__
import megatron_patches.__main__
import pretrain.__main__
from megatron_patches.recipe.variants import VARIANTS
from tests.fabricated_runs import write_run
from tests.ranks import ROOT

COLUMNS = 80
PROGRAMS = (pretrain.__main__, data_pipeline.__main__, megatron_patches.__main__)


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    monkeypatch.setenv("TERMINAL_WIDTH", str(COLUMNS))  # typer's own variable


def verbs(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, below in getattr(command, "commands", {}).items():
        yield from verbs(below, (*path, name))


def printed(program: Any, *arguments: str) -> str:
    done = CliRunner().invoke(program.app, arguments)
    assert done.exit_code == 0, done.output
    return done.output


def assert_fits(text: str) -> None:
    lines = text.replace("seeds 1 …", "").replace("Seeds 1 …", "").splitlines()
    assert len(lines) > 5
    assert [line for line in lines if len(line) > COLUMNS or "…" in line] == []


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_every_help_text_fits(program: Any) -> None:
    paths = [*verbs(typer.main.get_command(program.app))]
    assert len(paths) >= 2
    for path in paths:
        assert_fits(printed(program, *path, "--help"))


@pytest.mark.parametrize(
    "line",
    [
        "plan large --gpus 16 --price 2.5",
        "plan large --gpus 8 --gpu l40s data.micro_batch_size=512 data.global_batch_size=4096",
        "plan small --gpus 8 attention.variant=orthogonal_trainable",
        "show large attention.variant=monarch",
        "show demo --meanings",
    ],
)
def test_a_plan_and_a_configuration_fit(line: str) -> None:
    assert_fits(printed(pretrain.__main__, *line.split()))


@pytest.mark.distributed  # draws the figures, too
def test_a_comparison_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    losses = {"vanilla": 4.0, "orthogonal": 4.1, "monarch_shared_conv": 4.05}
    runs = [
        write_run(
            tmp_path,
            f"{variant}-{seed}",
            variant,
            seed=seed,
            loss=loss + 0.01 * seed + 0.001 * (seed % 2),
        )
        for variant, loss in losses.items()
        for seed in (1, 2, 3)
    ]
    text = printed(pretrain.__main__, "compare", *(run.name for run in runs), "--out", "out")
    where = [line for line in text.splitlines() if line.startswith("TensorBoard: ")]
    assert len(where) == 1 and where[0].endswith("tensorboard --logdir out/tensorboard")
    assert_fits(text.replace(where[0], ""))  # a path may be long
    for number in ("4.0207", "+0.05", "1,313,024"):
        assert number in text
    names = [line.partition("│")[0].strip() for line in text.splitlines() if "│" in line]
    assert names.count("monarch_") == names.count("shared_conv") == 2


@pytest.mark.parametrize(
    ("what", "some"),
    [
        (
            "variants",
            (
                "orthogonal              frozen           orthonormal rows of each head",
                "unfreeze                frozen at first",
                "monarch_trainable       trained          the factors train",
            ),
        ),
        ("configs", ("large         335.4 M parameters", "demo          A small model")),
        (
            "grids",
            ("a1_init                       A1: what the frozen matrices are", "demo_structured"),
        ),
    ],
)
def test_names_are_listed(what: str, some: tuple[str, ...]) -> None:
    text = printed(pretrain.__main__, "list", what)
    assert_fits(f"{text}\n\n\n")
    pattern = "laboratory/grids/*/*.yaml" if what == "grids" else "pretrain/configs/*.yaml"
    shipped = [path.stem for path in ROOT.glob(pattern)]
    names = [*VARIANTS] if what == "variants" else shipped
    assert sorted(line.split()[0] for line in text.splitlines() if line[0] != " ") == sorted(names)
    words = " ".join(text.split())
    assert all(" ".join(line.split()) in words for line in some)


def test_help_lists_every_verb_in_the_order_of_the_work() -> None:
    text = printed(pretrain.__main__, "--help")
    group = typer.main.get_group(pretrain.__main__.app)
    assert isinstance(group, pretrain.__main__.Verbs)
    listed = re.findall(r"^│ ([a-z-]+)  +\S", text.partition("─ Begin")[2], flags=re.M)
    assert sorted(listed) == sorted(group.commands)
    assert listed[:2] == ["try", "demo"] and listed.index("train") < listed.index("compare")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("show demo --variant dct", "--variant. Settings have no dashes: attention.variant=..."),
        ("train demo --vocab-size 100", "Settings have no dashes: model.vocab_size=..."),
        ("plan demo --batch-size 3", "data.micro_batch_size=..., data.global_batch_size=..."),
        ("plan demo --lr 3", "Settings have no dashes: section.key=value"),
    ],
)
def test_a_setting_given_as_an_option_is_told_how_it_is_written(line: str, said: str) -> None:
    done = CliRunner().invoke(pretrain.__main__.app, line.split())
    assert done.exit_code == 2
    # Typer 0.16 puts the option into quotes.
    assert said in " ".join(done.output.replace("│", " ").replace("'", "").split())


def test_an_unknown_option_of_a_verb_without_settings_is_no_setting() -> None:
    done = CliRunner().invoke(pretrain.__main__.app, ["compare", "a", "--variant", "dct"])
    assert done.exit_code == 2 and "No such option" in done.output and "dashes" not in done.output
