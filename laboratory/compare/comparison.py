"""Comparison of finished runs as one value, from which everything shown or written is made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from laboratory.compare.compute import EqualCompute, Ratio
from laboratory.compare.convergence import Reach, Stability
from laboratory.compare.theory import Theory
from laboratory.compare.trend import Trend
from laboratory.runs.finished import FinishedRun, ModelSize, StateBytes
from laboratory.study.gaps import FEWEST_SEEDS, PairedGap
from laboratory.study.seeds import Groups
from pretrain.reporting.text import Spread
from pretrain.runs import tags
from pretrain.runs.curves import WARM_UP, Floats


@dataclass(frozen=True)
class Quartiles:
    """Median and quartiles of n values."""

    n: int
    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Cost:
    """Cost of a variant's runs.

    Speeds are over the steps of all runs after each run's first tenth. Counts and bytes are medians
    over the runs, which are equal unless the layout changed.

    Attributes:
        step_seconds: Seconds of a step.
        tokens_per_second: Tokens of all ranks together.
        mfu: Model FLOPs utilization, 0 to 1.
        hfu: Hardware FLOPs utilization, 0 to 1.
        size: parameters.
        states: Bytes of the model states, sums over ranks.
        peak_device_bytes: Peak memory of rank 0's device; None without CUDA.
        peak_host_bytes: Resident memory of rank 0's process.
    """

    step_seconds: Quartiles | None
    tokens_per_second: Quartiles | None
    mfu: Quartiles | None
    hfu: Quartiles | None
    size: ModelSize
    states: StateBytes
    peak_device_bytes: int | None
    peak_host_bytes: int | None


def measured_cost(runs: Sequence[FinishedRun]) -> Cost:
    """Summarise the runs of one variant."""
    return Cost(
        step_seconds=_steady(runs, tags.STEP_SECONDS),
        tokens_per_second=_steady(runs, tags.TOKENS_PER_SECOND),
        mfu=_steady(runs, tags.MFU),
        hfu=_steady(runs, tags.HFU),
        size=ModelSize(*_medians([run.size for run in runs])),
        states=StateBytes(*_medians([run.states for run in runs])),
        peak_device_bytes=_peak(runs, tags.DEVICE_BYTES),
        peak_host_bytes=_peak(runs, tags.HOST_BYTES),
    )


def _medians(records: Sequence[ModelSize] | Sequence[StateBytes]) -> list[Any]:
    """Return the median of each field over the records, rounded; None where no record has it."""
    columns = zip(*map(astuple, records), strict=True)
    recorded = [[value for value in column if value is not None] for column in columns]
    return [round(float(np.median(values))) if values else None for values in recorded]


def quartiles(values: Floats) -> Quartiles | None:
    """Return median and quartiles of the finite values; None if there is none."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return None
    low, median, high = np.percentile(finite, [25, 50, 75])
    return Quartiles(n=len(finite), median=float(median), low=float(low), high=float(high))


def _steady(runs: Sequence[FinishedRun], metric: tags.Metric) -> Quartiles | None:
    parts = [run.curves[metric][run.curves.after(WARM_UP * run.result.steps)] for run in runs]
    return quartiles(np.concatenate(parts))


def _peak(runs: Sequence[FinishedRun], metric: tags.Metric) -> int | None:
    peaks = [np.nanmax(run.curves[metric]) for run in runs if np.isfinite(run.curves[metric]).any()]
    return round(float(np.median(peaks))) if peaks else None


@dataclass(frozen=True)
class Variant:
    """Runs of one variant, in one stratum of the subject, with everything measured and computed.

    Attributes:
        name: Label and stratum.
        label: Name of the method.
        stratum: Values of the subject as text.
        baseline: Name of the variant that this one is compared with.
        runs: Runs of the variant, one a seed.
        validation_loss: Loss in nats per token, over seeds.
        validation_perplexity: Perplexity over seeds.
        perplexity_by_source: {source: perplexity over seeds}.
        gap: Gap at equal `match`; None for the baseline and without a pair of runs.
        source_gaps: {source: gap at equal tokens}, descriptive and not tested.
        reaches: Steps and tokens to the baseline's training loss.
        stability: Noise of loss and gradient norm.
        cost: Measured cost.
        theory: Cost by formula; None where the formulas do not know the config.
        bytes_per_token: Bytes of held-out text per token; None where the runs do not know it.
        compute: The variant at equal compute; None for the baseline.
        speed: Seconds of a token over the baseline's; None where too few pairs were measured side
            by side.
    """

    name: str
    label: str
    stratum: str
    baseline: str
    runs: tuple[FinishedRun, ...]
    validation_loss: Spread | None
    validation_perplexity: Spread | None
    perplexity_by_source: Mapping[str, Spread | None]
    gap: PairedGap | None
    source_gaps: Mapping[str, PairedGap | None]
    reaches: tuple[Reach, ...]
    stability: Stability
    cost: Cost
    theory: Theory | None
    bytes_per_token: float | None
    compute: EqualCompute | None
    speed: Ratio | None = None

    @property
    def is_baseline(self) -> bool:
        """Return whether this variant is a baseline."""
        return self.name == self.baseline

    @property
    def has_few_pairs(self) -> bool:
        """Return whether the gap, if there is one, has too few pairs of seeds for a claim."""
        return self.gap is None or self.gap.n < FEWEST_SEEDS

    @property
    def loss_bits(self) -> float | None:
        """Return the loss in bits per byte of the held-out text."""
        return self._bits(self.validation_loss.mean) if self.validation_loss else None

    @property
    def gap_bits(self) -> float | None:
        """Return the gap in bits per byte of the held-out text."""
        return self._bits(self.gap.mean) if self.gap else None

    def _bits(self, nats: float) -> float | None:
        return nats / math.log(2) / self.bytes_per_token if self.bytes_per_token else None

    @property
    def gap_of_context(self) -> float | None:
        """Return the gap over the loss that context saves the baseline."""
        learned = self.compute.learned if self.compute else None
        return self.gap.mean / learned if self.gap and learned else None


@dataclass(frozen=True)
class Comparison:
    """Comparison of variants.

    Attributes:
        baseline: Name of the baseline.
        subjects: facts or settings whose difference is compared.
        variants: Variants of each stratum, the baseline first, then the others in the order given.
        trends: Lines over a subject that is a number, where each value has its own baseline.
        notes: sentences.
        groups: The runs themselves, with their curves, for the figures.
        match: Quantity that a variant and its baseline have used equally where their gap is:
            tokens, flops or seconds.
        by: What tells variants apart: settings or names.
        seals: Sentences on the hypotheses that were sealed beforehand.
    """

    baseline: str
    subjects: tuple[str, ...]
    variants: tuple[Variant, ...]
    trends: tuple[Trend, ...]
    notes: tuple[str, ...]
    groups: Groups[FinishedRun]
    match: str = "tokens"
    by: str = "settings"
    seals: tuple[str, ...] = ()

    @property
    def compute_unit(self) -> str:
        """Return the unit of compute."""
        return "seconds" if self.match == "seconds" else "FLOPs"

    @property
    def gap_to(self) -> str:
        """Return the name of the gaps, for a figure's axis."""
        equal = "" if self.match == "tokens" else f" at equal {self.compute_unit}"
        return f"gap{equal} to {self.baseline}"

    @property
    def labels(self) -> list[str]:
        """Return every label once, a baseline's first: the order of a figure's colours."""
        first = sorted(self.variants, key=lambda variant: not variant.is_baseline)
        return list(dict.fromkeys(variant.label for variant in first))

    @property
    def strata(self) -> list[str]:
        """Return the values of the subject as text, each once, in their order."""
        return list(dict.fromkeys(variant.stratum for variant in self.variants))

    @property
    def runs(self) -> tuple[FinishedRun, ...]:
        """Return every run, variant by variant."""
        return tuple(self.groups.runs)

    @property
    def others(self) -> tuple[Variant, ...]:
        """Return every variant but the baselines."""
        return tuple(variant for variant in self.variants if not variant.is_baseline)

    @property
    def has_few_pairs(self) -> bool:
        """Return whether every gap has too few pairs of seeds for a claim."""
        return bool(self.others) and all(variant.has_few_pairs for variant in self.others)

    @property
    def sources(self) -> tuple[str, ...]:
        """Return every validated source."""
        return tuple(
            sorted({key for variant in self.variants for key in variant.perplexity_by_source})
        )

    @property
    def in_bits(self) -> bool:
        """Return whether the bytes of the held-out text are known for any variant."""
        return any(variant.bytes_per_token for variant in self.variants)

    def variant(self, name: str) -> Variant:
        """Return the variant of that name."""
        return next(variant for variant in self.variants if variant.name == name)

    def base_of(self, variant: Variant) -> Variant:
        """Return the variant that another is compared with."""
        return self.variant(variant.baseline)
