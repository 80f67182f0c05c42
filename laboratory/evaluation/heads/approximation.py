"""Experiment E1: error of approximating a function of a sequence, by width and depth of the model.

The function is the kernel regression in context of docs/evaluation.md. The model is this program's
own transformer block (the one that is pretrained, without positions) between a linear map of (x_t,
z_t) and a linear read-out, trained on fresh samples at every step, so the error is of approximation
and optimisation, never of generalisation from a finite set.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TypeAlias

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter
from megatron.core.transformer.transformer_block import TransformerBlock

from laboratory.reporting.plots import label, legend_below, new_figure, plot_seeds
from laboratory.reporting.progress import WorkDisplay
from laboratory.study.gaps import CONFIDENCE, SCORES, paired_gap
from laboratory.study.report import Report, Verdict, seeds_text, text_table
from megatron_patches.engine.freeze import parameter_groups
from megatron_patches.model.initialize import normal_rows
from pretrain.config.load import load_config
from pretrain.config.schedule import learning_rate
from pretrain.config.tree import Config
from pretrain.errors import UserError
from pretrain.model.build import build_model
from pretrain.ranks.groups import ParallelContext
from pretrain.ranks.single_process import one_process
from pretrain.reporting.tables import Table
from pretrain.reporting.text import share

LENGTH, BATCH, TEST_SEQUENCES = 32, 32, 512
BANDWIDTH = 0.3
HEADS = 4
FEATURES = 3
TEST_SEED = 2**40
"""Far from any training seed, which is (seed, step) below."""
DIGITS = 4

Errors: TypeAlias = Mapping[str, Mapping[tuple[int, int], Sequence[float]]]
"""{variant: {(width, depth): error of each seed}}"""


@dataclass(frozen=True)
class Grid:
    """Models to train; the first variant is what the others are compared with.

    Attributes:
        variants: Names of variants.
        widths: Values of model.hidden_size, ascending.
        depths: Values of model.num_layers, ascending.
        seeds: Seeds 1 … this.
        steps: Optimizer steps of each.
        learning_rate: Peak of AdamW.
    """

    variants: tuple[str, ...]
    widths: tuple[int, ...]
    depths: tuple[int, ...]
    seeds: int
    steps: int
    learning_rate: float

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Return every (width, depth)."""
        return [(width, depth) for width in self.widths for depth in self.depths]

    def config(self, variant: str, width: int, depth: int, seed: int) -> Config:
        """Return the model and its optimizer as a run's configuration.

        Args:
            variant: Name of a variant.
            width: model.hidden_size.
            depth: model.num_layers.
            seed: run.seed.

        Raises:
            UserError: the variant is unknown or is more than a model, or HEADS does not divide the
                width.
        """
        values = {
            "run.name": "approximation",
            "run.seed": seed,
            "attention.variant": variant,
            "model.num_layers": depth,
            "model.hidden_size": width,
            "model.num_attention_heads": HEADS,
            "model.vocab_size": 2,  # of an embedding that is not used
            "model.position_embedding": "learned",  # not used either: the task has no positions
            "data.sequence_length": LENGTH,
            "optimizer.learning_rate": self.learning_rate,
            "schedule.steps": self.steps,
            "schedule.warmup_steps": self.steps // 10,
            "parallel.tensor_model_parallel_size": 1,
        }
        config = load_config("demo", [f"{key}={value}" for key, value in values.items()])
        if config.policy.penalty or config.policy.phases:
            raise UserError(
                f"--variants has '{variant}', whose penalty or schedule belongs to the training "
                "loop of a run and would do nothing in this experiment; leave it out"
            )
        return config


@dataclass(frozen=True)
class Trial:
    """Result of one model.

    Attributes:
        variant: Name of the variant.
        width: model.hidden_size.
        depth: model.num_layers.
        seed: run.seed.
        error: Mean squared error on the test set / variance of the targets there.
    """

    variant: str
    width: int
    depth: int
    seed: int
    error: float
    trainable_parameters: int


def run_grid(grid: Grid) -> list[Trial]:
    """Train every model of the grid, in a fixed order; deterministic on one machine.

    Raises:
        UserError: an error is not finite; as `Grid.config`, before anything is trained.
    """
    plan = [
        (variant, width, depth, seed)
        for width, depth in grid.sizes
        for variant in grid.variants
        for seed in range(1, grid.seeds + 1)
    ]
    # All configurations first: a mistake in the last must not show after hours of training.
    configs = [grid.config(*point) for point in plan]
    trials = []
    with one_process() as context, WorkDisplay(len(plan)) as work:
        for point, config in zip(plan, configs, strict=True):
            title = "{}, width {}, depth {}, seed {}".format(*point)
            work.begin(title)
            regressor = Regressor(config, context)
            error = train(regressor, config)
            if not math.isfinite(error):
                raise UserError(f"the error of {title} is {error}; lower --learning-rate")
            count = sum(p.numel() for p in regressor.parameters() if p.requires_grad)
            trials.append(Trial(*point, error=error, trainable_parameters=count))
    return trials


class Regressor(torch.nn.Module):
    """Model `[batch, seq, FEATURES]` -> `[batch, seq]` around the decoder of `build_model`."""

    def __init__(self, config: Config, context: ParallelContext) -> None:
        super().__init__()
        self.decoder: TransformerBlock = build_model(config, context).decoder
        width = config.model.hidden_size
        rows = partial(normal_rows, config.run.seed)
        self.embed = torch.nn.Parameter(
            rows("regression.input", range(width), FEATURES, FEATURES**-0.5)
        )
        self.read_out = torch.nn.Parameter(
            rows("regression.output", range(1), width, width**-0.5)[0]
        )
        self.to(context.device)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden = (features @ self.embed.t()).transpose(0, 1).contiguous()  # [seq, batch, hidden]
        return (self.decoder(hidden, attention_mask=None) @ self.read_out).transpose(0, 1)


def train(regressor: Regressor, config: Config) -> float:
    """Train on fresh samples, the same for every variant.

    Returns:
        The mean squared error on the test set divided by the variance of the targets there.
    """
    device = regressor.embed.device
    optimizer = torch.optim.AdamW(
        parameter_groups(regressor, config.optimizer.weight_decay),
        betas=config.optimizer.betas,
        eps=config.optimizer.eps,
    )
    for step in range(1, config.total_steps + 1):
        # Fewer than 2^20 steps, so that no two seeds share a sample.
        features, targets = kernel_regression(config.run.seed * 2**20 + step, BATCH)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config.optimizer, config.schedule, step, config.total_steps)
        loss = (regressor(features.to(device)) - targets.to(device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(regressor.parameters(), config.optimizer.gradient_clip)
        optimizer.step()
    features, targets = kernel_regression(TEST_SEED, TEST_SEQUENCES)
    regressor.eval()
    with torch.no_grad():
        squares = (regressor(features.to(device)).cpu() - targets).square()
    return float(squares.mean(dtype=torch.float64) / targets.double().var())


def kernel_regression(seed: int, sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw samples of the function that is approximated, in float32.

    Args:
        seed: Seed of the draws.
        sequences: Number of samples.

    Returns:
        Inputs `[sequences, LENGTH, FEATURES]` and targets `[sequences, LENGTH]`.
    """
    generator = torch.Generator().manual_seed(seed)
    features = torch.rand(sequences, LENGTH, FEATURES, generator=generator) * 2 - 1
    points, values = features[..., :2], features[..., 2]
    distances = (points[:, :, None] - points[:, None]).square().sum(-1)
    # Nadaraya-Watson regression, causal: position t averages the values up to t.
    kernel = torch.exp(-distances / (2 * BANDWIDTH**2)).tril()
    return features, (kernel @ values[..., None])[..., 0] / kernel.sum(-1)


def errors_by_model(trials: Sequence[Trial]) -> Errors:
    """Return the errors of every variant and size, by ascending seed."""
    errors: dict[str, dict[tuple[int, int], list[float]]] = {}
    for trial in sorted(trials, key=lambda trial: trial.seed):
        of_variant = errors.setdefault(trial.variant, {})
        of_variant.setdefault((trial.width, trial.depth), []).append(trial.error)
    return errors


def approximation_report(grid: Grid, trials: Sequence[Trial], tolerance: float) -> Report:
    """Return the report of the error by width and depth, every variant beside the first.

    Args:
        tolerance: Share by which a variant's error may exceed the first one's in the largest model.
    """
    errors = errors_by_model(trials)
    return Report(
        experiment="E1",
        title="Function approximation",
        criterion=(
            f"the error in the largest model (width {grid.widths[-1]}, depth {grid.depths[-1]}) "
            f"is below that in the smallest (width {grid.widths[0]}, depth {grid.depths[0]}), and "
            f"at most {100 * tolerance:g} % above that of {grid.variants[0]}, seed by seed."
        ),
        verdicts=[_verdict(grid, errors, variant, tolerance) for variant in grid.variants],
        tables=_tables(grid, errors),
        notes=_notes(grid),
        content={
            "tolerance": tolerance,
            "settings": asdict(grid),
            "trials": [asdict(trial) for trial in trials],
        },
        figures={"approximation": lambda: _figure(grid, errors)},
    )


def _verdict(grid: Grid, errors: Errors, variant: str, tolerance: float) -> Verdict:
    smallest, largest = grid.sizes[0], grid.sizes[-1]
    small, large = errors[variant][smallest], errors[variant][largest]
    best = errors[grid.variants[0]][largest]
    excess = [
        100 * (error / baseline_error - 1)
        for error, baseline_error in zip(large, best, strict=True)
    ]
    falls = [
        large_error < small_error for small_error, large_error in zip(small, large, strict=True)
    ]
    text = (
        f"error {seeds_text(small, DIGITS)} in the smallest, {seeds_text(large, DIGITS)} in the "
        "largest model"
    )
    if variant == grid.variants[0]:
        return Verdict(
            variant, len(large), sum(falls), f"{text} (the baseline: judged by the fall alone)"
        )
    held = sum(fall and more <= 100 * tolerance for fall, more in zip(falls, excess, strict=True))
    return Verdict(
        variant, len(large), held, f"{text}, {seeds_text(excess, 1)} % above the baseline"
    )


def _tables(grid: Grid, errors: Errors) -> list[Table]:
    """Return the errors of all sizes and variants, and their ratios to the first variant's."""
    baseline, *compared = grid.variants
    error_rows, ratio_rows = [], []
    for size in grid.sizes:
        names = (*map(str, size), str(grid.seeds))
        reference, *others = (errors[variant][size] for variant in grid.variants)
        error_rows.append(
            (*names, *(seeds_text(values, DIGITS) for values in (reference, *others)))
        )
        ratio_rows.append((*names, *(_ratio_text(values, reference) for values in others)))
    header = ("width", "depth", "n")
    ratio_title = (
        f"Error / error of {baseline} at the same size and seed: geometric mean with its "
        f"{share(CONFIDENCE)} interval"
    )
    return [
        text_table("Error, mean ± sd over seeds", (*header, *grid.variants), error_rows),
        text_table(ratio_title, (*header, *compared), ratio_rows),
    ]


def _ratio_text(errors: Sequence[float], reference: Sequence[float]) -> str:
    """Return the geometric mean of error ratios at equal seeds, with its interval."""
    logarithms, reference_logarithms = (
        dict(enumerate(map(math.log, values))) for values in (errors, reference)
    )
    gap = paired_gap("", logarithms, reference_logarithms, SCORES)
    assert gap is not None
    mean = f"{math.exp(gap.mean):.2f}"
    if gap.low is None or gap.high is None:
        return mean
    return f"{mean} [{math.exp(gap.low):.2f}, {math.exp(gap.high):.2f}]"


def _notes(grid: Grid) -> list[str]:
    return [
        "Error is the mean squared error divided by the variance of the targets: 1 for the best "
        f"constant. It is taken on {TEST_SEQUENCES} fixed sequences; training sees fresh ones at "
        f"every step ({grid.steps} steps of {BATCH} sequences of {LENGTH}, peak learning rate "
        f"{grid.learning_rate:g}, not tuned per size or variant). The task is in "
        f"docs/evaluation.md, its kernel {BANDWIDTH:g} wide.",
        f"Every model has {HEADS} heads of width / {HEADS}; width is hidden_size, depth "
        "num_layers.",
        "A trained model's error contains what the optimizer did not reach, and a finite grid "
        "shows a trend, not a limit: neither that the error goes to 0 nor that it does not "
        "follows from this.",
    ]


def _figure(grid: Grid, errors: Errors) -> Figure:
    figure, (by_width, by_depth) = new_figure(1, 2, height=3.4)
    width, depth = grid.widths[-1], grid.depths[-1]
    _plot(by_width, grid, errors, {value: (value, depth) for value in grid.widths})
    label(by_width, f"By width, at depth {depth}", "hidden_size", "error (1: best constant)")
    by_depth.sharey(by_width)
    _plot(by_depth, grid, errors, {value: (width, value) for value in grid.depths})
    label(by_depth, f"By depth, at width {width}", "num_layers", "error (1: best constant)")
    legend_below(figure, by_width)
    return figure


def _plot(plot: Axes, grid: Grid, errors: Errors, sizes: Mapping[int, tuple[int, int]]) -> None:
    """Plot the errors of `sizes`, {place on the x axis: (width, depth)}."""
    for index, variant in enumerate(grid.variants):
        # Error bars must not hide one another.
        shift = 1.03 ** (index - (len(grid.variants) - 1) / 2)
        by_size = [errors[variant][size] for size in sizes.values()]
        plot_seeds(
            plot, [value * shift for value in sizes], by_size, groups=grid.variants, group=variant
        )
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    plot.set_xscale("log", base=2)
    plot.set_yscale("log")
    plot.xaxis.set_major_locator(FixedLocator(list(sizes)))
    plot.xaxis.set_minor_locator(FixedLocator([]))
    plot.xaxis.set_major_formatter(plain)
    plot.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    plot.yaxis.set_major_formatter(plain)
    plot.yaxis.set_minor_formatter(NullFormatter())
