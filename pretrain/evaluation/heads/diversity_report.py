"""The report of E4 from its measurements."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pretrain.evaluation.heads.attention_maps import (
    AttentionMaps,
    caption,
    lowest_seeds,
    maps_figure,
    numbers_file,
)
from pretrain.evaluation.heads.diversity import LayerDiversity, RunDiversity, summary
from pretrain.reporting.tables import Table
from pretrain.study.report import Report, Verdict, seeds_text, text_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LayerMeasure = Callable[[LayerDiversity], float | None]

MEASURES = (
    ("cosine_max", "max cosine", 3),
    ("cosine_mean", "mean cosine", 3),
    ("row_cosine_max", "max row cosine", 3),
    ("angle_smallest", "min angle", 1),
    ("angle_mean", "mean angle", 1),
    ("overlap", "mean cos²", 3),
    ("divergence", "KL", 3),
    ("entropy", "entropy", 3),
    ("relative_entropy", "relative entropy", 3),
)


@dataclass(frozen=True)
class Limits:
    """The criterion of H4."""

    cosine: float = 0.3
    divergence: float = 1.0


def diversity_report(
    runs: Sequence[RunDiversity], limits: Limits, samples: int, maps: Sequence[AttentionMaps]
) -> Report:
    """All runs in one report; runs of a group are seeds of one another. Of `maps` one of a group is drawn."""
    groups = list(dict.fromkeys(run.group for run in runs))
    by_group = {group: [run for run in runs if run.group == group] for group in groups}
    criterion = (
        f"between the heads of a layer, the largest |cosine| of flattened W_Q or W_K over all layers is "
        f"below {limits.cosine:g} and the mean KL divergence of their attention distributions is above "
        f"{limits.divergence:g} nat."
    )
    drawn = lowest_seeds(maps)
    content = {
        "limits": asdict(limits),
        "samples_per_source": samples,
        "maps": [_what_is_drawn(one) for one in drawn],
        "runs": [
            asdict(run) | {"summary": {"trained": summary(run.trained), "untrained": summary(run.untrained)}}
            for run in runs
        ],
    }
    return Report(
        experiment="E4",
        title="Head diversity",
        criterion=criterion,
        verdicts=[_verdict(group, by_group[group], limits) for group in groups],
        tables=[_summary_table(by_group), *(_layer_table(group, by_group[group]) for group in groups)],
        notes=_notes(runs, samples),
        content=content,
        figures={"diversity": lambda: _figure(by_group, limits), "maps": lambda: maps_figure(drawn)},
        captions={"maps": caption(drawn)},
        files={"maps.npz": numbers_file(drawn)},
    )


def _what_is_drawn(maps: AttentionMaps) -> dict[str, Any]:
    heads, positions, _ = maps.probabilities.shape
    of = {"name": maps.name, "group": maps.group, "seed": maps.seed}
    return {**of, "layer": maps.layer, "heads": heads, "positions": positions, "source": maps.source}


def _verdict(group: str, runs: Sequence[RunDiversity], limits: Limits) -> Verdict:
    found = [summary(run.trained) for run in runs]
    cosines, divergences = ([numbers[key] for numbers in found] for key in ("cosine_max", "divergence"))
    text = f"cosine {seeds_text(cosines)}, KL {seeds_text(divergences)}"
    held = 0
    for cosine, divergence in zip(cosines, divergences, strict=True):
        if divergence is None:
            return Verdict(group, len(runs), None, "one head in a layer: nothing to compare")
        held += (cosine is None or cosine < limits.cosine) and divergence > limits.divergence
    if None in cosines:
        text += " (cosine not applicable, judged by KL alone)"
    return Verdict(group, len(runs), held, text)


def _summary_table(by_group: dict[str, list[RunDiversity]]) -> Table:
    rows = []
    for group, runs in by_group.items():
        for state in ("trained", "untrained"):
            found = [summary(getattr(run, state)) for run in runs]
            cells = [seeds_text([numbers[key] for numbers in found], digits) for key, _, digits in MEASURES]
            rows.append((group, str(len(runs)), state, *cells))
    header = ("variant", "n", "state", *(title for _, title, _ in MEASURES))
    return text_table("Whole model, mean ± sd over seeds", header, rows)


def _layer_table(group: str, runs: Sequence[RunDiversity]) -> Table:
    columns: tuple[tuple[str, LayerMeasure, int], ...] = (
        ("max cosine, W_Q", lambda layer: layer.query.cosine_max if layer.query else None, 3),
        ("max cosine, W_K", lambda layer: layer.key.cosine_max if layer.key else None, 3),
        ("min angle, W_Q", lambda layer: layer.query.angle_smallest if layer.query else None, 1),
        ("min angle, W_K", lambda layer: layer.key.angle_smallest if layer.key else None, 1),
        ("KL", lambda layer: layer.divergence, 3),
        ("entropy", lambda layer: layer.entropy, 3),
        ("relative entropy", lambda layer: layer.relative_entropy, 3),
    )
    rows = [
        (
            str(index),
            *(seeds_text([get(run.trained[index]) for run in runs], digits) for _, get, digits in columns),
        )
        for index in range(len(runs[0].trained))
    ]
    return text_table(f"{group}, trained, by layer", ("layer", *(title for title, _, _ in columns)), rows)


def _notes(runs: Sequence[RunDiversity], samples: int) -> list[str]:
    notes = [
        "Untrained is the same model at initialisation on the same text: what holds there already says "
        "nothing about training. A frozen W is the same in both.",
        "W is the effective matrix before rotary embedding: what the layer makes of the unit vectors of the "
        "normalised hidden state, adapters included, the gain of the LayerNorm before it not.",
        "Cosine: of two heads' flattened matrices, without sign; row cosine: of a row of one head with a row "
        "of another. Angle: principal angles between two heads' row spaces, in degrees; mean cos² is of "
        "these angles, head_dim / hidden_size for random row spaces. Maxima, minima and means are over pairs "
        "of heads, W_Q and W_K, and layers.",
        "Entropy of the attention distributions is in nats; relative entropy is entropy / ln(visible keys), "
        "1 for uniform attention.",
        "KL, in nats, is the mean over ordered pairs of heads of a layer, over positions that see at least "
        f"two keys, and over layers, on the first {samples} held-out samples of each source; rotary "
        "embedding included.",
        "KL grows with the sharpness of attention: it is 0 for uniform attention whatever the weights are.",
    ]
    without = sorted({run.group for run in runs if summary(run.trained)["cosine_max"] is None})
    if without:
        notes.append(
            f"Not applicable (–) for {', '.join(without)}: no two heads, or scores are not a dot product of "
            "linear projections of the hidden state, so there is no W_Q or W_K to compare."
        )
    return notes


def _figure(by_group: dict[str, list[RunDiversity]], limits: Limits) -> Figure:
    from matplotlib.ticker import MaxNLocator

    from pretrain.reporting.plots import GREY, label, legend_below, new_figure

    figure, plots = new_figure(2, 2, height=2.8)
    panels: tuple[tuple[str, str, LayerMeasure, float | None], ...] = (
        ("Largest |cosine| of flattened W", "|cosine|", lambda layer: layer.cosine_max, limits.cosine),
        ("Smallest principal angle", "degrees", _smallest_angle, None),
        ("KL between heads", "nats", lambda layer: layer.divergence, limits.divergence),
        ("Attention entropy / ln(visible keys)", "1 = uniform", lambda layer: layer.relative_entropy, None),
    )
    for plot, (title, unit, get, limit) in zip(plots, panels, strict=True):
        _plot_layers(plot, by_group, get)
        if limit is not None:
            plot.axhline(limit, color=GREY, linestyle="--", linewidth=1)
            plot.annotate(
                "criterion",
                (1, limit),
                xycoords=("axes fraction", "data"),
                xytext=(3, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                color=GREY,
            )
        plot.xaxis.set_major_locator(MaxNLocator(integer=True))
        plot.set_ylim(bottom=0)
        label(plot, title, "layer", unit)
    legend_below(figure, plots[3], rows=2)
    return figure


def _plot_layers(plot: Axes, by_group: dict[str, list[RunDiversity]], get: LayerMeasure) -> None:
    from pretrain.reporting.plots import group_style

    for group, runs in by_group.items():
        colour, marker = group_style(list(by_group), group)
        for state, line, fill in (("trained", "-", colour), ("untrained", ":", "white")):
            layers = [[get(layer) for layer in getattr(run, state)] for run in runs]
            if any(value is None for values in layers for value in values):
                continue
            plot.plot(
                [statistics.mean(values) for values in zip(*layers, strict=True)],  # type: ignore[type-var]
                line,
                color=colour,
                marker=marker,
                markersize=4.5,
                markerfacecolor=fill,
                linewidth=1.4,
                label=group if state == "trained" else f"{group}, untrained",
            )


def _smallest_angle(layer: LayerDiversity) -> float | None:
    found = [role.angle_smallest for role in (layer.query, layer.key) if role is not None]
    return min(found) if found else None
