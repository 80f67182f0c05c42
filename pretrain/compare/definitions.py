"""What the report says of how its numbers are made; the constants are those the code uses."""

from __future__ import annotations

from pretrain.compare import convergence
from pretrain.reporting.text import share
from pretrain.study.gaps import CONFIDENCE, FEWEST_SEEDS, LEVEL

_TAIL = (1 - CONFIDENCE) / 2


def definitions(comparisons: int, trends: int = 0) -> list[str]:
    """One paragraph for each kind of number, for a report with so many gaps and trends."""
    return [
        "Validation loss is the mean over all tokens of the held-out text, in nats per token; perplexity is "
        "its exponential. ± is the standard deviation over seeds (n - 1 in the denominator).",
        "Gap: d_i = loss of the variant - loss of the baseline at seed i. The interval is "
        f"mean(d) ± t({(1 + CONFIDENCE) / 2:.3f}, n - 1) sd(d) / √n. It is not adjusted for the number of "
        "variants, so it may leave out zero where the adjusted test claims nothing. The perplexity gap is "
        "exp(mean(d)) - 1.",
        "Lies within: the smallest symmetric margin that contains the whole interval, as percent of "
        "perplexity: max(exp(high) - 1, 1 - exp(low)), rounded up. A claim of equivalence within this margin "
        f"and any larger one would hold at {100 * _TAIL:g} % by two one-sided t-tests, for one variant by "
        f"itself. With fewer than {FEWEST_SEEDS} pairs none is given. That no difference is significant "
        "does not mean that there is none.",
        "Cohen's d is d_z = mean(d) / sd(d), the formula for paired samples: it measures the gap in units of "
        "its own spread between seeds, not of the spread of losses.",
        "Tests: the paired t-test, two-sided, is the one that claims are made from; the Wilcoxon signed-rank "
        f"test needs no normal distribution and is a check. Holm adjusts each over all {comparisons} gaps of "
        "this report. A difference is called significant if the adjusted p of the t-test is below "
        f"{LEVEL} with at least {FEWEST_SEEDS} pairs. With n pairs the Wilcoxon test cannot give less than "
        "2 / 2ⁿ, which is 0.0625 for 5.",
        *(_trend_definitions(trends) if trends else []),
        f"Convergence: training losses are smoothed over the last {share(convergence.SMOOTHING)} of the "
        "run's records; a loss is reached at the first record that is at most it. A mean is given only if "
        "every run got there.",
        "Loss variance: of the training loss about its line of least squares over the last "
        f"{share(convergence.TAIL)} of the records.",
        "Gradient norms are those before clipping, after the first tenth of the steps and the learning "
        "rate's warm-up. The coefficient of variation is sd / mean over a run's steps. A spike is a norm "
        f"above {convergence.SPIKE_FACTOR:g} times the median of the {convergence.SPIKE_WINDOW} records "
        "before it.",
        "Step time and tokens/s: median [quartiles] over the steps of all runs after each run's first "
        f"{share(convergence.WARM_UP)}. By formula, a step would take time in proportion to its executed "
        "FLOPs. Runs made one after the other share a machine with different company: "
        "benchmarks/step/measure.py measures a ratio side by side.",
        "Memory is what the live engine held, summed over ranks. By formula: with T trainable and F frozen "
        "parameters, w bytes a weight and D data-parallel replicas, weights T w D (ZeRO-3: T w), frozen bank "
        "F w D, gradients T g D (ZeRO-2 and 3: T g), optimizer state 12 T, checkpoint "
        "T (w + 12) (ZeRO-3: 12 T).",
    ]


def _trend_definitions(trends: int) -> list[str]:
    return [
        "Change per doubling: for each seed that has a gap at every value x of the subject where the variant "
        "has any, least squares over that seed's gaps gives gap = a + b log2(x). Mean, interval and t-test "
        "of b are over these seeds, so pairs stay pairs and gaps at different values are not taken to be "
        f"independent. Holm adjusts over all {trends} slopes of this report; significance is claimed as for "
        "gaps. Off the line: the largest distance of these seeds' mean gaps from the mean line. An "
        "extrapolation is the mean of what the seeds' lines give there, its interval by Student's t over "
        "seeds. Gaps at a value are over all pairs there, as in the table of gaps.",
    ]
