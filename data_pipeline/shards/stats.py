"""Statistics of a shard directory: a table by split and source, and the lengths of the documents."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from rich.box import SIMPLE_HEAD
from rich.table import Table

from data_pipeline.errors import DataError, needs_extra
from data_pipeline.shards.manifest import Manifest, totals
from data_pipeline.shards.reading import lengths_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BAR = 28
# Bins are powers of two: bin k has the lengths from 2^k to below 2^(k+1).
_BINS = 40


def stats_table(manifest: Manifest) -> Table:
    """Make a table of documents, tokens and bytes per token by split and source, from the manifest alone."""
    title = f"{manifest.name}: {len(manifest.inputs)} inputs, {len(manifest.shards)} shards"
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("split", "source"):
        table.add_column(heading, no_wrap=True)
    for heading in ("documents", "tokens", "MB", "bytes/\ntoken", "tokens/\ndoc"):
        table.add_column(heading, justify="right", no_wrap=True)
    for split, sources in totals(manifest.shards).items():
        rows = list(sources.items())
        if len(rows) > 1:
            rows.append(
                (
                    "all",
                    {key: sum(counts[key] for counts in sources.values()) for key in rows[0][1]},
                )
            )
        for source, counts in rows:
            documents, tokens, text_bytes = (
                counts["documents"],
                counts["tokens"],
                counts["text_bytes"],
            )
            table.add_row(
                split,
                source,
                f"{documents:,}",
                f"{tokens:,}",
                f"{text_bytes / 1e6:,.2f}",
                # The end-of-document ids stand for no bytes of the text.
                f"{text_bytes / max(1, tokens - documents):.2f}",
                f"{tokens / documents:,.0f}",
            )
        table.add_section()
    return table


@dataclass(frozen=True)
class Lengths:
    """Numbers of documents and of tokens of one source by document length, in bins of powers of two."""

    source: str
    documents: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]


def length_histogram(manifest: Manifest) -> list[Lengths]:
    """Count lengths in tokens (end-of-document ids included) of all splits by source, from the .idx files."""
    counts: dict[str, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = {}
    for shard in manifest.shards:
        lengths = lengths_of(manifest, shard)
        bins = np.frexp(lengths)[1] - 1
        documents, tokens = counts.setdefault(
            shard.source, (np.zeros(_BINS, dtype=np.int64), np.zeros(_BINS, dtype=np.int64))
        )
        documents += np.bincount(bins, minlength=_BINS)
        tokens += np.bincount(bins, weights=lengths, minlength=_BINS).astype(np.int64)
    return [Lengths(source, *counts[source]) for source in sorted(counts)]


def histogram_text(histogram: list[Lengths]) -> str:
    """Render all sources together, a line for each bin: documents, their share of the tokens, a bar."""
    documents = np.sum([lengths.documents for lengths in histogram], axis=0)
    tokens = np.sum([lengths.tokens for lengths in histogram], axis=0)
    used = np.flatnonzero(documents)
    lines = ["tokens in a document     documents   of the tokens"]
    for number in range(used[0], used[-1] + 1):
        bar = "#" * round(_BAR * documents[number] / documents.max())
        span = f"{2**number:,} - {2 ** (number + 1) - 1:,}"
        share = tokens[number] / tokens.sum()
        lines.append(f"{span:>20} {documents[number]:>13,} {share:>15.1%}  {bar}".rstrip())
    return "\n".join(lines)


def save_plot(manifest: Manifest, histogram: list[Lengths], path: Path) -> None:
    """Draw the histogram by source as a PNG, or as the ending of the path says; DataError if that fails."""
    with needs_extra(str(path), "compare"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True)
    used = np.flatnonzero(np.sum([lengths.documents for lengths in histogram], axis=0))
    bins = np.arange(used[0], used[-1] + 1)
    for axes, field, title in ((upper, "documents", "documents"), (lower, "tokens", "tokens")):
        _stack(axes, histogram, field, bins)
        axes.set_ylabel(f"share of the {title}")
        axes.spines[["top", "right"]].set_visible(False)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    lower.set_xticks(
        np.append(bins, bins[-1] + 1), [f"{2**edge:,}" for edge in (*bins, bins[-1] + 1)]
    )
    lower.set_xlabel("tokens in a document, end-of-document id included")
    upper.legend(frameon=False, fontsize="small", reverse=True)
    total = sum(shard.tokens for shard in manifest.shards)
    count = sum(shard.documents for shard in manifest.shards)
    upper.set_title(f"{manifest.name}: {count:,} documents, {total:,} tokens", loc="left")
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot write {path}: {error}") from error


def _stack(axes: Axes, histogram: list[Lengths], field: str, bins: npt.NDArray[np.int64]) -> None:
    """Draw a bar for each bin, from its lower to its upper edge, the sources on top of each other."""
    total = sum(int(getattr(lengths, field).sum()) for lengths in histogram)
    bottom = np.zeros(len(bins))
    for lengths in histogram:
        height = getattr(lengths, field)[bins] / total
        axes.bar(bins, height, bottom=bottom, width=0.94, align="edge", label=lengths.source)
        bottom += height
