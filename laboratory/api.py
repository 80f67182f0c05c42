"""Comparisons from Python, which users import from `pretrain.api`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from data_pipeline.io.home import expand_home
from laboratory.compare.losses import compare_losses
from laboratory.runs.finished import FinishedRun, read_finished_run
from laboratory.study import gaps
from megatron_patches.recipe.variants import ORDINARY

if TYPE_CHECKING:
    from laboratory.compare.comparison import Comparison

__all__ = ["FinishedRun", "compare", "compare_losses", "load_run", "paired_gaps"]

AnyPath = str | os.PathLike[str]


def load_run(run: AnyPath) -> FinishedRun:
    """Load a finished run from its directory: configuration, result, sizes, curves; no weights."""
    return read_finished_run(expand_home(run))


def compare(
    runs: Sequence[AnyPath],
    baseline: str = ORDINARY,
    subjects: Sequence[str] = (),
    match: str = "tokens",
    out: AnyPath | None = None,
    *,
    by: str = "settings",
) -> Comparison:
    """Compare finished runs, several seeds of each variant, as the verb `compare` does.

    Args:
        runs: Run directories.
        baseline: A variant, or the name of a run.
        subjects: Keys that may differ because they are what is compared, such as model.num_layers.
        match: tokens, flops or seconds.
        out: Directory for the report; None: none is written.
        by: What tells variants apart: settings or names.
    """
    from laboratory.compare.compare_runs import compare_runs
    from laboratory.compare.report import compare_command, write_comparison

    paths = [expand_home(run) for run in runs]
    comparison = compare_runs(paths, baseline, subjects, match, by=by)
    if out is not None:
        write_comparison(
            comparison, expand_home(out), compare_command(paths, comparison, expand_home(out))
        )
    return comparison


def paired_gaps(
    losses: Mapping[str, Mapping[int, float]], baseline: str
) -> dict[str, gaps.PairedGap]:
    """Compare losses of any models, paired by seed: intervals, tests, Holm's correction.

    Args:
        losses: {model: {seed: nats per token}}.
        baseline: The model to compare with.

    Returns:
        {model: its gap to the baseline}, over the seeds that both have.

    Raises:
        UserError: a model and the baseline have no seed in common.
    """
    return gaps.paired_gaps(losses, baseline, gaps.NATS)
