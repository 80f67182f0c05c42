"""Statistics of a shard directory: a table by split and source, and lengths of documents."""

from __future__ import annotations

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from data_pipeline.io.words import shown_in_line
from data_pipeline.shards.manifest import Manifest, totals
from data_pipeline.shards.reading import lengths_of

_BAR = 28
_SOURCE_WIDTH = 40
# Bins are powers of two: bin k has the lengths from 2^k to below 2^(k+1).
_BINS = 40


def stats_table(manifest: Manifest) -> Table:
    """Make a table of counts and ratios by split and source, from the manifest alone."""
    title = f"{manifest.name}: {len(manifest.inputs)} inputs, {len(manifest.shards)} shards"
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("split", "source"):
        table.add_column(heading, no_wrap=True, max_width=_SOURCE_WIDTH)
    for heading in ("documents", "tokens", "MB", "bytes/\ntoken", "tokens/\ndoc"):
        table.add_column(heading, justify="right", no_wrap=True)
    for split, sources in totals(manifest.shards).items():
        rows = dict(sources)
        if len(sources) > 1:
            counts_by_source = sources.values()
            rows["all"] = {
                key: sum(counts[key] for counts in counts_by_source)
                for key in next(iter(counts_by_source))
            }
        for source, counts in rows.items():
            documents = counts["documents"]
            tokens = counts["tokens"]
            table.add_row(
                split,
                Text(shown_in_line(source)),
                f"{documents:,}",
                f"{tokens:,}",
                f"{counts['text_bytes'] / 1e6:,.2f}",
                # The end-of-document ids stand for no bytes of the text.
                f"{counts['text_bytes'] / max(1, tokens - documents):.2f}",
                f"{tokens / documents:,.0f}",
            )
        table.add_section()
    return table


def length_histogram(manifest: Manifest) -> str:
    """Render the lengths of all documents in tokens, end-of-document ids included.

    Returns:
        One line per bin: documents, their share of the tokens, a bar.
    """
    documents = np.zeros(_BINS, dtype=np.int64)
    tokens = np.zeros(_BINS)
    for shard in manifest.shards:
        lengths = lengths_of(manifest, shard)
        # The exponent of a float is exact, where a rounded logarithm may miss a power of two.
        bins = np.frexp(lengths)[1] - 1
        documents += np.bincount(bins, minlength=_BINS)
        tokens += np.bincount(bins, weights=lengths, minlength=_BINS)
    used = np.flatnonzero(documents)
    lines = ["tokens in a document     documents   of the tokens"]
    for number in range(used[0], used[-1] + 1):
        bar = "#" * round(_BAR * documents[number] / documents.max())
        span = f"{2**number:,} - {2 ** (number + 1) - 1:,}"
        share = tokens[number] / tokens.sum()
        lines.append(f"{span:>20} {documents[number]:>13,} {share:>15.1%}  {bar}".rstrip())
    return "\n".join(lines)
