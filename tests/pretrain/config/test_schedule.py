"""Learning-rate schedules: hand-computed values and properties."""

from __future__ import annotations

import itertools
import math

import pytest

from pretrain.config.optimizer import OptimizerSection
from pretrain.config.schedule import last_stable_step, learning_rate
from pretrain.config.sections import ScheduleSection

PEAK = 0.01
KINDS = ["cosine", "cosine_restarts", "polynomial", "wsd"]


def rate(
    step: int, total: int = 110, *, kind: str = "cosine", warmup: int = 10, **settings: float
) -> float:
    values = {"steps": total, "kind": kind, "warmup_steps": warmup, "min_ratio": 0.1, **settings}
    return learning_rate(
        OptimizerSection(learning_rate=PEAK), ScheduleSection.model_validate(values), step, total
    )


def test_warmup_is_linear_from_the_first_step_to_the_peak() -> None:
    assert rate(1) == pytest.approx(0.001)
    assert rate(5) == pytest.approx(0.005)
    assert rate(10) == PEAK


def test_no_warmup_starts_below_the_peak() -> None:
    assert rate(1, 100, warmup=0, kind="polynomial") == pytest.approx(0.001 + 0.009 * 0.99)


def test_cosine_by_hand() -> None:
    assert rate(60) == pytest.approx(0.0055)  # half way
    assert rate(35) == pytest.approx(0.001 + 0.009 * (1 + math.sqrt(0.5)) / 2)  # a quarter
    assert rate(85) == pytest.approx(0.001 + 0.009 * (1 - math.sqrt(0.5)) / 2)


def test_polynomial_by_hand() -> None:
    assert rate(60, kind="polynomial") == pytest.approx(0.0055)
    assert rate(60, kind="polynomial", power=2.0) == pytest.approx(0.001 + 0.009 * 0.25)
    assert rate(60, kind="polynomial", power=0.5) == pytest.approx(0.001 + 0.009 * math.sqrt(0.5))


def test_restarts_end_each_cycle_at_the_floor_and_start_the_next_near_the_peak() -> None:
    two = [rate(step, kind="cosine_restarts", cycles=2) for step in range(1, 111)]
    assert two[35 - 1] == pytest.approx(0.0055)  # half of the first cycle
    assert two[60 - 1] == pytest.approx(0.001)
    assert two[61 - 1] == pytest.approx(0.001 + 0.009 * (1 + math.cos(math.pi / 50)) / 2)
    assert two[10:60] == pytest.approx(two[60:110])


def test_one_restart_cycle_is_the_plain_cosine() -> None:
    for step in range(1, 111):
        assert rate(step, kind="cosine_restarts") == rate(step)


def test_cycles_that_do_not_divide_the_steps_still_end_at_the_floor() -> None:
    rates = [rate(step, 100, kind="cosine_restarts", warmup=0, cycles=7) for step in range(1, 101)]
    rises = sum(after > previous for previous, after in itertools.pairwise(rates))
    assert rises == 6
    assert rates[-1] == 0.1 * PEAK


def test_constant_stays_at_the_peak() -> None:
    assert {rate(step, kind="constant") for step in range(10, 200)} == {PEAK}
    assert rate(5, kind="constant") == pytest.approx(PEAK / 2)


def test_wsd_by_hand() -> None:
    def wsd(step: int, total: int = 100, decay: float = 0.2) -> float:
        return rate(step, total, kind="wsd", decay=decay)

    assert wsd(5) == PEAK / 2 and {wsd(step) for step in range(10, 81)} == {PEAK}
    assert wsd(81) == pytest.approx(0.001 + 0.009 * 19 / 20)
    assert wsd(90) == pytest.approx(0.0055)
    assert wsd(100) == 0.001
    assert [wsd(step, 90, 1 - 10 / 90) for step in (10, 11, 90)] == [
        PEAK,
        pytest.approx(PEAK - 9e-3 / 80),
        1e-3,
    ]
    assert {wsd(step, decay=0.0) for step in range(10, 101)} == {PEAK}
    assert (wsd(99, decay=0.001), wsd(100, decay=0.001)) == (PEAK, 0.1 * PEAK)  # at least one step


@pytest.mark.parametrize("total", [40, 100, 160])
def test_horizons_share_their_steps_up_to_the_decay_of_the_shorter(total: int) -> None:
    settings = ScheduleSection(steps=total, kind="wsd", warmup_steps=10)
    stable = last_stable_step(settings, total)
    assert stable == 0.8 * total
    shorter, longer = (
        [rate(step, length, kind="wsd") for step in range(1, total)] for length in (total, 400)
    )
    assert shorter[:stable] == longer[:stable] and shorter[stable] < longer[stable]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("min_ratio", [0.0, 0.05, 1.0])
@pytest.mark.parametrize(("total", "warmup"), [(110, 10), (7, 0), (11, 10), (97_657, 4000)])
def test_the_last_step_is_exactly_the_floor(
    kind: str, min_ratio: float, total: int, warmup: int
) -> None:
    assert rate(total, total, kind=kind, warmup=warmup, min_ratio=min_ratio) == min_ratio * PEAK
    assert rate(total + 5, total, kind=kind, warmup=warmup, min_ratio=min_ratio) == min_ratio * PEAK


@pytest.mark.parametrize("kind", ["cosine", "polynomial"])
def test_the_decay_never_rises(kind: str) -> None:
    rates = [rate(step, kind=kind) for step in range(10, 111)]
    assert rates == sorted(rates, reverse=True)
    assert len(set(rates)) == len(rates)


def test_warmup_may_fill_the_run() -> None:
    assert rate(10, 10, warmup=10) == PEAK


def test_steps_count_from_one() -> None:
    with pytest.raises(ValueError, match="count from 1"):
        rate(0)
