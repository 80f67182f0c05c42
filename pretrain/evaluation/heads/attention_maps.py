"""Picture beside E4: the attention of the first heads of a layer in one held-out sample."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from megatron_patches.attention.heads import attention_observed
from pretrain.errors import UserError
from pretrain.evaluation.heads.trained_model import TrainedModel, losses_of
from pretrain.reporting.plots import in_lines, new_figure
from pretrain.runs.finished import FinishedRun
from pretrain.study.seeds import by_group

HEADS = 3
"""Heads of a layer that are drawn, beside each other."""
LARGEST_FILE = 200_000
"""Bytes: numbers that come to more are not kept beside the picture."""
_COLOURS = "magma_r"  # perceptually uniform, in grey too; the more attention, the darker


@dataclass(frozen=True)
class AttentionMaps:
    """Attention of the first heads of a layer of one trained run in its first held-out sample.

    Attributes:
        name: of the run.
        group: of the run.
        seed: of the run.
        layer: number of the layer, from 0.
        source: of the sample, the first of the run's data.
        probabilities: `[heads, query position, key position]` float32, of the first positions. No
            key stands after its query, so rows sum to 1 though the rest of the sample is cut off.
    """

    name: str
    group: str
    seed: int
    layer: int
    source: str
    probabilities: npt.NDArray[np.float32]

    @property
    def title(self) -> str:
        """Return group and seed."""
        return f"{self.group}, seed {self.seed}"

    @property
    def about(self) -> dict[str, Any]:
        """Return what is drawn, without the numbers."""
        heads, positions, _ = self.probabilities.shape
        run = {"name": self.name, "group": self.group, "seed": self.seed}
        return {
            **run,
            "layer": self.layer,
            "heads": heads,
            "positions": positions,
            "source": self.source,
        }


def chosen_layer(wanted: int | None, runs: Sequence[FinishedRun]) -> int:
    """Return the layer to draw of all runs, from 0.

    Args:
        wanted: what the user asks for; None: the middle one of the shallowest run.
        runs: the runs that are drawn.

    Raises:
        UserError: a run has no such layer.
    """
    layers, name = min((int(run.config["model"]["num_layers"]), run.name) for run in runs)
    if wanted is None:
        return layers // 2
    if not 0 <= wanted < layers:
        raise UserError(
            f"--maps-layer is {wanted}, but run '{name}' has {layers} layers: "
            f"give a number from 0 to {layers - 1}"
        )
    return wanted


def observe_maps(trained: TrainedModel, group: str, layer: int, positions: int) -> AttentionMaps:
    """Observe one forward pass of a model on one process.

    Args:
        trained: the model, with its data.
        group: name of the run's group.
        layer: number of the layer, from 0.
        positions: the first positions of the sample, at most; of HEADS heads at most.
    """
    source, samples = next(iter(trained.data.validation.items()))
    seen: dict[int, torch.Tensor] = {}

    def observe(number: int, probabilities: torch.Tensor, _: torch.Tensor | None) -> None:
        if number == layer:
            seen[number] = probabilities[0, :HEADS, :positions, :positions].cpu()

    with attention_observed(trained.model, observe):
        losses_of(trained.model, trained.data, samples.blocks(np.array([0])))
    return AttentionMaps(
        name=trained.run.name,
        group=group,
        seed=trained.run.seed,
        layer=layer,
        source=source,
        probabilities=seen[layer].numpy(),
    )


def lowest_seeds(maps: Sequence[AttentionMaps]) -> list[AttentionMaps]:
    """Return of every group the run with the lowest seed, groups in the order given."""
    return [min(own, key=lambda one: one.seed) for own in by_group(maps).values()]


def caption(maps: Sequence[AttentionMaps]) -> str:
    """Return one sentence on what the picture of `maps` shows, and that nothing follows from it."""
    heads = max(len(one.probabilities) for one in maps)
    positions = max(one.probabilities.shape[-1] for one in maps)
    which = f"the first {heads} heads" if heads > 1 else "the first head"
    return (
        f"Attention of {which} of layer {maps[0].layer} in one sample, the first held-out one of "
        f"source '{maps[0].source}', at its first {positions} positions, after training, in the "
        "run of the lowest seed of each variant: an illustration, and no measurement."
    )


def numbers_file(maps: Sequence[AttentionMaps]) -> bytes | None:
    """Return an .npz with {title: probabilities}; None where that is larger than LARGEST_FILE."""
    content = io.BytesIO()
    np.savez_compressed(content, **{one.title: one.probabilities for one in maps})  # type: ignore[arg-type]
    return content.getvalue() if content.tell() <= LARGEST_FILE else None


def maps_figure(maps: Sequence[AttentionMaps]) -> Figure:
    """Draw a row for each of `maps` and a column for each head, all in one scale of colours."""
    heads = [len(one.probabilities) for one in maps]
    positions = max(one.probabilities.shape[-1] for one in maps)
    figure, plots = new_figure(len(maps), HEADS, height=2.4)
    # From a hundredth of what uniform attention over all positions would give; anything less looks
    # the same.
    scale = LogNorm(0.01 / positions, 1.0)
    for place, plot in enumerate(plots):
        row, head = divmod(place, HEADS)
        if head >= heads[row]:
            plot.set_visible(False)
            continue
        # What a query cannot see stays white.
        seen = np.ma.masked_equal(maps[row].probabilities[head], 0)
        plot.imshow(seen, norm=scale, cmap=_COLOURS, interpolation="nearest")
        plot.grid(visible=False)
        plot.locator_params(nbins=5, integer=True)
        if head == 0:
            _name_row(plot, maps[row])
        if head >= max(heads[:row], default=0):  # the first row with this head
            plot.set_title(f"head {head}", fontsize="medium")
        if head >= max(heads[row + 1 :], default=0):  # the last one
            plot.set_xlabel("key position")
    colours = ScalarMappable(scale, _COLOURS)
    figure.colorbar(
        colours, ax=plots, label="attention probability", extend="min", aspect=40, shrink=0.9
    )
    figure.suptitle(
        f"Attention in layer {maps[0].layer}: one sample, the first {positions} positions",
        fontsize="large",
    )
    return figure


def _name_row(first: Axes, maps: AttentionMaps) -> None:
    first.set_ylabel("query position")
    first.annotate(
        f"{in_lines(maps.group)}\nseed {maps.seed}",
        (0, 0.5),
        (-6, 0),
        xycoords=(first.yaxis.label, "axes fraction"),
        textcoords="offset points",
        rotation="vertical",
        ha="right",
        va="center",
        multialignment="center",
    )
