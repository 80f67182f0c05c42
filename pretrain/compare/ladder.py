"""Law of the loss over sizes and lengths, L(N, D) = E + A / N^a + B / (k D)^b, and what it predicts.

N is the number of parameters of the baseline at a shape, embeddings included, D the training tokens, and k an
arm's factor on the tokens, 1 for the baseline: the arm needs 1 / k of its tokens. Fits of such laws go wrong
in known ways (arXiv 2603.22339, 2502.18969). Here all cells are fitted at once, without parabolas through
runs of equal FLOPs; by variable projection from several starts, so that nothing hangs on one; all parameters
count; numbers are rounded for print only; too few sizes, lengths or cells are refused. Errors are squared,
not Huber's: a cell that the law misses widens the intervals in place of being played down.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
from scipy.optimize import least_squares, nnls

from pretrain.errors import UserError
from pretrain.runs.curves import Floats

LAW = ("E", "A", "B", "a", "b")
FITS, STARTS = 1000, (0.1, 0.3, 0.6, 1.2)


@dataclass(frozen=True)
class Cell:
    """Runs of one arm, size and length: {seed: validation loss} in nats per token, NaN of a run to come."""

    design: str
    parameters: int
    tokens: int
    losses: dict[int, float]

    @property
    def arm(self) -> str:
        """Return the first part of the runs' name, up to a dash."""
        return self.design.partition("-")[0]

    @property
    def loss(self) -> float:
        """Return the mean over seeds."""
        return float(np.mean([*self.losses.values()]))


@dataclass(frozen=True)
class Ladder:
    """Law of the `cells`: {name: (value, low, high)} of E, A, B, a, b, and of the arms' k, baseline first.

    `predictions`: of each cell ahead its place, the `loss` by the law, and the interval of its runs' mean.
    """

    cells: Sequence[Cell]
    values: Mapping[str, Sequence[float]]
    factors: Mapping[str, Sequence[float]]
    predictions: Sequence[Mapping[str, Any]]

    def loss(self, arm: str, parameters: int, tokens: Any) -> Any:
        """Return the law's loss at a length, or an array of them."""
        E, A, B, a, b = (self.values[name][0] for name in LAW)
        return E + A / parameters**a + B / (self.factors[arm][0] * tokens) ** b


def fit_ladder(cells: Sequence[Cell], baseline: str, ahead: Sequence[Cell] = ()) -> Ladder:
    """Fit the law, refit it to bootstrap samples for the intervals, and predict the cells `ahead`.

    A refit to the law moved by d stands for a truth from which the fitted runs deviate by -d, and the runs
    ahead too, as far as they share seeds. Raises UserError: too few sizes, lengths or cells.
    """
    cells = sorted(
        cells, key=lambda cell: (cell.arm != baseline, cell.arm, cell.parameters, cell.tokens)
    )
    arms = list(dict.fromkeys(cell.arm for cell in cells))
    sizes, lengths = len({cell.parameters for cell in cells}), len({cell.tokens for cell in cells})
    if sizes < 3 or lengths < 2 or len(cells) < len(arms) + 6:
        raise UserError(
            f"a law of {len(arms)} arms needs 3 sizes, 2 lengths and {len(arms) + 6} cells (all of these), "
            f"not {sizes}, {lengths} and {len(cells)}; train more, or leave an arm out"
        )
    points, there = _points(cells, arms), _points(ahead, arms)
    losses = np.array([cell.loss for cell in cells])
    starts = (
        [*pair, *np.zeros(len(arms) - 1)] for pair in itertools.product(np.log(STARTS), repeat=2)
    )
    best = min((_fit(points, losses, start) for start in starts), key=itemgetter(1))[0]
    law = _law(best, points)
    moved = _deviations(cells, ahead, np.log(losses / law))
    draws = [_fit(points, law * np.exp(own), np.log(best[3:]))[0] for own in moved[:, : len(cells)]]
    runs_ahead = [_law(own, there) for own in draws] / np.exp(moved[:, len(cells) :])
    ends = np.transpose(
        [_law(best, there), *np.quantile(runs_ahead, [0.05, 0.95], axis=0)]
    ).tolist()
    found = np.insert(
        [best, *np.quantile(draws, [0.025, 0.975], axis=0)], len(LAW), 1.0, axis=1
    ).T.tolist()
    values, factors = (
        dict(zip(LAW, found, strict=False)),
        dict(zip(arms, found[len(LAW) :], strict=True)),
    )
    rows = [
        {
            "design": cell.design,
            "parameters": cell.parameters,
            "tokens": cell.tokens,
            "seeds": [*cell.losses],
        }
        | dict(zip(("loss", "low", "high"), end, strict=True))
        for cell, end in zip(ahead, ends, strict=True)
    ]
    return Ladder(cells, values, factors, rows)


def _points(cells: Sequence[Cell], arms: Sequence[str]) -> Floats:
    """Return log N and log D, and 1 or 0 for each arm but the first, [cells, 1 + arms]."""
    rows = [
        [np.log(c.parameters), np.log(c.tokens), *(c.arm == arm for arm in arms[1:])] for c in cells
    ]
    return np.reshape(rows, (-1, 1 + len(arms)))


def _terms(logs: Floats, points: Floats) -> Floats:
    """Return what E, A and B are multiplied with, [cells, 3], by the logarithms of a, b and the factors."""
    by_size, by_length = -np.exp(logs[:2])[:, None] * [
        points[:, 0],
        points[:, 1:] @ [1.0, *logs[2:]],
    ]
    return np.stack([np.ones(len(points)), np.exp(by_size), np.exp(by_length)], axis=1)


def _law(values: Floats, points: Floats) -> Floats:
    return _terms(np.log(values[3:]), points) @ values[:3]


def _fit(points: Floats, losses: Floats, start: Any) -> tuple[Floats, float]:
    """Return the values with the least squares of relative errors, and their sum, by variable projection.

    For any logarithms of a, b and the factors, as `start` has, E, A and B are linear least squares.
    """

    def solve(logs: Floats) -> tuple[Floats, Floats]:
        terms = _terms(logs, points) / losses[:, None]
        scales = terms.max(axis=0)
        linear = nnls(terms / scales, np.ones(len(losses)))[0] / scales
        return linear, terms @ linear - 1

    low, high = (
        np.log([at] * 2 + [far] * (len(start) - 2)) for at, far in ((0.02, 0.01), (4.0, 100.0))
    )
    found = least_squares(
        lambda logs: solve(logs)[1], np.clip(start, low + 1e-6, high - 1e-6), bounds=(low, high)
    )
    return np.append(solve(found.x)[0], np.exp(found.x)), found.cost


def _deviations(cells: Sequence[Cell], ahead: Sequence[Cell], residuals: Floats) -> Floats:
    """Draw deviations from the law in log loss, [FITS, cells and ahead], the sum of three.

    What a seed does to all its runs alike, for they share their text: the mean over cells of its deviations
    from their means. What the law misses at a size and length: the residuals' mean over arms there. What is
    left to an arm: the rest of them, of a place drawn at random. Student's t and the factors make up for few
    seeds, for few places, for the values that were fitted, and for cells ahead of fewer seeds.
    """

    def student(
        stream: int, columns: int, free: int
    ) -> Floats:  # each row over one estimate of the spread
        random = np.random.default_rng(
            stream
        )  # cells ahead come last, so that they change no others
        return (
            np.sqrt(free / random.chisquare(free, FITS)) * random.standard_normal((columns, FITS))
        ).T

    every, arms = [*cells, *ahead], sorted({cell.arm for cell in cells})
    counts, runs = (
        np.array([len(cell.losses) for cell in every]),
        min(len(cell.losses) for cell in cells),
    )
    seeds, free = sorted({seed for cell in every for seed in cell.losses}), max(1, runs - 1)
    own = [[cell.losses.get(seed, np.nan) / cell.loss - 1 for seed in seeds] for cell in cells]
    alike = np.ma.masked_invalid(own).mean(axis=0) * np.sqrt((free + 1) / free)
    alike = alike.filled(np.sqrt((alike**2).mean()))  # seeds that are only ahead
    has = np.array([[seed in cell.losses for seed in seeds] for cell in every]) / counts[:, None]

    places = list(dict.fromkeys((cell.parameters, cell.tokens) for cell in every))
    place = [places.index((cell.parameters, cell.tokens)) for cell in every]
    arm, known = [arms.index(cell.arm) for cell in every], max(place[: len(cells)]) + 1
    table = np.ma.masked_all((known, len(arms)))
    table[place[: len(cells)], arm[: len(cells)]] = residuals
    middle, few = table.mean(axis=1), max(1, known - len(LAW))
    missed = student(0, len(places), few) * np.sqrt((middle**2).sum() / few)
    left, few = len(cells) - known, max(1, len(cells) - known - len(arms) + 1)
    rest = (table - middle[:, None]).filled(0.0) * np.sqrt(left / few)
    drawn = np.random.default_rng(1).integers(known, size=(len(places), FITS)).T
    single = missed[:, place] + student(2, len(places), few)[:, place] * rest[drawn[:, place], arm]
    return (student(3, len(seeds), free) * alike) @ has.T + single * np.sqrt(
        np.maximum(1, runs / counts)
    )
