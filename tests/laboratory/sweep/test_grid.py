"""Grid files: what they expand to, how runs are named, how they are refused; the shipped grids."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from laboratory.study.gaps import FEWEST_SEEDS
from laboratory.sweep.grid import GridRun, expand, read_grid, select
from laboratory.sweep.names import LONGEST_NAME, NamedValues, run_names
from laboratory.sweep.plan import PlannedRun, plan_sweep
from laboratory.sweep.running import next_run
from pretrain.config.load import load_config
from pretrain.config.sources import dump_yaml, override_text, parse_overrides
from pretrain.errors import UserError
from tests.shipped_grids import planned_runs, shipped_grid, shipped_grids

ONE_RANK = {"parallel.tensor_model_parallel_size": 1}


def grid_file(directory: Path, **content: Any) -> str:
    """A grid file with these keys, `directory` in `directory` unless given."""
    path = directory / "mine.yaml"
    path.write_text(dump_yaml({"directory": str(directory / "runs"), **content}))
    return str(path)


def runs_of(directory: Path, *overrides: str, **content: Any) -> list[GridRun]:
    return expand(read_grid(grid_file(directory, **content)), parse_overrides(overrides))


def plan(directory: Path, *overrides: str, **content: Any) -> list[PlannedRun]:
    content = {"set": ONE_RANK, **content}
    grid = read_grid(grid_file(directory, **content))
    return plan_sweep(grid, None, parse_overrides(overrides), lambda _: 1, check_data=False)


def begin(run: PlannedRun) -> None:
    """Leave the directory of a run that has begun."""
    run.path.mkdir(parents=True)
    (run.path / "config.yaml").write_text(run.config.to_yaml())


def refusal(directory: Path, *overrides: str, **content: Any) -> str:
    with pytest.raises(UserError) as raised:
        plan(directory, *overrides, **content)
    assert "\n" not in str(raised.value)
    return str(raised.value)


# What a grid expands to


def test_a_grid_of_its_bases_name_is_not_the_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = {**ONE_RANK, "schedule.tokens": 100_000}
    file = Path(grid_file(tmp_path, base="demo", set=tokens)).rename(tmp_path / "demo.yaml")
    monkeypatch.chdir(tmp_path)
    (run,) = plan_sweep(read_grid(file.name), None, [], lambda _: 1, check_data=False)
    assert (run.config.schedule.steps, run.config.schedule.tokens) == (None, 100_000)


def test_the_name_of_an_entry_is_the_trunk_of_its_branches(tmp_path: Path) -> None:
    arms: dict[str, Any] = {
        "set": {**ONE_RANK, "schedule.kind": "wsd", "schedule.branch_from": "trunk"},
        "list": [
            {"name": "short", "schedule.steps": 100},
            {"name": "trunk", "schedule.steps": 400, "schedule.branch_from": None},
            {"name": "other", "schedule.steps": 200, "schedule.branch_from": "runs/other"},
        ],
        "grid": {"model.num_layers": [2, 4]},
        "seeds": [1, 2],
    }
    runs = {run.name: run for run in plan(tmp_path, **arms)}
    trunk_of = {name: run.config.schedule.branch_from for name, run in runs.items()}
    assert trunk_of["short-num_layers_4-seed_2"] == tmp_path / "runs" / "trunk-num_layers_4-seed_2"
    assert trunk_of["trunk-num_layers_4-seed_2"] is None
    assert trunk_of["other-num_layers_4-seed_2"] == Path("runs/other")
    first = runs["short-num_layers_2-seed_1"]
    assert first.overrides[-1] == "run.seed=1"
    assert f"schedule.branch_from={trunk_of[first.name]}" in first.overrides

    waiting = list(runs.values())[:6]
    order = []
    while (run := next_run(waiting, [])) is not None:
        branches = [branch for branch in waiting if branch.config.schedule.branch_from == run.path]
        assert next_run(branches, [run]) is None
        waiting.remove(run)
        order.append(run.name)
    assert order == [
        *(f"{name}-num_layers_{n}-seed_1" for n in (2, 4) for name in ("trunk", "short")),
        *(f"other-num_layers_{n}-seed_1" for n in (2, 4)),
    ]


def test_a_trunk_that_is_neither_entry_nor_directory_is_refused(tmp_path: Path) -> None:
    entries = [
        {"name": "trunk", "schedule.steps": 400},
        {"name": "short", "schedule.steps": 100, "schedule.branch_from": "trnk"},
    ]
    said = refusal(tmp_path, set={**ONE_RANK, "schedule.kind": "wsd"}, list=entries)
    assert "schedule.branch_from=trnk is neither an entry of `list` nor a run directory" in said
    assert said.endswith("did you mean 'trunk'?")


def test_seeds_then_list_then_grid_with_the_last_key_fastest(tmp_path: Path) -> None:
    runs = runs_of(
        tmp_path,
        list=[
            {"attention.variant": "vanilla"},
            {"name": "wide", "attention.variant": "orthogonal", "model.hidden_size": 256},
        ],
        grid={"model.num_layers": [2, 4], "model.position_embedding": ["rope", "learned"]},
        seeds=[7, 8],
    )
    assert [run.name for run in runs[:5]] == [
        "vanilla-num_layers_2-rope-seed_7",
        "vanilla-num_layers_2-learned-seed_7",
        "vanilla-num_layers_4-rope-seed_7",
        "vanilla-num_layers_4-learned-seed_7",
        "wide-num_layers_2-rope-seed_7",
    ]
    assert len(runs) == 2 * 2 * 2 * 2
    assert {run.name.rpartition("-")[2] for run in runs[:8]} == {"seed_7"}
    assert runs[-1].overrides() == [
        "run.name=wide-num_layers_4-learned-seed_8",
        f"run.directory={tmp_path / 'runs'}",
        "attention.variant=orthogonal",
        "model.hidden_size=256",
        "model.num_layers=4",
        "model.position_embedding=learned",
        "run.seed=8",
    ]


def test_the_command_line_wins_over_set_and_the_list_over_both(tmp_path: Path) -> None:
    runs = plan(
        tmp_path,
        "optimizer.learning_rate=2e-3",
        "run.directory=elsewhere",
        set={**ONE_RANK, "optimizer.learning_rate": 1e-3, "schedule.steps": 50},
        list=[{"name": "a"}, {"name": "b", "schedule.steps": 60}],
    )
    assert [run.config.optimizer.learning_rate for run in runs] == [2e-3, 2e-3]
    assert [run.config.schedule.steps for run in runs] == [50, 60]
    assert [run.path for run in runs] == [Path("elsewhere/a"), Path("elsewhere/b")]


def test_a_grid_of_one_run_is_called_like_its_file(tmp_path: Path) -> None:
    assert [run.name for run in runs_of(tmp_path)] == ["mine"]


def selected(*patterns: str) -> list[str]:
    return [run.name for run in select(expand(read_grid("a1_init")), patterns, "a1_init.yaml")]


def test_only_keeps_the_order_of_the_grid_and_takes_a_run_once() -> None:
    gaussians = [f"gaussian-seed_{seed}" for seed in (1, 2, 3, 4, 5)]
    assert selected("gaussian-seed_?", "vanilla-seed_1") == ["vanilla-seed_1", *gaussians]
    variants = ("vanilla", "orthogonal", "gaussian", "gaussian_naive")
    first = [f"{variant}-seed_1" for variant in variants]
    later = [f"vanilla-seed_{seed}" for seed in (2, 3, 4, 5)]
    assert selected("vanilla-*", "*-seed_1", "vanilla-seed_[12]") == [*first, *later]
    assert len(selected()) == 20


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("vanila-seed_1", "close to it: vanilla-seed_1, "),
        ("Gaussian-seed_2", "close to it: gaussian-seed_2, "),
        ("*_seed", "they are vanilla-seed_1, orthogonal-seed_1, gaussian-seed_1 and 17 more"),
    ],
)
def test_only_refuses_a_pattern_that_is_the_name_of_no_run(pattern: str, hint: str) -> None:
    with pytest.raises(UserError) as raised:
        selected("vanilla-*", pattern)
    said = f"grid a1_init.yaml: --only '{pattern}' is the name of none of its runs; {hint}"
    assert str(raised.value).startswith(said)


def test_only_leaves_what_was_not_asked_for_unchecked(tmp_path: Path) -> None:
    varied = {"model.num_layers": [2, 0], "model.dropout": [0.0, 0.1]}
    grid = read_grid(grid_file(tmp_path, set=ONE_RANK, grid=varied))
    runs = plan_sweep(grid, None, [], lambda _: 1, check_data=False, only=["num_layers_2-*"])
    assert [run.name for run in runs] == ["num_layers_2-dropout_0.0", "num_layers_2-dropout_0.1"]
    with pytest.raises(UserError, match="run num_layers_0-dropout_0"):
        plan_sweep(grid, None, [], lambda _: 1, check_data=False, only=["*-dropout_0.1"])


# Names


def names_of(*values: dict[str, Any]) -> list[str]:
    return run_names([NamedValues(tuple(entry.items())) for entry in values], "grids/mine.yaml")


def test_names_read_well() -> None:
    assert names_of(
        {"attention.variant": "orthogonal", "optimizer.learning_rate": 4e-3},
        {"attention.adapters": ["query_key_bias", "low_rank"], "model.tied_embeddings": False},
        {"attention.adapters": [], "model.head_dim": None},
        {"data.directory": "data/small stories"},
    ) == [
        "orthogonal-learning_rate_0.004",
        "query_key_bias+low_rank-tied_embeddings_false",
        "adapters_none-head_dim_none",
        "data_small_stories",
    ]


def test_keys_that_end_alike_are_written_in_full() -> None:
    assert names_of({"run.seed": 1, "data.seed": 2})[0] == "run.seed_1-data.seed_2"


@pytest.mark.parametrize(
    "values",
    [
        ["a/b", "a b", "a_b"],
        ["Word", "word"],
        ["../../etc", "etc"],
        ["x" * 500, "x" * 501],
        [{"0-3": 1.0}, {"0-3": 0.5}],
        ["", "."],
        [1, "1"],
        ["\u00e9", "e\n"],
    ],
)
def test_names_are_safe_and_do_not_collide(values: list[Any]) -> None:
    names = names_of(*({"section.key": value} for value in values))
    assert len({name.casefold() for name in names}) == len(values)
    for name in names:
        assert (
            re.fullmatch(r"[A-Za-z0-9_+][A-Za-z0-9._+-]*", name) and len(name) <= LONGEST_NAME + 9
        )
        load_config("demo", [override_text("run.name", name)])
    assert names == names_of(*({"section.key": value} for value in values))


# Refusals


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"gird": {}}, "mine.yaml: unknown key 'gird'; did you mean 'grid'"),
        ({"seeds": [1, -1]}, "mine.yaml.*'seeds.1' is -1.* greater than or equal to 0"),
        ({"seeds": []}, r"mine.yaml.*'seeds' is \[\]"),
        ({"seeds": [1, 2, 1]}, "asks for the same run twice: seed_1"),
        ({"grid": {"model.num_layers": []}}, r"mine.yaml.*'grid.model.num_layers' is \[\]"),
        ({"grid": {"model.num_layers": 4}}, "mine.yaml.*'grid.model.num_layers' is 4.*list"),
        ({"grid": {"variant": ["vanilla"]}}, "'variant' in `grid` is not of the form section.key"),
        ({"grid": {"run.name": ["a"]}}, "'run.name' in `grid`: the sweep names its runs"),
        ({"set": {"run.directory": "x"}}, "'run.directory' in `set`: give `directory` instead"),
        ({"grid": {"run.seed": [1]}, "seeds": [2]}, "'run.seed' is given in `grid` and in `seeds`"),
        (
            {"set": {"model.num_layers": 2}, "grid": {"model.num_layers": [3]}},
            "'model.num_layers' is given in `set` and in `grid`",
        ),
        ({"list": [{"name": "a"}, {"name": "A"}]}, "two entries of `list` are called 'A'"),
        ({"list": [{"name": "../a"}]}, "'../a' is not a name for an entry"),
        ({"list": [{"name": "logs"}]}, "a run cannot be called 'logs'"),
        ({"list": [{"name": "a"}, {"name": "b"}]}, "a and b are the same run under two names"),
        (
            {"grid": {"model.num_layres": [1]}},
            "run num_layres_1: .*mine.yaml line.* unknown key 'model.num_layres'.*num_layers",
        ),
        ({"grid": {"attention.variant": ["vanila"]}}, "run vanila.*attention.variant.*'vanila'"),
        ({"grid": {"model.num_layers": [2, 0]}}, "run num_layers_0: .*line.*'.*layers' is 0"),
        ({"set": {}, "seeds": [2]}, "run seed_2.*tensor_model_parallel_size=2 needs at least 2 pr"),
        ({"base": "dem"}, "config 'dem' is neither a file nor one of the shipped configs"),
    ],
)
def test_a_mistake_in_a_grid_is_one_sentence(
    tmp_path: Path, content: dict[str, Any], said: str
) -> None:
    assert re.search(said, refusal(tmp_path, **content))


def test_mistakes_beside_the_grid(tmp_path: Path) -> None:
    grid = {"grid": {"attention.variant": ["vanilla"]}}
    assert "varies attention.variant" in refusal(tmp_path, "attention.variant=gaussian", **grid)
    assert "the sweep names its runs" in refusal(tmp_path, "run.name=x", **grid)
    with pytest.raises(
        UserError, match="neither a file nor one of the shipped grids: a1_init, a2_"
    ):
        read_grid("a1")
    (tmp_path / "no.yaml").write_text("base: demo\n")
    with pytest.raises(UserError, match="'directory' is missing"):
        read_grid(str(tmp_path / "no.yaml"))


def test_a_run_directory_of_another_run_is_refused_with_what_differs(tmp_path: Path) -> None:
    content = {"grid": {"model.num_layers": [2, 3]}}
    run = plan(tmp_path, **content)[1]
    begin(run)
    assert [run.standing for run in plan(tmp_path, **content)] == ["new", "partial"]
    said = refusal(tmp_path, "optimizer.learning_rate=1e-4", "schedule.steps=99", **content)
    assert f"{run.path} holds another run" in said
    assert "optimizer.learning_rate is 0.003 there and 0.0001 in the grid" in said
    assert "schedule.steps is 240 there and 99 in the grid" in said
    (run.path / "state").write_text("finished\n")
    assert plan(tmp_path, **content)[1].standing == "partial"  # it was killed before its summary
    (run.path / "summary.json").write_text("{}")
    assert plan(tmp_path, **content)[1].standing == "finished"
    said = refusal(tmp_path, "optimizer.learning_rate=1e-4", **content)
    assert "choose another `directory`" in said and "delete" not in said
    (run.path / "config.yaml").write_text("run: 3\n")
    assert "is not a configuration of this version" in refusal(tmp_path, **content)


@pytest.mark.parametrize(
    "words",
    [
        ["checkpoint.fall_back=true", "parallel.timeout_seconds=900"],
        ["run.device=cpu"],
        ["run.directory=runs"],
    ],
)
def test_what_changes_no_number_makes_no_other_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    lengths = {"trunk": 400, "branch": 100}
    entries = [{"name": name, "schedule.steps": steps} for name, steps in lengths.items()]
    entries[1]["schedule.branch_from"] = "trunk"
    content = {"set": {**ONE_RANK, "schedule.kind": "wsd"}, "list": entries}
    for run in plan(tmp_path, *words, **content):
        begin(run)
    assert [run.standing for run in plan(tmp_path, **content)] == ["partial", "partial"]
    entries[1]["schedule.branch_from"] = str(tmp_path)
    assert "schedule.branch_from is " in refusal(tmp_path, **content)


@pytest.mark.parametrize(
    ("here", "elsewhere"),
    [
        ("data.directory=shards", "data.directory={}/shards"),
        (
            "data.blend=[{{directory: shards, weight: 1}}]",
            "data.blend=[{{directory: {}/shards, weight: 1}}]",
        ),
    ],
)
def test_another_path_to_the_same_data_makes_no_other_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: str, elsewhere: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (run,) = plan(tmp_path, here.format())
    begin(run)
    assert [run.standing for run in plan(tmp_path, elsewhere.format(tmp_path))] == ["partial"]
    assert "holds another run: data." in refusal(tmp_path, elsewhere.format("/elsewhere"))


# What the trainings are told


def test_values_survive_the_command_line() -> None:
    values = ["rope", "", "null", "1e-3", "a: b", "[1", "a#b", "x y"]
    values += [None, True, 1e-05, 3, [], ["a", "1"], {"0-3": 0.5}]
    for value in values:
        assert parse_overrides([override_text("a.b", value)]) == [("a.b", value)]


FEW_SEEDS = {"documentation_modern_rates_muon", "documentation_widths"}
"""Grids that search something and claim nothing, as those of rates do."""
ADDED = {
    "documentation_modern_adapters",
    "documentation_modern_claims_trained",
    "documentation_modern_iterations",
    "documentation_modern_rivals",
    "documentation_modern_rivals_rates",
}
"""Grids that add variants to another one, which has those that are frozen, or that vary the
optimizer alone."""
SEARCHED_ELSEWHERE = {"documentation_modern_dense_rates"}
"""Searches of one variant beside another grid's, which has the baseline."""


@pytest.mark.distributed  # no processes, but twelve seconds
@pytest.mark.parametrize("name", shipped_grids())
def test_every_run_of_every_shipped_grid_is_possible(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its command makes the configuration that was checked."""
    monkeypatch.chdir(tmp_path)  # where no run of it has begun
    grid = shipped_grid(name)
    runs = planned_runs(name)
    searches = name.endswith("_rates") or name in FEW_SEEDS
    assert searches or len(grid.content.seeds or []) >= FEWEST_SEEDS
    variants = {run.config.attention.variant for run in runs}
    assert variants & {"vanilla", "low_rank"} or name in SEARCHED_ELSEWHERE
    frozen = variants & {"orthogonal", "orthogonal_shared", "monarch"}
    freezes = any(run.config.phases[-1].newly_kept for run in runs)
    assert frozen or freezes or name in ADDED
    for run in runs:
        if run.config.run.seed == min(grid.content.seeds or [run.config.run.seed]):
            assert load_config(run.base, run.overrides) == run.config
    assert len({json.dumps(run.config.as_dict()) for run in runs}) == len(runs)


@pytest.mark.distributed  # no processes, but twelve seconds
@pytest.mark.parametrize("base", ["small", "base", "large"])
@pytest.mark.parametrize("name", shipped_grids())
def test_every_shipped_grid_goes_on_every_base(name: str, base: str) -> None:
    """Its keys unset those of the base that they exclude, and what is one run there is planned
    once."""
    grid = shipped_grid(name)
    # A length in FLOPs suits the sizes of its base; on another it is given anew.
    fixed = grid.content.fixed
    length = [("schedule.flops", 10**18)] if "schedule.flops" in fixed else []
    names = [run.name for run in expand(grid, [])]
    first = [name for name in names if name.endswith("-seed_1")] or names

    def planned(length: Sequence[tuple[str, Any]], only: Sequence[str]) -> list[PlannedRun]:
        return plan_sweep(grid, base, length, lambda _: 1, check_data=False, only=only)

    if any("schedule.flops" in entry for entry in grid.content.entries or []):
        # Not given anew, because it varies.
        said = r"more than the \d+ steps of the run \(schedule.flops="
        with pytest.raises(UserError, match=said):
            planned([], first)
        return
    if base == "base" and any("hadamard" in run for run in first):
        said = r"hidden_size=768 is not a power of two.*use construction 'dct'"
        with pytest.raises(UserError, match=said):
            planned(length, first)
        first = [run for run in first if "hadamard" not in run]
        if not first:
            return
    twins = {("a3_heads", "small"): 2}.get((name, base), 2 if name == "a4_head_dim" else 0)
    assert len(planned(length, first)) == len(first) - twins
