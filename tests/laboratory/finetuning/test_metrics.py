"""GLUE's metrics against values worked out by hand, and the standard errors against formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest

from laboratory.finetuning.classification_data import TASKS
from laboratory.finetuning.metrics import (
    constant_score,
    measure,
    predictions_of,
    score,
    standard_error,
)

# 3 true positives, 1 false positive, 2 false negatives, 4 true negatives.
LABELS = np.array([1, 1, 1, 0, 1, 1, 0, 0, 0, 0])
FOUND = np.array([1, 1, 1, 1, 0, 0, 0, 0, 0, 0])
F1 = 2 * 3 / (2 * 3 + 1 + 2)
MATTHEWS = (3 * 4 - 1 * 2) / math.sqrt(4 * 5 * 5 * 6)


def test_metrics_by_hand() -> None:
    assert measure(TASKS["sst2"], LABELS, FOUND) == {"accuracy": 0.7}
    assert measure(TASKS["mrpc"], LABELS, FOUND) == pytest.approx({"accuracy": 0.7, "f1": F1})
    assert measure(TASKS["cola"], LABELS, FOUND) == pytest.approx({"matthews": MATTHEWS})
    assert score({"accuracy": 0.7, "f1": F1}) == pytest.approx((0.7 + F1) / 2)
    x = np.array([1.0, 2.0, 3.0, 5.0])
    y = np.array([1.0, 3.0, 2.0, 9.0])
    # Deviations (-1.75, -0.75, 0.25, 2.25) and (-2.75, -0.75, -1.75, 5.25); ranks differ by (0, 1,
    # -1, 0).
    pearson = 16.75 / math.sqrt(8.75 * 38.75)
    spearman = 1 - 6 * 2 / (4 * 15)
    assert measure(TASKS["stsb"], x, y) == pytest.approx({"pearson": pearson, "spearman": spearman})


def test_predictions_from_outputs() -> None:
    outputs = np.array([[0.1, -2.0, 0.3], [5.0, 1.0, 2.0]])
    assert predictions_of(TASKS["mnli"], outputs).tolist() == [2, 0]
    assert predictions_of(TASKS["stsb"], np.array([[2.5], [3.5]])).tolist() == [2.5, 3.5]


def test_a_model_that_has_learned_nothing() -> None:
    assert measure(TASKS["cola"], LABELS, np.ones(10, int)) == {"matthews": 0}
    assert measure(TASKS["stsb"], LABELS, np.ones(10)) == {"pearson": 0, "spearman": 0}
    labels = np.array([1] * 7 + [0] * 3)
    assert constant_score(TASKS["mrpc"], labels) == pytest.approx((0.7 + 14 / 17) / 2)
    assert constant_score(TASKS["cola"], labels) == 0


@pytest.mark.filterwarnings("error")
def test_examples_of_one_label_are_measured_without_a_warning() -> None:
    ones = np.ones(10, int)
    assert measure(TASKS["cola"], ones, ones) == {"matthews": 0}
    assert measure(TASKS["mrpc"], 0 * ones, 0 * ones) == {"accuracy": 1, "f1": 0}


def test_the_standard_error_of_sst2() -> None:
    labels = np.ones(872, int)
    found = np.array([1] * 798 + [0] * 74)
    assert 100 * standard_error(TASKS["sst2"], labels, found) == pytest.approx(0.944, abs=0.001)


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["cola", "mrpc", "stsb"])
def test_standard_errors_shrink_with_the_items(name: str) -> None:
    """By the root of how many there are, as the formula for accuracy does."""
    generator = np.random.default_rng(1)
    task = TASKS[name]
    labels = generator.integers(2, size=150)
    found = np.where(generator.random(150) < 0.8, labels, 1 - labels)
    if not task.labels:
        labels = labels + generator.random(150)
        found = found + generator.random(150)
    few, many = (
        standard_error(task, np.tile(labels, times), np.tile(found, times)) for times in (1, 4)
    )
    assert many / few == pytest.approx(0.5, rel=0.12)
    assert 0.01 < few < 0.1 and standard_error(task, labels, found) == few
