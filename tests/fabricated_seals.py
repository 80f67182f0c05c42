"""Seals for tests: of planned runs on disk, and of runs of made-up losses, which lie nowhere."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from laboratory.runs.finished import FinishedRun, ModelSize, RunResult, StateBytes
from laboratory.study.hypothesis import Hypothesis
from laboratory.study.seal import Seal
from laboratory.study.sealed import Measure, Sealed, SealedGrid, design_settings
from laboratory.study.verdict import SEQUENTIAL, fixed_rule
from laboratory.sweep.grid import Grid, read_grid
from laboratory.sweep.plan import PlannedRun, plan_sweep, seal_plan
from pretrain.runs.curves import RunCurves
from pretrain.runs.seals import content_digest
from tests.fabricated_runs import write_planned_run
from tests.tiny import tiny_grid

SEEDS = (1, 2, 3, 4, 5)
DIRECTORY = Path("/campaign")
RAW = {"settings": {"new": design_settings({})}}
"""Content of the file of a seal, as far as the keys of its settings and its hash go."""


def planned(
    directory: Path,
    shards: Path,
    fixed: Mapping[str, Any] | None = None,
    seeds: Sequence[int] = SEEDS,
) -> tuple[Grid, list[PlannedRun]]:
    """Return a grid of vanilla and orthogonal, and its runs."""
    variants = {"attention.variant": ["vanilla", "orthogonal"]}
    grid = read_grid(tiny_grid(shards, directory, fixed or {}, grid=variants, seeds=[*seeds]))
    return grid, runs_of(grid)


def runs_of(grid: Grid) -> list[PlannedRun]:
    """Plan the runs of a grid."""
    return plan_sweep(grid, None, (), lambda _: 1, check_data=True)


def sealed(
    grid: Grid,
    runs: Sequence[PlannedRun],
    *claims: str,
    seeds: Sequence[int] | None = None,
    **measure: Any,
) -> Seal | None:
    """Seal claims about planned runs.

    Args:
        seeds: Seeds of a trial.
        measure: Fields of the measure in place of equal tokens at a fixed number of pairs.
    """
    tokens = {"match": "tokens", "subjects": [], "rule": fixed_rule(len(SEEDS))}
    return seal_plan(
        grid,
        None,
        (),
        runs,
        hypotheses=[Hypothesis.parse(claim) for claim in claims],
        stopping_rule="judged once",
        measure=Measure.model_validate(tokens | measure),
        seeds=seeds,
    )


def finish(runs: Sequence[PlannedRun], shards: Path, gap: float) -> list[Path]:
    """Leave finished runs; orthogonal's losses are `gap` nats above vanilla's, and noise."""
    paths = []
    for run in runs:
        seed = run.config.run.seed
        worse = run.config.attention.variant != "vanilla"
        loss = 4.0 + 0.1 * seed + worse * (gap + 0.001 * (-1) ** seed)
        paths.append(write_planned_run(run, shards, loss))
    return paths


@dataclass(frozen=True)
class Campaign:
    """A seal, and the losses of its runs.

    Attributes:
        seal: Of one hypothesis for each variant.
        losses: {variant: losses by seed, from seed 1 on}.
    """

    seal: Seal
    losses: Mapping[str, Sequence[float]]

    def runs(self, seeds: Sequence[int], variants: Sequence[str] = ("new",)) -> list[FinishedRun]:
        """Return the runs of some seeds, the baseline's first.

        Args:
            seeds: Of the pairs.
            variants: Beside the baseline.
        """
        return [
            made_run(name, seed, self.losses[name][seed - 1])
            for name in ("old", *variants)
            for seed in seeds
        ]


def made_run(name: str, seed: int, loss: float) -> FinishedRun:
    """Return a finished run of made-up numbers.

    Args:
        name: Of its variant.
        seed: Of the run, its bank and its data.
        loss: Validation loss, in nats per token.
    """
    config = {
        "run": {"name": f"{name}-seed_{seed}", "seed": seed},
        "attention": {"variant": name, "seed": seed},
        "data": {"seed": seed},
    }
    return FinishedRun(
        path=DIRECTORY / f"{name}-seed_{seed}",
        name=f"{name}-seed_{seed}",
        variant=name,
        seed=seed,
        config=config,
        environment={
            "git_commit": "c",
            "started": "2099-01-01T00:00:00+0000",
            "seals": [content_digest(RAW)],
        },
        data_fingerprint="d",
        validation_tokens={},
        zero_stage=1,
        result=RunResult(
            1, 1, loss, math.exp(loss), unigram_perplexity=9.0, perplexity_by_source={}
        ),
        size=ModelSize(1, 0),
        states=StateBytes(1, 1, 1, optimizer_state_bytes=1, checkpoint_bytes=1),
        curves=RunCurves(np.array([1]), np.array([1]), {}),
    )


def made_seal(pairs: int, variants: Sequence[str] = ("new",), trial: bool = False) -> Seal:
    """Return a seal that says of each variant that it is 2 % worse than the baseline.

    Args:
        pairs: That are sealed; of a trial at most.
        variants: Beside the baseline.
        trial: The seal is a trial's.
    """
    names = ("old", *variants)
    sealed = Sealed(
        hypotheses=[Hypothesis(name, "worse", 2.0, "old") for name in variants],
        stopping_rule="",
        fixed_n=not trial,
        measure=Measure(
            match="tokens", subjects=[], rule=SEQUENTIAL if trial else fixed_rule(pairs)
        ),
        grid=SealedGrid(file="grid.yaml", sha256=""),
        seeds=[*range(1, pairs + 1)],
        settings={name: design_settings(made_run(name, 1, 4.0).config) for name in names},
        other_seeds={name: {"attention.seed": None} for name in names},
        data=["d"],
        commit="c",
        sealed="2026-01-01T00:00:00+0000",
        earlier_seals=[],
    )
    return Seal(DIRECTORY / "seals/0.json", DIRECTORY, sealed, raw=RAW, intact=True)
