"""What is in a shard directory, as a table."""

from __future__ import annotations

from rich.table import Table

from data_pipeline.manifest import Manifest, totals


def stats_table(manifest: Manifest) -> Table:
    """Documents, tokens and bytes per token for every split and source, from the manifest alone."""
    table = Table(title=f"{manifest.name}: {len(manifest.inputs)} input files, {len(manifest.shards)} shards")
    for heading in ("split", "source"):
        table.add_column(heading, no_wrap=True)
    for heading in ("documents", "tokens", "MB", "bytes/token", "tokens/doc"):
        table.add_column(heading, justify="right")
    for split, sources in totals(manifest.shards).items():
        rows = list(sources.items())
        if len(rows) > 1:
            rows.append(("all", {key: sum(counts[key] for counts in sources.values()) for key in rows[0][1]}))
        for source, counts in rows:
            documents, tokens, text_bytes = counts["documents"], counts["tokens"], counts["text_bytes"]
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
