"""compare's numbers: against hand-worked and published examples, and numpy and scipy used
directly."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from laboratory.compare.compare_runs import compare_runs
from laboratory.compare.comparison import Comparison, quartiles
from laboratory.compare.convergence import after_warm_up, smoothed_loss, spikes, tail_variance
from laboratory.compare.summary import in_short
from laboratory.compare.theory import expected_cost
from laboratory.runs.finished import ModelSize, read_finished_run
from laboratory.study.gaps import NATS, SCORES, PairedGap, adjust, holm, paired_gap
from laboratory.study.tables import gap_sentence, margin, verdict
from pretrain.reporting.text import spread
from tests.fabricated_runs import BATCH, LENGTH, STEPS, write_run

# Extra hours of sleep of ten patients under two drugs (Student, Biometrika 6, 1908).
SLEEP = (
    (0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0),
    (1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4),
)


def by_seed(values: tuple[float, ...]) -> dict[int, float]:
    return dict(enumerate(values, start=1))


def gap_of(values: tuple[float, ...], base: tuple[float, ...]) -> PairedGap:
    gap = paired_gap("vanilla", by_seed(values), by_seed(base), NATS)
    assert gap is not None
    return gap


def test_students_sleep_data() -> None:
    """The textbook's answers: mean difference 1.58, t = 4.0621, p = 0.002833, interval 0.7001 to
    2.4599."""
    gap = gap_of(SLEEP[1], SLEEP[0])
    assert gap.n == 10
    assert gap.mean == pytest.approx(1.58)
    assert gap.t == pytest.approx(4.0621, abs=5e-5)
    assert gap.t_p == pytest.approx(0.002833, abs=5e-7)
    assert (gap.low, gap.high) == pytest.approx((0.7001142, 2.4598858), abs=5e-7)


def test_many_pairs_against_numpy_and_scipy_directly() -> None:
    generator = np.random.default_rng(5)
    base = generator.normal(4.0, 0.1, 9)
    other = base + generator.normal(0.03, 0.05, 9)
    gap = gap_of(tuple(other.tolist()), tuple(base.tolist()))
    d = other - base
    error = d.std(ddof=1) / 3
    assert gap.mean == pytest.approx(d.mean())
    assert gap.sd == pytest.approx(d.std(ddof=1))
    ends = stats.t.interval(0.95, 8, loc=d.mean(), scale=error)
    assert (gap.low, gap.high) == pytest.approx(ends)
    assert gap.t_p == pytest.approx(2 * stats.t.sf(abs(d.mean() / error), 8))
    assert gap.cohens_dz == pytest.approx(d.mean() / d.std(ddof=1))
    assert gap.wilcoxon_p == pytest.approx(signed_rank_p(d))


def signed_rank_p(d: np.ndarray) -> float:
    """Two-sided exact p of the signed-rank test by going through all sign patterns."""
    ranks = stats.rankdata(np.abs(d))
    sums = np.array([ranks @ np.array(signs) for signs in itertools.product((0, 1), repeat=len(d))])
    observed = ranks[d > 0].sum()
    return 2 * min((sums <= observed).mean(), (sums >= observed).mean())


def test_pairs_are_made_by_seed_and_not_by_order() -> None:
    gap = paired_gap("vanilla", {3: 1.5, 1: 2.0, 9: 7.0}, {1: 1.0, 2: 5.0, 3: 1.0}, NATS)
    assert gap is not None
    assert (gap.seeds, gap.differences) == ((1, 3), (1.0, 0.5))
    assert paired_gap("vanilla", {1: 2.0}, {2: 1.0}, NATS) is None


def test_a_loss_beyond_all_perplexities_is_no_traceback() -> None:
    gap = paired_gap("vanilla", {1: 2.0**32}, {1: 4.0}, NATS)
    assert gap is not None and gap.mean == 2.0**32 - 4 and gap.perplexity_ratio == math.inf


def test_what_few_or_equal_values_leave_undefined() -> None:
    single = gap_of((4.1,), (4.0,))
    assert single.mean == pytest.approx(0.1) and single.low is None and single.t_p is None
    equal = gap_of((4.1, 3.1, 2.1, 1.1, 5.1), (4.0, 3.0, 2.0, 1.0, 5.0))
    assert equal.sd == pytest.approx(0, abs=1e-12)
    assert equal.t_p is None and equal.cohens_dz is None and not equal.significance_claimed
    assert "nothing to test" in verdict(equal)
    assert spread([]) is None
    lone = spread([2.0])
    assert lone is not None and (lone.n, lone.mean, lone.sd) == (1, 2.0, None)


@pytest.mark.parametrize("shift", [0.038, -0.038, 0.0])
def test_the_margin_of_equivalence_by_two_one_sided_tests(shift: float) -> None:
    """At the margin the worse of both tests has p = 2.5 %; a bit more and both hold, a bit less and
    not."""
    d = np.array([-0.008, -0.028, 0.042, -0.038, 0.032]) + shift
    gap = gap_of(tuple((4.0 + d).tolist()), (4.0,) * 5)
    within = gap.equivalent_within
    assert within is not None and gap.low is not None and gap.high is not None
    assert within == pytest.approx(max(math.exp(gap.high) - 1, 1 - math.exp(gap.low)))

    def worse(margin: float) -> float:
        below = stats.ttest_1samp(d, math.log(1 + margin), alternative="less").pvalue
        above = stats.ttest_1samp(d, math.log(1 - margin), alternative="greater").pvalue
        return float(max(below, above))

    assert worse(within) == pytest.approx(0.025)
    assert worse(within + 1e-4) < 0.025 < worse(within - 1e-4)
    shown = float(margin(gap).removesuffix(" %")) / 100
    assert shown >= within > shown - 0.001
    sentence = gap_sentence("o", replace(gap, t_p_holm=0.3))
    assert f"; the data allow a difference up to {margin(gap)} of perplexity." in sentence


def test_no_equivalence_with_few_pairs_or_of_scores() -> None:
    four = gap_of((4.1, 4.0, 4.2, 4.1), (4.0, 4.1, 4.1, 4.0))
    assert four.low is not None and four.equivalent_within is None and margin(four) == "–"
    assert "allow" not in gap_sentence("o", four)
    scores = paired_gap("b", by_seed((0.5, 0.6, 0.7, 0.6, 0.5)), by_seed((0.5,) * 5), SCORES)
    assert scores is not None and scores.equivalent_within is None


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, None, 0.9]) == [1.0, None, 1.0]
    assert holm([]) == []
    once, twice = adjust([gap_of(SLEEP[1], SLEEP[0]), gap_of(SLEEP[0], SLEEP[1])])
    assert once is not None and once.t_p_holm == pytest.approx(2 * 0.002833, abs=1e-6)
    assert twice is not None and twice.t_p_holm == once.t_p_holm


@pytest.mark.parametrize(("pairs", "claimed"), [(4, False), (5, True)])
def test_significance_is_claimed_from_five_pairs_on(
    tmp_path: Path, pairs: int, claimed: bool
) -> None:
    base = (4.0, 4.1, 3.9, 4.05, 3.95)
    steps = (0.50, 0.51, 0.49, 0.52, 0.48)
    paths = []
    for seed in range(pairs):
        above = base[seed] + steps[seed]
        paths.append(write_run(tmp_path, f"v{seed}", seed=seed, loss=base[seed]))
        paths.append(write_run(tmp_path, f"o{seed}", "orthogonal", seed=seed, loss=above))
    comparison = compare_runs(paths, "vanilla")
    gap = comparison.variant("orthogonal").gap
    assert gap is not None and gap.t_p is not None
    assert gap.t_p < 1e-4  # n alone makes the difference
    assert gap.significance_claimed == claimed
    if claimed:
        assert verdict(gap) == "loss significantly higher at 5 % (p < 0.0001 after Holm, n = 5)"
        assert comparison.notes == ()
        assert in_short(comparison)[0].startswith("orthogonal: +0.5000 nats per token")
    else:
        assert verdict(gap) == "n = 4 < 5: significance is not claimed"
        quality, cost, sure = in_short(comparison)
        assert quality.startswith(
            "Quality (+ is worse): orthogonal +0.5050 nats per token [+0.4845, +0.5255]"
        )
        assert quality.endswith("perplexity +65.7 %, against vanilla.")
        assert cost.startswith("Cost: orthogonal: ") and "not measured side by side" in cost
        assert sure.startswith("How sure: n = 4, and below 5 pairs of seeds significance is not")


def converging(tmp_path: Path) -> Comparison:
    """The baseline loses 1/32 nat a step; half_speed 1/64. All sums are exact in binary."""
    paths = []
    for variant, slowness in (("vanilla", 32), ("orthogonal", 64)):
        losses = {"loss/train": [8 - step / slowness for step in range(1, STEPS + 1)]}
        for seed in (1, 2):
            name = f"{variant}-{seed}"
            paths.append(write_run(tmp_path, name, variant, seed=seed, columns=losses))
    return compare_runs(paths, "vanilla")


def test_tokens_to_the_baselines_loss_by_hand(tmp_path: Path) -> None:
    """Smoothed over 5 steps the losses are 8 - (n - 2) / 32 and 8 - (n - 2) / 64: step n takes 2 n
    - 2."""
    comparison = converging(tmp_path)
    base, slow = comparison.variants
    assert [reach.steps and reach.steps.mean for reach in base.reaches] == [25, 50, 75, 100]
    assert [reach.steps and reach.steps.mean for reach in slow.reaches] == [48, 98, None, None]
    assert [(reach.reached, reach.pairs) for reach in slow.reaches] == [(2, 2)] * 2 + [(0, 2)] * 2
    first = slow.reaches[0]
    assert first.tokens is not None and first.token_ratio is not None
    assert first.tokens.mean == 48 * BATCH * LENGTH
    assert first.token_ratio.mean == pytest.approx(48 / 25)


def test_smoothing_skips_what_is_not_finite(tmp_path: Path) -> None:
    losses: list[float | None] = [8.0 - n / 32 for n in range(1, STEPS + 1)]
    losses[49] = None
    run = read_finished_run(write_run(tmp_path, "v", columns={"loss/train": losses}))
    smooth = smoothed_loss(run.curves)
    assert np.flatnonzero(np.isnan(smooth)).tolist() == [0, 1, 2, 3, *range(49, 54)]
    first: list[float | None] = [None, *losses[1:49], losses[48], *losses[50:]]
    run = read_finished_run(write_run(tmp_path, "w", columns={"loss/train": first}))
    assert np.flatnonzero(np.isnan(smoothed_loss(run.curves))).tolist() == [0, 1, 2, 3, 4]
    assert smooth[99] == 8 - 98 / 32
    assert smooth[54] == 8 - 53 / 32


def test_stability_by_hand(tmp_path: Path) -> None:
    norms: list[float | None] = [1.0, 3.0] * (STEPS // 2)
    # In the warm-up: neither spikes, which what is not finite always is, nor in the mean.
    norms[:3] = [1e6, None, None]
    losses = [5 - n / 64 + (0.125 if n % 2 else -0.125) for n in range(STEPS)]
    path = write_run(tmp_path, "v", columns={"optim/grad_norm": norms, "loss/train": losses})
    stability = compare_runs([path], "vanilla").variants[0].stability
    after = np.array([1.0, 3.0] * 45)
    noise = (stability.gradient_norm, stability.gradient_norm_variation, stability.loss_variance)
    x = np.arange(25)
    design = np.stack([x, np.ones(25)], axis=1)
    (residual,) = np.linalg.lstsq(design, np.array(losses[75:]), rcond=None)[1]
    wanted = (2.0, after.std(ddof=1) / 2, residual / 23)
    assert [statistic.mean for statistic in noise if statistic] == pytest.approx(wanted)
    assert (stability.spikes, stability.records) == (0, 90)


def test_spikes_by_hand() -> None:
    norms = np.ones(200)
    # Too early; not above twice; a spike; not finite.
    norms[[5, 60, 80, 120]] = (9.0, 2.0, 2.01, np.nan)
    assert np.flatnonzero(spikes(norms)).tolist() == [80, 120]
    risen = spikes(np.r_[np.ones(100), np.full(100, 3.0)])
    assert np.flatnonzero(risen).tolist() == list(range(100, 125))
    for count in (10, 11, 49, 50, 51, 52, 120):  # from the first with a history on
        norms = np.r_[np.ones(count), 2.01]
        assert spikes(norms).tolist() == [False] * count + [True], count
    assert not spikes(np.r_[np.ones(9), 5.0]).any() and spikes(np.full(60, np.nan)).all()
    assert not spikes(np.ones(3)).any()


def test_a_tail_without_a_line_has_no_variance() -> None:
    assert all(math.isnan(tail_variance(np.ones(count))) for count in (1, 4, 9))
    assert math.isnan(tail_variance(np.r_[np.ones(19), np.nan]))
    assert tail_variance(np.r_[np.nan, np.ones(8), 0.0, 3.0, 0.0]) == pytest.approx(6.0)


def test_after_the_warm_up_or_where_that_leaves_nothing_after_a_tenth(tmp_path: Path) -> None:
    for warm_up, first in ((5, 11), (10, 11), (30, 31), (100, 11), (200, 11)):
        changes = {"config.schedule.warmup_steps": warm_up}
        run = read_finished_run(write_run(tmp_path, f"w{warm_up}", changes=changes))
        assert run.curves.steps[after_warm_up(run)].tolist() == list(range(first, 101))


def test_speed_drops_the_first_tenth_and_pools_the_rest(tmp_path: Path) -> None:
    speeds: list[float | None] = [10.0] * 10 + [1500.0] + [1000.0] * 44 + [2000.0] * 44 + [None]
    columns = {"throughput/tokens_per_second": speeds}
    paths = [write_run(tmp_path, f"v{s}", seed=s, columns=columns) for s in (1, 2)]
    speed = compare_runs(paths, "vanilla").variants[0].cost.tokens_per_second
    assert speed is not None
    assert (speed.n, speed.median, speed.low, speed.high) == (178, 1500.0, 1000.0, 2000.0)
    of = quartiles(np.array([4.0, 1.0, 2.0, 3.0, np.nan]))
    assert of is not None and (of.n, of.low, of.median, of.high) == (4, 1.75, 2.5, 3.25)
    assert quartiles(np.array([np.nan])) is None


def test_theory_by_hand(tmp_path: Path) -> None:
    """4 layers of 128: freezing takes 2 d² L = 131,072 of 1,313,024 parameters, 4 d² L FLOPs of a
    token."""
    run = read_finished_run(write_run(tmp_path, "o", "orthogonal"))
    theory = expected_cost(run)
    assert theory is not None
    assert theory.size == run.size == ModelSize(1_181_952, 131_072)
    assert theory.model_flops_per_token - theory.executed_flops_per_token == 4 * 128**2 * 4
    assert replace(theory.states, checkpoint_bytes=run.states.checkpoint_bytes) == run.states
    assert theory.states.checkpoint_bytes == 1_181_952 * 12


@pytest.mark.parametrize(("stage", "trainable"), [(0, 16.0), (1, 5.5), (2, 3.75), (3, 2.0)])
def test_bytes_a_parameter_are_those_of_the_method(
    tmp_path: Path, stage: int, trainable: float
) -> None:
    """bf16 weights and gradients, fp32 Adam, 8 replicas; a frozen parameter always takes 2
    bytes."""
    changes = {
        "config.precision": {"dtype": "bf16", "grad_accum_dtype": "bf16"},
        "environment.world_size": 8,
        "audit.zero_stage": stage,
    }
    run = read_finished_run(write_run(tmp_path, "o", "orthogonal", changes=changes))
    theory = expected_cost(run)
    assert theory is not None
    states = theory.states
    trained = states.weight_bytes + states.gradient_bytes + states.optimizer_state_bytes
    assert trained / 8 == trainable * theory.size.trainable_parameters
    assert states.frozen_bytes / 8 == 2 * theory.size.frozen_parameters
