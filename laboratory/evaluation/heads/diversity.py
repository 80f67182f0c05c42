"""Experiment E4: how different the heads of a layer are, in their weights and in their attention.

Every run is measured as trained and, as a reference, as initialised: what holds before the first
step is no merit of training. In the functions of tensors, H is heads, d head_dim, n hidden_size, t
queries, s keys.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from megatron.core.models.gpt import GPTModel

from laboratory.evaluation.heads.trained_model import TrainedModel, losses_of
from laboratory.reporting.plots import GREY, group_style, label, legend_below, new_figure, remark
from laboratory.study.report import Report, Verdict, seeds_text, text_table
from laboratory.study.seeds import by_group
from megatron_patches.attention.heads import attention_observed, head_weights
from pretrain.data.open import RunData
from pretrain.model.build import build_model
from pretrain.model.packing import document_layout
from pretrain.ranks.groups import ParallelContext
from pretrain.reporting.tables import Table


@dataclass(frozen=True)
class WeightDiversity:
    """Differences between the heads of one role in one layer.

    Attributes:
        cosine_mean: Mean |cosine| of two flattened heads.
        cosine_max: Largest of these.
        row_cosine_mean: Mean |cosine| of rows of two heads.
        row_cosine_max: Largest of these.
        angle_smallest: The smallest principal angle of two heads, in degrees.
        angle_mean: Mean of these angles.
        overlap: Mean cos² of the principal angles; head_dim / hidden_size for random subspaces.
    """

    cosine_mean: float
    cosine_max: float
    row_cosine_mean: float
    row_cosine_max: float
    angle_smallest: float
    angle_mean: float
    overlap: float


@dataclass(frozen=True)
class LayerDiversity:
    """Diversity of one layer, means over positions that see two keys or more.

    Attributes:
        query: Diversity of W_Q; None where the layer has no such matrices, or fewer than two heads.
        key: Diversity of W_K.
        divergence: KL between heads, in nats; None of one head.
        entropy: Entropy of the attention, in nats.
        relative_entropy: Entropy / ln(visible keys), 1 for uniform attention.
    """

    query: WeightDiversity | None
    key: WeightDiversity | None
    divergence: float | None
    entropy: float
    relative_entropy: float


def measure_diversity(model: GPTModel, data: RunData, samples: int) -> list[LayerDiversity]:
    """Measure every layer of a model on one process.

    Args:
        model: The model, in evaluation mode.
        data: Held-out text.
        samples: Samples of each source that the attention is measured on, the first ones.
    """
    layers = model.decoder.layers
    sums = np.zeros((len(layers), 3))
    positions = 0
    for source in data.validation.values():
        for number in range(min(samples, len(source))):
            seen, count = _attention_sums(model, data, source.blocks(np.array([number])))
            sums += seen
            positions += count
    one_head = model.config.num_attention_heads == 1
    measured = []
    for layer, (divergence, nats, relative) in zip(
        layers, (sums / positions).tolist(), strict=True
    ):
        weights = head_weights(layer.self_attention)
        query, key = (
            weight_diversity(getattr(weights, role)) if weights else None
            for role in ("query", "key")
        )
        measured.append(
            LayerDiversity(
                query=query,
                key=key,
                divergence=None if one_head else divergence,
                entropy=nats,
                relative_entropy=relative,
            )
        )
    return measured


def _attention_sums(model: GPTModel, data: RunData, blocks: np.ndarray) -> tuple[np.ndarray, int]:
    """Return sums over positions of divergence, entropy and relative entropy, `[layers, 3]`.

    Of ids `[batch, seq + 1]`. Only positions that see two keys or more count; their number is
    returned too.
    """
    inputs = torch.from_numpy(blocks[:, :-1]).to(next(model.parameters()).device)
    visible = torch.arange(1, inputs.size(1) + 1, device=inputs.device).expand_as(inputs)
    if data.boundary is not None:
        visible = document_layout(inputs, data.boundary).positions + 1
    # A position that sees one key has no choice: entropy and divergence are 0 in every model.
    several = visible >= 2
    sums = np.zeros((len(model.decoder.layers), 3))

    def observe(layer: int, probabilities: torch.Tensor, _: torch.Tensor | None) -> None:
        heads = probabilities.size(1)
        divergence = pairwise_divergence(probabilities).sum((-1, -2)) / max(1, heads * (heads - 1))
        nats = entropy(probabilities).mean(1)
        relative = nats / visible.clamp(min=2).log()
        for column, values in enumerate((divergence, nats, relative)):
            sums[layer, column] = float(values[several].sum(dtype=torch.float64))

    with attention_observed(model, observe):
        losses_of(model, data, blocks)
    return sums, int(several.sum())


def flat_cosines(weights: torch.Tensor) -> torch.Tensor:
    """Return cos(vec W_g, vec W_h) of every two heads, `[H, H]`, of weights `[H, d, n]`."""
    flat = torch.nn.functional.normalize(weights.flatten(1), dim=1)
    return flat @ flat.t()


def row_cosines(weights: torch.Tensor) -> torch.Tensor:
    """Return the cosines of every two heads' rows, `[H, H, d, d]`, of weights `[H, d, n]`."""
    rows = torch.nn.functional.normalize(weights, dim=2)
    return torch.einsum("gin,hjn->ghij", rows, rows)


def principal_angles(weights: torch.Tensor) -> torch.Tensor:
    """Return the principal angles between the row spaces of every two heads, ascending, in degrees.

    With U_g, U_h orthonormal bases of the row spaces, cos θ_1 ≥ … ≥ cos θ_d are the singular values
    of U_gᵀ U_h (Björck and Golub 1973). Angles below a hundred-thousandth of a degree come out as
    that or 0. Row spaces of one random draw each have a mean cos² θ of d/n.

    Args:
        weights: `[H, d, n]` of full row rank, d ≤ n; float64 for the accuracy above.

    Returns:
        `[H, H, d]`.
    """
    bases = torch.linalg.qr(weights.transpose(1, 2)).Q  # [H, n, d]
    cosines = torch.linalg.svdvals(torch.einsum("gni,hnj->ghij", bases, bases))
    return torch.rad2deg(torch.arccos(cosines.clamp(max=1.0)))


def pairwise_divergence(probabilities: torch.Tensor) -> torch.Tensor:
    """Return the divergence of every two heads' distributions, in nats.

    KL(p_g ‖ p_h) = Σ_s p_g(s) ln(p_g(s) / p_h(s)). A probability that underflowed to 0 counts as
    the smallest normal number of its type in the denominator, so that the result is finite.

    Args:
        probabilities: `[..., H, t, s]`.

    Returns:
        `[..., t, H, H]`.
    """
    p = probabilities.movedim(-3, -2)  # [..., t, H, s]
    smallest = torch.finfo(p.dtype).tiny
    log = p.clamp(min=smallest).log()
    negative_entropy = (p * log).sum(-1, keepdim=True)
    return negative_entropy - p @ log.transpose(-1, -2)


def entropy(probabilities: torch.Tensor) -> torch.Tensor:
    """Return −Σ_s p(s) ln p(s), in nats: `[..., s]` -> `[...]`; ln n of n equal weights."""
    return torch.special.entr(probabilities).sum(-1)


def between_heads(pairs: torch.Tensor) -> torch.Tensor:
    """Return the entries of two different heads, `[H, H, ...]` -> `[H (H − 1), ...]`."""
    return pairs[~torch.eye(len(pairs), dtype=torch.bool, device=pairs.device)]


def weight_diversity(weights: torch.Tensor) -> WeightDiversity | None:
    """Measure `[heads, head_dim, hidden]` float64; None for one head."""
    if len(weights) < 2:
        return None
    cosines = between_heads(flat_cosines(weights)).abs()
    rows = between_heads(row_cosines(weights)).abs()
    angles = between_heads(principal_angles(weights))
    return WeightDiversity(
        cosine_mean=float(cosines.mean()),
        cosine_max=float(cosines.max()),
        row_cosine_mean=float(rows.mean()),
        row_cosine_max=float(rows.max()),
        angle_smallest=float(angles.min()),
        angle_mean=float(angles.mean()),
        overlap=float(torch.deg2rad(angles).cos().square().mean()),
    )


@dataclass(frozen=True)
class RunDiversity:
    """Diversity of one run, layer by layer.

    Attributes:
        trained: Layers after training.
        untrained: Layers at initialisation.
    """

    name: str
    group: str
    seed: int
    trained: Sequence[LayerDiversity]
    untrained: Sequence[LayerDiversity]


def measure_run(
    trained: TrainedModel, group: str, context: ParallelContext, samples: int
) -> RunDiversity:
    """Measure a run's model, and the same model at initialisation.

    Args:
        trained: The run's model, with its data.
        group: Name of the run's group.
        context: Process groups of the one process.
        samples: Samples of each source that the attention is measured on.
    """
    # Initial weights follow from the run's seed, so they need not have been saved.
    untrained = build_model(trained.config, context).eval()
    return RunDiversity(
        trained.run.name,
        group,
        trained.run.seed,
        trained=measure_diversity(trained.model, trained.data, samples),
        untrained=measure_diversity(untrained, trained.data, samples),
    )


Reduce = Callable[[Sequence[float]], float]

MEASURES: Mapping[str, tuple[str, int, Reduce]] = {
    "cosine_max": ("max cosine", 3, max),
    "cosine_mean": ("mean cosine", 3, statistics.mean),
    "row_cosine_max": ("max row cosine", 3, max),
    "angle_smallest": ("min angle", 1, min),
    "angle_mean": ("mean angle", 1, statistics.mean),
    "overlap": ("mean cos²", 3, statistics.mean),
    "divergence": ("KL", 3, statistics.mean),
    "entropy": ("entropy", 3, statistics.mean),
    "relative_entropy": ("relative entropy", 3, statistics.mean),
}
"""{measure of a role or of a layer: (title, digits shown, what makes one number of several)}"""


def summary(layers: Sequence[LayerDiversity]) -> dict[str, float | None]:
    """Return one number for each measure, over layers and roles; None where not applicable."""
    parts = [part for layer in layers for part in (layer, layer.query, layer.key)]
    numbers: dict[str, float | None] = {}
    for measure, (_, _, reduce) in MEASURES.items():
        values = [value for part in parts if (value := getattr(part, measure, None)) is not None]
        numbers[measure] = reduce(values) if values else None
    return numbers


STATES = ("trained", "untrained")
"""Attributes of `RunDiversity` with a model's layers."""


@dataclass(frozen=True)
class Limits:
    """Criterion of the hypothesis.

    Attributes:
        cosine: Largest cosine between heads.
        divergence: Least KL between heads, in nats.
    """

    cosine: float = 0.3
    divergence: float = 1.0


def diversity_report(runs: Sequence[RunDiversity], limits: Limits, samples: int) -> Report:
    """Return the report of all runs.

    Args:
        limits: The criterion.
        samples: Samples of each source that the attention was measured on.
    """
    groups = by_group(runs)
    criterion = (
        "between the heads of a layer, the largest |cosine| of flattened W_Q or W_K over all "
        f"layers is below {limits.cosine:g} and the mean KL divergence of their attention "
        f"distributions is above {limits.divergence:g} nat."
    )
    return Report(
        experiment="E4",
        title="Head diversity",
        criterion=criterion,
        verdicts=[_verdict(group, members, limits) for group, members in groups.items()],
        tables=[_summary_table(groups)],
        notes=_notes(runs, samples),
        content={
            "limits": asdict(limits),
            "samples_per_source": samples,
            "runs": [
                asdict(run) | {"summary": {state: summary(getattr(run, state)) for state in STATES}}
                for run in runs
            ],
        },
        figures={"diversity": lambda: diversity_figure(groups, limits)},
    )


def _verdict(group: str, runs: Sequence[RunDiversity], limits: Limits) -> Verdict:
    summaries = [summary(run.trained) for run in runs]
    cosines, divergences = (
        [numbers[key] for numbers in summaries] for key in ("cosine_max", "divergence")
    )
    text = f"cosine {seeds_text(cosines)}, KL {seeds_text(divergences)}"
    held = 0
    for cosine, divergence in zip(cosines, divergences, strict=True):
        if divergence is None:
            return Verdict(group, len(runs), None, "one head in a layer: nothing to compare")
        held += (cosine is None or cosine < limits.cosine) and divergence > limits.divergence
    if None in cosines:
        text += " (cosine not applicable, judged by KL alone)"
    return Verdict(group, len(runs), held, text)


def _summary_table(groups: Mapping[str, Sequence[RunDiversity]]) -> Table:
    rows = []
    for group, runs in groups.items():
        for state in STATES:
            numbers = [summary(getattr(run, state)) for run in runs]
            cells = [
                seeds_text([run_numbers[key] for run_numbers in numbers], MEASURES[key][1])
                for key in MEASURES
            ]
            rows.append((group, str(len(runs)), state, *cells))
    header = ("variant", "n", "state", *(title for title, _, _ in MEASURES.values()))
    return text_table("Whole model, mean ± sd over seeds", header, rows)


def _notes(runs: Sequence[RunDiversity], samples: int) -> list[str]:
    notes = [
        "Untrained is the same model at initialisation on the same text: what holds there already "
        "says nothing about training. A frozen W is the same in both.",
        "Maxima, minima and means are over pairs of heads, W_Q and W_K, and layers; attention is "
        f"that on the first {samples} held-out samples of each source. docs/evaluation.md defines "
        "every measure.",
        "KL grows with the sharpness of attention: it is 0 for uniform attention whatever the "
        "weights are.",
    ]
    without = sorted({run.group for run in runs if summary(run.trained)["cosine_max"] is None})
    if without:
        notes.append(
            f"Not applicable (–) for {', '.join(without)}: no two heads, or scores are not a dot "
            "product of linear projections of the hidden state, so there is no W_Q or W_K to "
            "compare."
        )
    return notes


def diversity_figure(groups: Mapping[str, Sequence[RunDiversity]], limits: Limits) -> Figure:
    """Draw cosines, angles, divergence and entropy of each group over the layers.

    Args:
        groups: {group: what was measured of its runs}.
        limits: The criterion.
    """
    figure, plots = new_figure(2, 2, height=2.8)
    panels = (
        ("Largest |cosine| of flattened W", "|cosine|", "cosine_max", limits.cosine),
        ("Smallest principal angle", "degrees", "angle_smallest", None),
        ("KL between heads", "nats", "divergence", limits.divergence),
        ("Attention entropy / ln(visible keys)", "1 = uniform", "relative_entropy", None),
    )
    for plot, (title, unit, measure, limit) in zip(plots, panels, strict=True):
        _plot_layers(plot, groups, measure)
        if limit is not None:
            plot.axhline(limit, color=GREY, linestyle="--", linewidth=1)
            remark(plot, "criterion", (1, limit), offset=(3, 0), va="center")
        plot.xaxis.set_major_locator(MaxNLocator(integer=True))
        plot.set_ylim(bottom=0)
        label(plot, title, "layer", unit)
    legend_below(figure, plots[3], rows=2)
    return figure


def _plot_layers(plot: Axes, groups: Mapping[str, Sequence[RunDiversity]], measure: str) -> None:
    for group, runs in groups.items():
        colour, marker = group_style(list(groups), group)
        for state, line, fill in (("trained", "-", colour), ("untrained", ":", "white")):
            layers = [[summary([layer])[measure] for layer in getattr(run, state)] for run in runs]
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
