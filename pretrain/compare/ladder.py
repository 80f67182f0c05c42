"""Law of the loss over sizes and lengths, L(N, D) = E + A / N^a + B / (k D)^b, and predictions.

N is the number of parameters of the baseline at a shape, embeddings included, D the training
tokens, and k an arm's factor on the tokens, 1 for the baseline: the arm needs 1 / k of its tokens.
Fits of such laws go wrong in known ways (arXiv 2603.22339, 2502.18969). Here all cells are fitted
at once, without parabolas through runs of equal FLOPs; by variable projection from several starts,
so that nothing hangs on one; all parameters count; numbers are rounded for print only; too few
sizes, lengths or cells are refused. Errors are squared, not Huber's: a cell that the law misses
widens the intervals in place of being played down.
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
from pretrain.study.sealed import Prediction, arm_of

LAW = ("E", "A", "B", "a", "b")
FITS = 1000
"""Refits for the intervals."""
STARTS = (0.1, 0.3, 0.6, 1.2)
"""Values of a and of b that the fit begins from."""
_EXPONENTS = (0.02, 4.0)
_FACTORS = (0.01, 100.0)
"""Bounds of a and b, and of the arms' k."""


@dataclass(frozen=True)
class Cell:
    """Runs of one arm, size and length.

    Attributes:
        design: name of the runs without the seed.
        parameters: of the baseline at this shape.
        tokens: training tokens.
        losses: {seed: validation loss} in nats per token, NaN of a run to come.
    """

    design: str
    parameters: int
    tokens: int
    losses: dict[int, float]

    @property
    def arm(self) -> str:
        """Return the first part of the runs' name, up to a dash."""
        return arm_of(self.design)

    @property
    def place(self) -> tuple[int, int]:
        """Return size and length."""
        return self.parameters, self.tokens

    @property
    def loss(self) -> float:
        """Return the mean over seeds."""
        return float(np.mean([*self.losses.values()]))


@dataclass(frozen=True)
class Ladder:
    """Fitted law.

    Attributes:
        cells: what it was fitted to.
        values: {name: value, low, high} of E, A, B, a, b, with 95 % intervals.
        factors: {arm: k, low, high}, the baseline first.
        predictions: of the cells ahead, with the 90 % interval of their runs' mean.
    """

    cells: Sequence[Cell]
    values: Mapping[str, Sequence[float]]
    factors: Mapping[str, Sequence[float]]
    predictions: Sequence[Prediction]

    def loss(self, arm: str, parameters: int, tokens: Any) -> Any:
        """Return the law's loss in nats per token.

        Args:
            arm: one of `factors`.
            parameters: size.
            tokens: length, or an array of lengths.
        """
        E, A, B, a, b = (self.values[name][0] for name in LAW)
        return E + A / parameters**a + B / (self.factors[arm][0] * tokens) ** b


def fit_ladder(cells: Sequence[Cell], baseline: str, ahead: Sequence[Cell] = ()) -> Ladder:
    """Fit the law, refit it to bootstrap samples for the intervals, and predict.

    A refit to the law moved by d stands for a truth from which the fitted runs deviate by -d, and
    the runs ahead too, as far as they share seeds.

    Args:
        cells: what is fitted.
        baseline: the arm whose factor is 1.
        ahead: cells to predict.

    Raises:
        UserError: there are too few sizes, lengths or cells.
    """
    cells = sorted(
        cells, key=lambda cell: (cell.arm != baseline, cell.arm, cell.parameters, cell.tokens)
    )
    arms = list(dict.fromkeys(cell.arm for cell in cells))
    _refuse_too_few(cells, arms)
    points = _points(cells, arms)
    points_ahead = _points(ahead, arms)
    losses = np.array([cell.loss for cell in cells])
    exponents = itertools.product(np.log(STARTS), repeat=2)
    starts = ([*pair, *np.zeros(len(arms) - 1)] for pair in exponents)
    best = min((_fit(points, losses, start) for start in starts), key=itemgetter(1))[0]
    law = _law(best, points)
    moved = _deviations(cells, ahead, np.log(losses / law))
    own = moved[:, : len(cells)]
    draws = [_fit(points, law * np.exp(row), np.log(best[3:]))[0] for row in own]
    runs_ahead = [_law(draw, points_ahead) for draw in draws] / np.exp(moved[:, len(cells) :])
    ends = [_law(best, points_ahead), *np.quantile(runs_ahead, [0.05, 0.95], axis=0)]
    found = np.array([best, *np.quantile(draws, [0.025, 0.975], axis=0)])
    found = np.insert(found, len(LAW), 1.0, axis=1).T.tolist()  # the baseline's factor
    return Ladder(
        cells=cells,
        values=dict(zip(LAW, found[: len(LAW)], strict=True)),
        factors=dict(zip(arms, found[len(LAW) :], strict=True)),
        predictions=[
            Prediction(
                design=cell.design,
                parameters=cell.parameters,
                tokens=cell.tokens,
                seeds=[*cell.losses],
                loss=loss,
                low=low,
                high=high,
            )
            for cell, (loss, low, high) in zip(ahead, np.transpose(ends).tolist(), strict=True)
        ],
    )


def _refuse_too_few(cells: Sequence[Cell], arms: Sequence[str]) -> None:
    sizes = len({cell.parameters for cell in cells})
    lengths = len({cell.tokens for cell in cells})
    if sizes < 3 or lengths < 2 or len(cells) < len(arms) + 6:
        raise UserError(
            f"a law of {len(arms)} variants needs 3 sizes, 2 lengths and {len(arms) + 6} cells "
            f"(all of these), not {sizes}, {lengths} and {len(cells)}; train more, or leave a "
            "variant out"
        )


def _points(cells: Sequence[Cell], arms: Sequence[str]) -> Floats:
    """Return log N and log D, and 1 or 0 for each arm but the first, [cells, 1 + arms]."""
    rows = [
        [np.log(c.parameters), np.log(c.tokens), *(c.arm == arm for arm in arms[1:])] for c in cells
    ]
    return np.reshape(rows, (-1, 1 + len(arms)))


def _terms(logs: Floats, points: Floats) -> Floats:
    """Return what E, A and B are multiplied with, [cells, 3].

    `logs` are the logarithms of a, b and the factors.
    """
    by_size = -np.exp(logs[0]) * points[:, 0]
    by_length = -np.exp(logs[1]) * (points[:, 1:] @ [1.0, *logs[2:]])
    return np.stack([np.ones(len(points)), np.exp(by_size), np.exp(by_length)], axis=1)


def _law(values: Floats, points: Floats) -> Floats:
    """Return the loss at each point, [cells], by the values E, A, B, a, b and factors."""
    return _terms(np.log(values[3:]), points) @ values[:3]


def _fit(points: Floats, losses: Floats, start: Any) -> tuple[Floats, float]:
    """Return the values with the least squares of relative errors, and their sum.

    By variable projection: for any logarithms of a, b and the factors, as `start` has, E, A and B
    are linear least squares.
    """

    def solve(logs: Floats) -> tuple[Floats, Floats]:
        terms = _terms(logs, points) / losses[:, None]
        scales = terms.max(axis=0)
        linear = nnls(terms / scales, np.ones(len(losses)))[0] / scales
        return linear, terms @ linear - 1

    low, high = (
        np.log([exponent] * 2 + [factor] * (len(start) - 2))
        for exponent, factor in zip(_EXPONENTS, _FACTORS, strict=True)
    )
    start = np.clip(start, low + 1e-6, high - 1e-6)
    found = least_squares(lambda logs: solve(logs)[1], start, bounds=(low, high))
    return np.append(solve(found.x)[0], np.exp(found.x)), found.cost


def _deviations(cells: Sequence[Cell], ahead: Sequence[Cell], residuals: Floats) -> Floats:
    """Draw deviations from the law in log loss, [FITS, cells and ahead], the sum of three.

    What a seed does to all its runs alike, because they share their text: the mean over cells of
    its deviations from their means. What the law misses at a size and length: the residuals' mean
    over arms there. What is left to an arm: the rest of them, of a place drawn at random. Student's
    t and the factors make up for few seeds, for few places, for the values that were fitted, and
    for cells ahead of fewer seeds.
    """
    every = [*cells, *ahead]
    counts = np.array([len(cell.losses) for cell in every])
    runs = min(len(cell.losses) for cell in cells)
    alone = np.sqrt(np.maximum(1, runs / counts))
    return _of_seeds(cells, every, runs) + _of_places(cells, every, residuals) * alone


def _student(stream: int, columns: int, free: int) -> Floats:
    """Draw Student's t, [FITS, columns], each row over one estimate of the spread."""
    random = np.random.default_rng(stream)
    spread = np.sqrt(free / random.chisquare(free, FITS))
    # Column after column: cells ahead come last, so that they change no others.
    return (spread * random.standard_normal((columns, FITS))).T


def _of_seeds(cells: Sequence[Cell], every: Sequence[Cell], runs: int) -> Floats:
    """Draw what a seed does to all its runs, [FITS, every]."""
    seeds = sorted({seed for cell in every for seed in cell.losses})
    free = max(1, runs - 1)
    own = [[cell.losses.get(seed, np.nan) / cell.loss - 1 for seed in seeds] for cell in cells]
    alike = np.ma.masked_invalid(own).mean(axis=0) * np.sqrt((free + 1) / free)
    alike = alike.filled(np.sqrt((alike**2).mean()))  # seeds that are only ahead
    shares = [[(seed in cell.losses) / len(cell.losses) for seed in seeds] for cell in every]
    return (_student(3, len(seeds), free) * alike) @ np.array(shares).T


def _of_places(cells: Sequence[Cell], every: Sequence[Cell], residuals: Floats) -> Floats:
    """Draw what the law misses at a size and length, and what is left to an arm, [FITS, every]."""
    arms = sorted({cell.arm for cell in cells})
    arm = [arms.index(cell.arm) for cell in every]
    places = list(dict.fromkeys(cell.place for cell in every))
    place = [places.index(cell.place) for cell in every]
    known = len({cell.place for cell in cells})
    table = np.ma.masked_all((known, len(arms)))
    table[place[: len(cells)], arm[: len(cells)]] = residuals
    middle = table.mean(axis=1)
    free = max(1, known - len(LAW))
    missed = _student(0, len(places), free) * np.sqrt((middle**2).sum() / free)
    left = len(cells) - known
    free = max(1, left - len(arms) + 1)
    rest = (table - middle[:, None]).filled(0.0) * np.sqrt(left / free)
    drawn = np.random.default_rng(1).integers(known, size=(len(places), FITS)).T
    of_arm = _student(2, len(places), free)[:, place] * rest[drawn[:, place], arm]
    return missed[:, place] + of_arm
