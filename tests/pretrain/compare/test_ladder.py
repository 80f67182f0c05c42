"""`ladder`: the law found again, its intervals, what seeds share, sealed predictions and
refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from megatron_patches.recipe.counting import count_parameters
from pretrain.__main__ import app
from pretrain.compare import ladder
from pretrain.compare.compare_runs import compare_runs
from pretrain.compare.ladder import Cell, fit_ladder
from pretrain.config.load import parse_config
from pretrain.config.sources import dump_yaml, parse_overrides
from pretrain.errors import UserError
from pretrain.sweep.grid import read_grid
from pretrain.sweep.plan import PlannedRun, plan_sweep
from tests.command_line import assert_refused
from tests.fabricated_runs import write_planned_run
from tests.ranks import warm_cli
from tests.tiny import tiny_overrides

FACTORS = {"base": 1.0, "other": 0.8, "third": 1.3}
SIZES, NEXT = (462_720, 841_536, 1_318_656), 2_567_808
LENGTHS = (256_000, 512_000, 1_024_000)


@pytest.fixture(autouse=True)
def few_refits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test needs no third digit of an interval."""
    monkeypatch.setattr(ladder, "FITS", 60)
    yield


# The law


def law(arm: str, parameters: int, tokens: int) -> float:
    """Return the true loss in nats.

    Args:
        arm: One of `FACTORS`.
        parameters: Of the model.
        tokens: That it was trained on.
    """
    return 2.0 + 0.9 * (parameters / 8e5) ** -0.35 + 1.6 * (FACTORS[arm] * tokens / 5e5) ** -0.45


def campaign(
    random: np.random.Generator,
    seed_sd: float = 0.0,
    run_sd: float = 0.01,
    misfit_sd: float = 0.0,
    seeds: float = 3,
    other_seeds: float = 0,
) -> tuple[list[Cell], list[Cell]]:
    """Draw a campaign.

    Args:
        random: Where chance comes from.
        seed_sd: Standard deviation by seed, nats.
        run_sd: The same by run.
        misfit_sd: The same by size and length.
        seeds: How many each cell has.
        other_seeds: The first seed of the next size.

    Returns:
        The cells that are fitted, and those of the next size with the losses they will have.
    """
    alike = random.normal(0, seed_sd, int(seeds + other_seeds))
    misfit = {(n, d): random.normal(0, misfit_sd) for n in (*SIZES, NEXT) for d in LENGTHS}

    def cells(sizes: tuple[int, ...], first: float) -> list[Cell]:
        found = []
        for arm, n, d in ((arm, n, d) for arm in FACTORS for n in sizes for d in LENGTHS):
            mean = law(arm, n, d) + misfit[n, d]
            own = range(int(first), int(first + seeds))
            found.append(
                Cell(arm, n, d, {s: mean + alike[s] + random.normal(0, run_sd) for s in own})
            )
        return found

    return cells(SIZES, 0), cells((NEXT,), other_seeds)


def exact(arms: Sequence[str] = tuple(FACTORS), sizes: Sequence[int] = SIZES) -> list[Cell]:
    return [Cell(arm, n, d, {1: law(arm, n, d)}) for arm in arms for n in sizes for d in LENGTHS]


def test_exact_losses_give_the_law_back_and_the_next_size() -> None:
    found = fit_ladder(exact(), "base", [Cell("other-next", NEXT, LENGTHS[0], {1: np.nan})])
    truth = {"E": 2.0, "a": 0.35, "b": 0.45}
    assert {name: found.values[name][0] for name in truth} == pytest.approx(truth, rel=2e-3)
    assert {arm: found.factors[arm][0] for arm in FACTORS} == pytest.approx(FACTORS, rel=1e-4)
    (row,) = found.predictions
    assert row.design == "other-next" and row.seeds == [1]
    assert row.loss == pytest.approx(law("other", NEXT, LENGTHS[0]), abs=1e-4)
    assert row.high - row.low < 1e-3
    for cell in found.cells:
        assert found.loss(cell.arm, *cell.place) == pytest.approx(cell.loss, abs=1e-4)


def test_the_baseline_is_the_arm_whose_factor_is_one() -> None:
    found = fit_ladder(exact(), "third")
    assert [*found.factors] == ["third", "base", "other"]
    assert found.factors["third"] == [1.0, 1.0, 1.0]
    assert found.factors["base"][0] == pytest.approx(1 / FACTORS["third"], rel=1e-3)


def test_neither_the_order_of_the_cells_nor_what_else_is_predicted_changes_anything() -> None:
    cells, ahead = campaign(np.random.default_rng(1), run_sd=0.01)
    found = fit_ladder(cells, "base", ahead)
    assert found == fit_ladder(cells[::-1], "base", ahead)
    alone = fit_ladder(cells, "base", ahead[:1])
    assert (alone.values, alone.factors) == (found.values, found.factors)
    assert alone.predictions[0].high == pytest.approx(found.predictions[0].high, rel=1e-9)


@pytest.mark.distributed
def test_the_interval_holds_the_next_size_as_often_as_it_says() -> None:
    random = np.random.default_rng(2)
    inside: list[bool] = []
    factors: list[bool] = []
    for _ in range(24):
        cells, ahead = campaign(random, seed_sd=0.02, run_sd=0.01)
        found = fit_ladder(cells, "base", ahead)
        rows = zip(found.predictions, ahead, strict=True)
        inside += [row.low <= cell.loss <= row.high for row, cell in rows]
        factors += [
            found.factors[arm][1] <= k <= found.factors[arm][2] for arm, k in FACTORS.items()
        ]
    assert 0.8 <= np.mean(inside) <= 0.98
    assert np.mean(factors) >= 0.85


def test_what_seeds_do_to_all_runs_alike_is_known_of_the_same_seeds_and_not_of_others() -> None:
    cells, ahead = campaign(np.random.default_rng(3), seed_sd=0.05, run_sd=0.002)
    others = [replace(cell, losses=dict.fromkeys((8, 9, 10), np.nan)) for cell in ahead]
    fewer = [replace(cell, losses={1: np.nan}) for cell in ahead]
    widths = []
    for wanted in (ahead, fewer, others):
        rows = fit_ladder(cells, "base", wanted).predictions
        widths.append(np.mean([row.high - row.low for row in rows]))
    assert 3 * widths[0] < widths[2]
    assert widths[0] < widths[1]


def test_places_that_the_law_misses_widen_the_intervals() -> None:
    widths = []
    for misfit in (0.0, 0.02):
        cells, ahead = campaign(np.random.default_rng(4), run_sd=0.002, misfit_sd=misfit)
        found = fit_ladder(cells, "base", ahead)
        widths.append(found.predictions[0].high - found.predictions[0].low)
    assert widths[1] > 3 * widths[0]


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        (exact(sizes=SIZES[:2]), "a law of 3 variants needs 3 sizes, 2 lengths and 9 cells"),
        ([cell for cell in exact() if cell.tokens == LENGTHS[0]], "not 3, 1 and 9; train more"),
        (
            exact(["base"])[::2],
            "1 variants needs 3 sizes, 2 lengths and 7 cells (all of these), not 3",
        ),
    ],
)
def test_too_few_of_anything_is_refused(cells: list[Cell], said: str) -> None:
    with pytest.raises(UserError) as raised:
        fit_ladder(cells, "base")
    assert said in str(raised.value)


# The verb


WIDTHS = (32, 48, 64, 96)
STEPS = (10, 20)
SEEDS = [1, 2]


def rungs(directory: Path, shards: Path, arm: str = "orthogonal") -> tuple[str, list[PlannedRun]]:
    """A grid of two arms, and its runs; the widest is the next size."""
    own = {"run.name", "run.directory", "schedule.steps"}
    own |= {"model.hidden_size", "model.num_attention_heads"}
    given = parse_overrides(tiny_overrides(shards, directory, "unused"))
    tiny = {key: value for key, value in given if key not in own}
    entries = [
        {
            "name": f"{name}-w{width}-t{steps}",
            "attention.variant": name,
            "model.hidden_size": width,
            "model.num_attention_heads": width // 16,
            "schedule.steps": steps,
        }
        for name in ("vanilla", arm)
        for width in WIDTHS
        for steps in STEPS
    ]
    path = directory / f"{arm}.yaml"
    content = {"directory": str(directory / "runs"), "set": tiny, "list": entries, "seeds": SEEDS}
    path.write_text(dump_yaml(content))
    return str(path), plan_sweep(read_grid(str(path)), None, (), lambda _: 1, check_data=True)


def finish(runs: Sequence[PlannedRun], shards: Path, more: float = 0.0) -> list[str]:
    """Leave finished runs of a law in which the second arm needs 1.25 times the tokens."""
    paths = []
    for run in runs:
        width = run.config.model.hidden_size
        steps = run.config.total_steps
        k = 1.0 if run.name.startswith("vanilla") else 0.8
        loss = 2 + 40 / width**0.9 + 3 * (k * steps / 10) ** -0.5
        noise = 0.002 * np.sin(7 * run.config.run.seed + width + steps + 3 * k)
        paths.append(str(write_planned_run(run, shards, float(loss + noise + more))))
    return paths


def beside(run: PlannedRun, seed: int) -> PlannedRun:
    """The run of another seed."""
    values = run.config.as_dict()
    name = run.name.replace(f"-seed_{run.config.run.seed}", f"-seed_{seed}")
    values["run"].update(name=name, seed=seed)
    for section in ("attention", "data"):
        values[section]["seed"] = seed
    return replace(run, name=name, config=parse_config(values))


def invoke(*words: str) -> str:
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["ladder", *words])
    assert done.exit_code == 0, (done.output, done.exception)
    return " ".join(done.output.split())


def refused(*words: str) -> str:
    error = CliRunner().invoke(app, ["ladder", *words]).exception
    assert isinstance(error, UserError) and "\n" not in str(error)
    return str(error)


@pytest.mark.distributed
def test_the_next_size_is_predicted_under_seal_and_judged(
    tiny_shards: Path, tmp_path: Path
) -> None:
    grid, runs = rungs(tmp_path, tiny_shards)
    fitted = finish([run for run in runs if "-w96-" not in run.name], tiny_shards)
    ahead = [run for run in runs if "-w96-" in run.name]
    out = tmp_path / "out"
    command = ("--baseline", "vanilla", "--out", str(out))
    predict = ("--predict", grid, "--only", "*-w96-*")
    said = invoke(*fitted, *command, *predict)
    assert "orthogonal needs 1.2" in said and "0 of 0 sealed predictions inside, 4 to come" in said
    (path,) = (tmp_path / "runs/seals").iterdir()
    sealed = json.loads(path.read_text())["sealed"]
    assert [row["design"] for row in sealed["predictions"]] == [
        f"{arm}-w96-t{steps}" for arm in ("vanilla", "orthogonal") for steps in STEPS
    ]
    config = ahead[0].config
    size = count_parameters(config.shape, config.policy).total
    sizes = {row["parameters"] for row in sealed["predictions"]}
    assert sizes == {size}  # of vanilla, whatever the arm has
    assert {row["tokens"] for row in sealed["predictions"]} == {10 * 8 * 32, 20 * 8 * 32}
    assert sealed["fitted"].keys() == set(fitted) and sealed["factors"]["vanilla"] == [1, 1, 1]
    assert {row["low"] < row["loss"] < row["high"] for row in sealed["predictions"]} == {True}
    before = json.loads((out / "ladder.json").read_text())
    invoke(*fitted, *command, *predict)
    assert [*(tmp_path / "runs/seals").iterdir()] == [path]  # asked again, the same seal

    every = [*fitted, *finish(ahead[:-1], tiny_shards)]
    assert "has begun, too late to predict it" in refused(*every, *command, *predict)
    said = invoke(*every, *command)
    assert "3 of 3 sealed predictions inside, 1 to come" in said  # of which one seed is there
    every += finish(ahead[-1:], tiny_shards, more=0.5)
    said = invoke(*every, *command)
    assert "3 of 4 sealed predictions inside, 0 to come" in said and "OUTSIDE" in said
    said = invoke(*every[:-1], *command)
    assert "3 of 4 sealed predictions inside, 0 to come, 1 left out." in said
    invoke(*every, *command)
    content = json.loads((out / "ladder.json").read_text())
    for key in ("values", "factors", "cells"):
        assert content[key] == before[key]  # what was predicted is not fitted
    assert [row["outcome"] for row in content["predictions"]] == ["inside"] * 3 + ["OUTSIDE"]
    files = {"report.md", "report.html", "ladder.json", "ladder.png", "ladder.svg"}
    assert {path.name for path in out.iterdir()} == files
    assert "![ladder](ladder.png)" in (out / "report.md").read_text()

    further = write_planned_run(beside(ahead[0], seed=3), tiny_shards, 9.0)
    (path.parent / "strange.json").mkdir()
    said = invoke(*every, str(further), *command)
    assert f"not sealed, and so not judged: {further.name}" in said
    assert "strange.json is not a valid seal file" in said
    assert "3 of 4 sealed predictions inside, 0 to come." in said
    for key in ("values", "factors", "cells"):
        assert json.loads((out / "ladder.json").read_text())[key] == before[key]
    (path.parent / "strange.json").rmdir()
    changed = json.loads(path.read_text())
    changed["sealed"]["predictions"][3]["high"] = 99.0
    path.write_text(json.dumps(changed))
    said = invoke(*every, *command)
    assert "0 of 0 sealed predictions inside, 0 to come, 4 unsealed" in said
    assert "no longer has its own hash" in said
    own = [name for name in every if "-w32-t10-" in name]
    assert compare_runs([Path(name) for name in own], "vanilla").seals[0].startswith("Not sealed")


@pytest.mark.distributed
def test_what_is_no_ladder_is_refused(tiny_shards: Path, tmp_path: Path) -> None:
    _, runs = rungs(tmp_path, tiny_shards)
    paths = finish(runs[: len(runs) // 2], tiny_shards)
    base = ("--baseline", "vanilla", "--out", str(tmp_path / "out"))
    assert refused(*paths, "--baseline", "base") == (
        "no finished run is of the variant base; they are of orthogonal, vanilla"
    )
    said = refused(*paths, paths[0], *base)
    assert "cannot be used, another has its variant, size, length and seed" in said
    grid, _ = rungs(tmp_path / "runs", tiny_shards, "gaussian")
    assert "no finished run is of the variant gaussian" in refused(*paths, *base, "--predict", grid)
    other = Path(paths[0]) / "data.json"
    other.write_text(json.dumps(json.loads(other.read_text()) | {"fingerprint": "f" * 64}))
    said = refused(*paths, *base)
    assert "these runs cannot be compared: data.fingerprint is ffffffff…" in said
    assert "--subject" not in said
    assert "has other data than" in refused(paths[0], *base, "--predict", grid)
    assert_refused(
        warm_cli(["ladder", *paths[1:4], *base]),
        "a law of 1 variants needs 3 sizes, 2 lengths and 7",
    )
    assert not (tmp_path / "out").exists()
