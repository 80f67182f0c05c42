"""Seals: written once before the first run, judged by compare, and honest about what has changed
since."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pretrain.compare.comparison import compare_runs
from pretrain.config.sources import dump_yaml, parse_overrides
from pretrain.errors import UserError
from pretrain.runs.environment import git_commit
from pretrain.study.seal import Hypothesis, Seal, read_seals
from pretrain.sweep.grid import Grid, read_grid
from pretrain.sweep.plan import PlannedRun, plan_sweep, seal_plan
from tests.fabricated_runs import write_planned_run
from tests.tiny import tiny_overrides

SEEDS = [1, 2, 3, 4, 5]


def planned(directory: Path, shards: Path, rate: float = 1e-3) -> tuple[Grid, list[PlannedRun]]:
    tiny = dict(parse_overrides(tiny_overrides(shards, directory, "unused")))
    del tiny["run.name"], tiny["run.directory"]
    content = {
        "directory": str(directory / "runs"),
        "set": tiny | {"optimizer.learning_rate": rate},
        "grid": {"attention.variant": ["vanilla", "orthogonal"]},
        "seeds": SEEDS,
    }
    path = directory / "grid.yaml"
    path.write_text(dump_yaml(content))
    grid = read_grid(str(path))
    return grid, plan_sweep(grid, None, (), lambda _: 1, check_data=True)


def sealed(grid: Grid, runs: list[PlannedRun], *texts: str) -> Seal | None:
    claims = [Hypothesis.parse(text) for text in texts]
    return seal_plan(grid, None, (), runs, hypotheses=claims, stopping_rule="judged once")


def finish(runs: list[PlannedRun], shards: Path, gap: float) -> list[Path]:
    """Leave finished runs of these plans; orthogonal's losses are `gap` nats above vanilla's, and
    noise."""
    paths = []
    for run in runs:
        seed, variant = run.config.run.seed, run.config.attention.variant
        loss = 4.0 + 0.1 * seed + (variant != "vanilla") * (gap + 0.001 * (-1) ** seed)
        paths.append(write_planned_run(run, shards, loss))
    return paths


def test_hits_and_misses_and_nothing_changed(tiny_shards: Path, tmp_path: Path) -> None:
    grid, runs = planned(tmp_path, tiny_shards)
    texts = [f"orthogonal {claim} vanilla" for claim in ("within 5% of", "better 1% than")]
    texts.append("orthogonal within 2% of vanilla")
    seal = sealed(grid, runs, *texts)
    assert seal is not None and seal.path.is_file()
    assert sealed(grid, runs, *texts) == seal  # nothing is written again
    paths = finish(runs, tiny_shards, gap=0.0198)
    again = plan_sweep(grid, None, (), lambda _: 1, check_data=False)
    assert sealed(grid, again, *texts[:2]) is None  # a run has begun
    (sentence,) = compare_runs(paths, "vanilla").seals
    assert "orthogonal within 5 % of vanilla': HIT" in sentence
    assert "orthogonal better 1 % than vanilla': MISS" in sentence
    assert "orthogonal within 2 % of vanilla': not decided" in sentence
    unclean = str(git_commit()).endswith("+")
    changed = "changed since: a checkout had uncommitted changes."
    assert (changed if unclean else "nothing has changed since") in sentence


def test_all_that_changed_since_is_named(tiny_shards: Path, tmp_path: Path) -> None:
    grid, runs = planned(tmp_path, tiny_shards)
    seal = sealed(grid, runs, "orthogonal worse 1% than vanilla")
    assert seal is not None
    grid, other = planned(tmp_path, tiny_shards, rate=2e-3)
    paths = finish([*runs[:5], other[5], *runs[6:9]], tiny_shards, gap=0.1)
    environment = paths[0] / "environment.json"
    facts = json.loads(environment.read_text())
    early = {"started": "2001-01-01T00:00:00+0000", "git_commit": "abc+"}
    environment.write_text(json.dumps(facts | early))
    content = json.loads(seal.path.read_text())
    content["sealed"]["hypotheses"][0]["margin"] = 2.0
    seal.path.write_text(json.dumps(content))
    (sentence,) = compare_runs(paths, "vanilla").seals
    for change in (
        f"{seal.path} no longer has its own hash",
        "has changed or is gone; ",
        "1 of the sealed runs are not among these",
        f"optimizer.learning_rate is 0.002 in {other[5].name}, sealed 0.001",
        f"{runs[0].name} began before",
        "runs are of commit abc+, sealed at",
        "a checkout had uncommitted changes",
    ):
        assert change in sentence, (change, sentence)


def test_runs_without_a_seal_are_said_to_be(tiny_shards: Path, tmp_path: Path) -> None:
    _, runs = planned(tmp_path, tiny_shards)
    paths = finish(runs, tiny_shards, gap=0.1)
    assert compare_runs(paths, "vanilla").seals[0].startswith("Not sealed")
    (tmp_path / "runs/seals").mkdir()
    (tmp_path / "runs/seals/x.json").write_text("{}")
    with pytest.raises(
        UserError, match=r"x\.json is not a valid seal file \(sealed: Field required\)"
    ):
        read_seals([tmp_path / "runs"])


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("orthogonal is nice", "is no hypothesis; write it as"),
        ("orthogonal within 0% of vanilla", "must be above 0"),
        ("orthogonal better 1.2.3% than vanilla", "is no hypothesis"),
        ("gaussian better 1% than vanilla", "'gaussian', which is none of vanilla, orthogonal"),
    ],
)
def test_what_is_no_hypothesis(
    text: str, complaint: str, tiny_shards: Path, tmp_path: Path
) -> None:
    grid, runs = planned(tmp_path, tiny_shards)
    with pytest.raises(UserError, match=complaint):
        sealed(grid, runs, text)
