"""Everything that `compare` writes and prints.

    OUT/report.md report.html comparison.json {loss,gap}.{png,svg} tensorboard/

`tensorboard --logdir OUT/tensorboard` shows VARIANT/seed-N, so that a regular expression picks a
variant or a seed. The entries are links to the runs' own event files: nothing is copied, and later
records show up.
"""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from laboratory.compare import convergence, tables
from laboratory.compare.comparability import common_flops
from laboratory.compare.comparison import Comparison, Variant
from laboratory.compare.compute import BASELINE_LENGTHS, LENGTHS, VALIDATIONS
from laboratory.compare.figures import figures
from laboratory.compare.summary import in_short
from laboratory.compare.trend import Trend, trend_table
from laboratory.runs.finished import FinishedRun
from laboratory.study.gaps import CONFIDENCE, FEWEST_SEEDS, LEVEL, PairedGap, gap_content
from laboratory.study.report import Block, Document, Picture, show, write
from pretrain.reporting.text import share
from pretrain.runs.curves import WARM_UP
from pretrain.runs.directory import RunDirectory

PACKAGES = ("torch", "deepspeed", "megatron-core")
_TAIL = (1 - CONFIDENCE) / 2
_SLOPE_KEYS = ("n", "mean", "sd", "low", "high", "t", "t_p", "t_p_holm", "significance_claimed")
"""Fields of a slope in comparison.json, beside the slope of each seed."""
_CURVES = {
    LENGTHS: "Learning curves: runs of several lengths, of each seed.",
    BASELINE_LENGTHS: "Learning curves: the baseline's runs of several lengths; a variant of one "
    "length (*) is taken to learn with the baseline's mean slope.",
    VALIDATIONS: "Learning curves: each run's own validations, before its learning rate had "
    "fallen. A price past a run's end (*) is therefore too low, and the gap of a cheaper variant "
    "at equal compute too small; runs of several lengths with --subject tokens give the true ones.",
    None: "No learning curve for {}: runs of one length with one validation have none; validate "
    "more often (data.validate_every), or give runs of several lengths with --subject tokens.",
}


@dataclass(frozen=True)
class ModelText:
    """Text that the model of one run wrote after a prompt.

    Attributes:
        variant: Name of the run's variant.
        prompt: Text that the model was asked to continue.
        text: Text that the model wrote.
    """

    variant: str
    seed: int
    prompt: str
    text: str


def write_comparison(
    comparison: Comparison,
    out: Path,
    command: Sequence[Sequence[str]],
    texts: Sequence[ModelText] = (),
) -> Path:
    """Write all files of a comparison, each whole or not at all.

    Args:
        out: directory, made if missing.
        command: Command that made the report, cut where a line may break.
        texts: Texts that models wrote.

    Returns:
        Directory for TensorBoard: the links, or the runs' own where a file system has no links.
    """
    write(comparison_document(comparison, command, texts), out)
    try:
        link_event_files(comparison, out / "tensorboard")
    except OSError:  # exFAT, SMB and others; or real directories in the place of links
        return Path(os.path.commonpath([run.path.absolute() for run in comparison.groups.runs]))
    return out / "tensorboard"


def compare_command(
    runs: Sequence[Path], comparison: Comparison, out: Path
) -> list[tuple[str, ...]]:
    """Return the command that repeats a comparison, split where a line may break.

    Args:
        runs: Run directories as the user gave them.
        out: Directory of the comparison.
    """
    command = [("python", "-m", "pretrain", "compare"), *((str(run),) for run in runs)]
    command += [("--baseline", comparison.baseline), ("--out", str(out))]
    command += [("--subject", name) for name in comparison.subjects]
    command += [("--match", comparison.match)] if comparison.match != "tokens" else []
    return command + ([("--by", comparison.by)] if comparison.by != "settings" else [])


def comparison_document(
    comparison: Comparison, command: Sequence[Sequence[str]], texts: Sequence[ModelText] = ()
) -> Document:
    """Return the document of a comparison: everything that is written except links.

    Args:
        command: Command that made the report, cut where a line may break.
        texts: Texts that models wrote.
    """
    return Document(
        page=report_page(comparison, command, texts),
        content=as_json(comparison)
        | ({"texts": [asdict(text) for text in texts]} if texts else {}),
        figures=figures(comparison),
        content_file="comparison.json",
    )


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Return the content of comparison.json."""
    return {
        "baseline": comparison.baseline,
        "subjects": list(comparison.subjects),
        "match": comparison.match,
        "variants": [_variant_fields(variant) for variant in comparison.variants],
        "trends": [_trend_fields(trend) for trend in comparison.trends],
        "notes": list(comparison.notes),
    }


def _variant_fields(variant: Variant) -> dict[str, Any]:
    fields = _inlined(asdict(replace(variant, runs=()))) | {"runs": _runs(variant)}
    if variant.gap is not None:
        within = {"equivalent_within": variant.gap.equivalent_within}
        fields["gap"] = gap_content(variant.gap) | within
    fields |= {
        "validation_bits_per_byte": variant.loss_bits,
        "gap_bits_per_byte": variant.gap_bits,
        "gap_of_context": variant.gap_of_context,
    }
    if variant.compute is not None:
        fields["compute"] = asdict(variant.compute) | {"gap": _content(variant.compute.gap)}
    fields["source_gaps"] = {key: _content(gap) for key, gap in variant.source_gaps.items()}
    return fields


def _content(gap: PairedGap | None) -> dict[str, Any] | None:
    return gap_content(gap) if gap else None


def _trend_fields(trend: Trend) -> dict[str, Any]:
    """Return a trend as JSON, with the statistics of its slope and the slope of each seed."""
    slope = trend.slope
    by_seed = {str(seed): value for seed, value in zip(slope.seeds, slope.differences, strict=True)}
    kept = {key: getattr(slope, key) for key in _SLOPE_KEYS}
    return {
        "label": trend.label,
        "subject": trend.subject,
        "points": [
            {"value": value, "pairs": gap.n, "mean": gap.mean, "low": gap.low, "high": gap.high}
            for value, gap in trend.gaps.items()
        ],
        "slope": kept | {"by_seed": by_seed},
        "intercept": trend.intercept,
        "residual": trend.residual,
    }


def _runs(variant: Variant) -> list[dict[str, Any]]:
    """Return facts and results of every run."""
    return [
        {"name": run.name, "variant": variant.name, "seed": run.seed, "path": str(run.path)}
        | asdict(run.result)
        for run in variant.runs
    ]


def _inlined(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mapping with the fields of ModelSize and StateBytes in their place."""
    fields: dict[str, Any] = {}
    for key, value in values.items():
        inner = _inlined(value) if isinstance(value, Mapping) else value
        fields |= inner if key in ("size", "states") else {key: inner}
    return fields


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print two tables that fit 100 columns, and the summary sentences."""
    summary = (tables.quality_summary(comparison), tables.cost_summary(comparison))
    show((*_headlines(comparison), *summary, in_short(comparison)), console, lines=True)


def report_page(
    comparison: Comparison, command: Sequence[Sequence[str]], texts: Sequence[ModelText] = ()
) -> list[Block]:
    """Return the blocks of report.md and report.html.

    Args:
        command: Command that made the report, cut where a line may break.
        texts: Texts that models wrote.
    """
    return [
        "# Comparison of runs",
        *_headlines(comparison),
        "## In short",
        in_short(comparison),
        *_quality(comparison),
        *_compute(comparison),
        *_trends(comparison),
        "## Convergence",
        Picture("loss"),
        "Steps and tokens to the training loss that the baseline's run of the same seed had at 25, "
        "50, 75 and 100 % of its tokens; in parentheses, tokens against the baseline's:",
        tables.convergence_table(comparison),
        tables.stability_table(comparison),
        *_cost(comparison),
        "## Runs",
        tables.runs_table(comparison),
        "## How the numbers are made",
        definitions(len(comparison.others), len(comparison.trends)),
        "## Made by",
        "\n".join(["```", " \\\n    ".join(map(shlex.join, command)), "```"]),
        "of",
        _origins(comparison.runs),
        *_texts(texts),
    ]


def _headlines(comparison: Comparison) -> list[str]:
    """Return the sentences on baseline, subject, tokens and unigram perplexity."""
    tokens = sorted({run.result.tokens for run in comparison.runs})
    lengths = sorted({run.config["data"]["sequence_length"] for run in comparison.runs})
    unigram = sorted({round(run.result.unigram_perplexity, 2) for run in comparison.runs})
    subject = f" Subject: {', '.join(comparison.subjects)}." if comparison.subjects else ""
    equal = f"Gaps are at equal {comparison.compute_unit}; those by source at equal tokens."
    if comparison.match == "flops" and (flops := common_flops(comparison.runs)):
        equal = f"Gaps are at equal FLOPs: each run ended after {flops:.4g} executed ones."
    return [
        f"Baseline: {comparison.baseline}.{subject} Each of {len(comparison.runs)} runs trained on "
        f"{_either(tokens)} tokens in sequences of {_either(lengths)}.",
        "Perplexity of the validation text for a model without context (unigram): "
        f"{_either(unigram, ',.2f')}.",
        *([equal] if comparison.match != "tokens" else []),
    ]


def _either(values: Sequence[float], form: str = ",") -> str:
    return " or ".join(format(value, form) for value in values)


def _quality(comparison: Comparison) -> list[Block]:
    blocks: list[Block] = ["## Validation", tables.validation_table(comparison)]
    if comparison.others:
        title = "The gap to the baseline, paired by seed; positive is worse:"
        blocks += [title, tables.gap_table(comparison), Picture("gap")]
        if len(comparison.sources) > 1:
            title = "The gap by source, in nats per token (not tested):"
            blocks += [title, tables.source_gap_table(comparison)]
    return blocks


def _compute(comparison: Comparison) -> list[Block]:
    if not comparison.others:
        return []
    return ["## Equal compute", tables.compute_table(comparison), _prices(comparison)]


def _texts(texts: Sequence[ModelText]) -> list[Block]:
    """Return the models' texts by prompt, fenced by more backticks than they contain."""
    if not texts:
        return []
    title = "What each variant's first run wrote, drawn with one seed."
    blocks: list[Block] = ["## Text of the models", title]
    for prompt in dict.fromkeys(text.prompt for text in texts):
        blocks.append(f"### After “{' '.join(prompt.split())}”")
        for text in (candidate for candidate in texts if candidate.prompt == prompt):
            longest = max([2, *(len(run) for run in re.findall("`+", text.text))])
            fence = "`" * (longest + 1)
            blocks += [f"{text.variant}, seed {text.seed}:", f"{fence}\n{text.text}\n{fence}"]
    return blocks


def _prices(comparison: Comparison) -> list[str]:
    """Return sentences on the origin of the learning curves and on missing numbers."""
    names: dict[str | None, list[str]] = {}
    for variant in comparison.others:
        curve = variant.compute.curve if variant.compute else None
        names.setdefault(curve, []).append(variant.name)
    sentences = [
        _CURVES[curve].format(", ".join(variant_names)) for curve, variant_names in names.items()
    ]
    if not all(variant.bytes_per_token for variant in comparison.variants):
        sentences.append(
            "No bits per byte: the runs' data.json does not have the bytes of the held-out text."
        )
    return sentences


def _trends(comparison: Comparison) -> list[Block]:
    if not comparison.trends:
        return []
    heading = f"## How the gap changes with {comparison.trends[0].subject}"
    return [heading, "In nats per token:", trend_table(comparison.trends)]


def _cost(comparison: Comparison) -> list[Block]:
    blocks: list[Block] = ["## Cost"]
    for stratum in comparison.strata:
        blocks += [f"### {stratum}" if stratum else "", tables.cost_table(comparison, stratum)]
    return blocks


def _origins(runs: Sequence[FinishedRun]) -> list[str]:
    """Return the commits, versions and devices of the runs, the most frequent first."""
    origins: Counter[str] = Counter()
    for run in runs:
        facts = run.environment
        commit = facts.get("git_commit")
        versions = facts.get("packages", {})
        parts = [f"commit {commit[:12]}" if commit else "no commit recorded"]
        parts += [f"{name} {versions[name]}" for name in PACKAGES if name in versions]
        parts += [f"Python {facts['python']}"] if "python" in facts else []
        origins[", ".join([*parts, f"{run.device} × {facts['world_size']}"])] += 1
    return [f"{count} of {len(runs)} runs: {origin}" for origin, count in origins.most_common()]


def gap_definitions(comparisons: int) -> list[str]:
    """Return the formulas of gaps and their tests for a report with `comparisons` gaps."""
    return [
        "Gap: d_i = loss of the variant - loss of the baseline at seed i. The interval is "
        f"mean(d) ± t({(1 + CONFIDENCE) / 2:.3f}, n - 1) sd(d) / √n, not adjusted for the number "
        "of variants. The perplexity gap is exp(mean(d)) - 1, Cohen's d is d_z = mean(d) / sd(d).",
        "Lies within: max(exp(high) - 1, 1 - exp(low)) of the interval, as percent of perplexity, "
        f"rounded up: equivalence at {100 * _TAIL:g} % by two one-sided t-tests, for one variant "
        "by itself. That no difference is significant does not mean that there is none.",
        "Tests: paired t-test and Wilcoxon's signed-rank test, two-sided, each adjusted by Holm "
        f"over all {comparisons} gaps of this report. A difference is called significant if the "
        f"adjusted p of the t-test is below {LEVEL} with at least {FEWEST_SEEDS} pairs.",
    ]


def definitions(comparisons: int, trends: int) -> list[str]:
    """Return the formulas of a report; docs/comparison.md explains them.

    Args:
        comparisons: Number of gaps in the report.
        trends: Number of slopes in the report.
    """
    line = (
        "Change per doubling: for each seed that has a gap at every value x of the subject where "
        "the variant has any, least squares gives gap = a + b log2(x). Mean, interval and t-test "
        f"of b are over these seeds; Holm adjusts over all {trends} slopes of this report. Off the "
        "line: the largest distance of these seeds' mean gaps from the mean line."
    )
    return [
        "Validation loss is the mean over all tokens of the held-out text, in nats per token; "
        "perplexity is its exponential. ± is the standard deviation over seeds (n - 1 in the "
        "denominator).",
        *gap_definitions(comparisons),
        "Equal compute, of each seed: L(t) is the validation loss after t tokens, T are a run's "
        "tokens, c is the cost of a variant's token over one of the baseline (executed FLOPs by "
        "formula, or seconds). Tokens to the baseline's loss: t / T where the variant's L(t) is "
        "the baseline's L(T). Effective compute: c t / T. Gap at equal compute: the variant's loss "
        "minus the baseline's L(c T). Break-even gap: the baseline's L(c T) - L(T). Ratios: "
        "geometric means. What context taught: the unigram loss minus the baseline's loss.",
        *([line] if trends else []),
        f"Convergence: training losses are means over the last {share(convergence.SMOOTHING)} of "
        "the run's records. Loss variance: about the line of least squares over the last "
        f"{share(convergence.TAIL)}. A spike is a gradient norm above "
        f"{convergence.SPIKE_FACTOR:g} times the median of the {convergence.SPIKE_WINDOW} records "
        "before it.",
        "Step time and tokens/s: median [quartiles] over the steps of all runs after each run's "
        f"first {share(WARM_UP)}. Runs made one after the other share a machine with different "
        "company, so no distance to the baseline is shown. Side by side: a ratio of each pair of "
        "runs of one host, device and number of ranks, without a resume, and with no longer pause "
        "than the shorter one took.",
        "Memory is what the live engine held, summed over ranks. By formula: with T trainable and "
        "F frozen parameters, w bytes a weight and D data-parallel replicas, weights T w D "
        "(ZeRO-3: T w), frozen bank F w D, gradients T g D (ZeRO-2 and 3: T g), optimizer state "
        "and checkpoint 12 T, of Muon's matrices 8 T; in fp32 without ZeRO no copy of the weights "
        "is held, 4 T less of optimizer state.",
    ]


def link_event_files(comparison: Comparison, directory: Path) -> None:
    """Link the runs' event files; runs without any are left out.

    Only links are removed from an older directory, and folders that are then empty.

    Args:
        directory: Directory of the links, made if missing.
    """
    for folder in sorted(directory.glob("*")):
        if folder.is_dir() and not folder.is_symlink():
            for link in filter(Path.is_symlink, sorted(folder.iterdir())):
                link.unlink()
            if not any(folder.iterdir()):
                folder.rmdir()
    for group in comparison.groups.groups:
        for run in group.runs:
            events = RunDirectory(run.path).tensorboard
            if events.is_dir():
                # A group's name has spaces and slashes; file systems allow 255 bytes.
                name = re.sub(r"[^A-Za-z0-9+=._,%-]+", "_", group.name)[:200]
                folder = directory / (name.lstrip(".") or "_")
                folder.mkdir(parents=True, exist_ok=True)
                # Relative links survive when the comparison and the runs are moved together.
                target = os.path.relpath(events.resolve(), folder.resolve())
                (folder / f"seed-{run.seed}").symlink_to(target)
