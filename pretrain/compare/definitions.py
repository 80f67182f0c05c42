"""What the report says of how its numbers are made; the constants are those the code uses."""

from __future__ import annotations

from pretrain.compare import convergence
from pretrain.compare.significance import CONFIDENCE, FEWEST_SEEDS, LEVEL
from pretrain.reporting.text import share


def definitions(comparisons: int) -> list[str]:
    """One paragraph for each kind of number, for a report with so many gaps."""
    return [
        "Validation loss is the mean over all tokens of the held-out text, in nats per token; perplexity is "
        "its exponential. ± is the standard deviation over seeds (n - 1 in the denominator).",
        "Gap: d_i = loss of the variant - loss of the baseline at seed i. The interval is "
        f"mean(d) ± t({(1 + CONFIDENCE) / 2:.3f}, n - 1) sd(d) / √n. It is not adjusted for the number of "
        "variants, so it may leave out zero where the adjusted test claims nothing. The perplexity gap is "
        "exp(mean(d)) - 1.",
        "Cohen's d is d_z = mean(d) / sd(d), the formula for paired samples: it measures the gap in units of "
        "its own spread between seeds, not of the spread of losses.",
        "Tests: the paired t-test, two-sided, is the one that claims are made from; the Wilcoxon signed-rank "
        f"test needs no normal distribution and is a check. Holm adjusts each over all {comparisons} gaps of "
        "this report. A difference is called significant if the adjusted p of the t-test is below "
        f"{LEVEL} with at least {FEWEST_SEEDS} pairs. With n pairs the Wilcoxon test cannot give less than "
        "2 / 2ⁿ, which is 0.0625 for 5.",
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
        "benchmarks/step_time.py measures a ratio side by side.",
        "Memory is what the live engine held, summed over ranks. By formula: with T trainable and F frozen "
        "parameters, w bytes a weight and D data-parallel replicas, weights T w D (ZeRO-3: T w), frozen bank "
        "F w D, gradients T g D (ZeRO-2 and 3: T g), optimizer state 12 T, checkpoint "
        "T (w + 12) (ZeRO-3: 12 T).",
    ]
