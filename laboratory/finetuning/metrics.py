"""Metrics of GLUE's tasks, and their standard errors over items.

The standard error is of a fixed model over other items of the same kind: what a validation set of n
items can tell apart at all. For accuracy it is √(p (1 − p) / n), for the others that of scipy's
bootstrap.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from laboratory.finetuning.classification_data import Task

RESAMPLES = 1000


def predictions_of(task: Task, outputs: np.ndarray) -> np.ndarray:
    """Return the predictions that a classifier's outputs stand for.

    Args:
        outputs: `[items, numbers]`.

    Returns:
        `[items]`, numbers of labels, or scores.
    """
    return outputs.reshape(len(outputs), -1).argmax(axis=1) if task.labels else outputs.reshape(-1)


def measure(task: Task, labels: np.ndarray, predictions: np.ndarray) -> dict[str, float]:
    """Return the task's metrics by name; 1 is the best.

    An undefined correlation counts as 0.

    Args:
        labels: `[items]`.
        predictions: `[items]`.
    """
    functions: dict[str, Callable[..., float]] = {
        "accuracy": lambda labels, predictions: np.mean(labels == predictions),
        "f1": _f1,
        "matthews": partial(_correlation, stats.pearsonr),  # the same for labels 0 and 1
        "pearson": partial(_correlation, stats.pearsonr),
        "spearman": partial(_correlation, stats.spearmanr),
    }
    return {name: float(functions[name](labels, predictions)) for name in task.metrics}


def constant_score(task: Task, labels: ArrayLike) -> float:
    """Return the score of a model that always gives the most frequent label.

    Args:
        labels: `[items]`.
    """
    labels = np.array(labels)
    values, counts = np.unique(labels, return_counts=True)
    return score(measure(task, labels, np.full(len(labels), values[counts.argmax()])))


def score(measured: dict[str, float]) -> float:
    """Return GLUE's score of a task: the mean of its metrics."""
    return sum(measured.values()) / len(measured)


def standard_error(task: Task, labels: np.ndarray, predictions: np.ndarray) -> float:
    """Return the standard error of the score over the choice of items.

    Args:
        labels: `[items]`.
        predictions: `[items]`.
    """
    if task.metrics == ("accuracy",):
        p = float((labels == predictions).mean())
        return math.sqrt(p * (1 - p) / len(labels))
    resampled = stats.bootstrap(
        (labels, predictions),
        lambda *drawn: score(measure(task, *drawn)),
        paired=True,
        vectorized=False,
        n_resamples=RESAMPLES,
        method="percentile",
        random_state=0,
    )
    return float(resampled.standard_error)


def _f1(labels: np.ndarray, predictions: np.ndarray) -> float:
    """Return F1 of label 1; 0 if neither labels nor predictions have a 1."""
    positives = np.count_nonzero(labels == 1) + np.count_nonzero(predictions == 1)
    true_positives = np.count_nonzero((labels == 1) & (predictions == 1))
    return 2 * true_positives / positives if positives else 0.0


def _correlation(test: Callable[..., Any], labels: np.ndarray, predictions: np.ndarray) -> float:
    # scipy warns and returns NaN for a constant input.
    if min(np.ptp(labels), np.ptp(predictions)) == 0:
        return 0.0
    return float(test(labels, predictions).statistic)
