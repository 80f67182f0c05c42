"""`stats`: the table, and the lengths of the documents."""

from __future__ import annotations

from data_pipeline.shards.manifest import read_manifest
from data_pipeline.shards.stats import length_histogram
from tests.data_pipeline.helpers import MakeManifest, Workshop, run


def test_bins_are_powers_of_two_and_count_all_splits(make_manifest: MakeManifest) -> None:
    # Lengths, the end-of-document id included: 1, 2, 3, 4 | 8, 9.
    manifest = make_manifest(
        [
            ("train", "a", 0, [[], [5], [5] * 2, [5] * 3]),
            ("validation", "a", 0, [[5] * 7]),
            ("train", "b", 0, [[5] * 8]),
        ]
    )
    lines = length_histogram(manifest).splitlines()
    assert [line.split()[:5] for line in lines[1:]] == [
        ["1", "-", "1", "1", f"{1 / 27:.1%}"],
        ["2", "-", "3", "2", f"{5 / 27:.1%}"],
        ["4", "-", "7", "1", f"{4 / 27:.1%}"],
        ["8", "-", "15", "2", f"{17 / 27:.1%}"],
    ]
    assert lines[-1].endswith("#" * 28)


def test_the_command_shows_every_source_in_eighty_columns(workshop: Workshop) -> None:
    shown = run("stats", workshop.shards)
    assert shown.code == 0 and "tokens in a document" in shown.out, shown.err
    lines = shown.out.replace(str(workshop.shards.parent), "").splitlines()
    assert [line for line in lines if len(line.rstrip()) > 80 or "…" in line] == []
    manifest = read_manifest(workshop.shards)
    assert f"{manifest.tokens('train'):,}" in shown.out
    for source in manifest.sources("train"):
        assert source in shown.out
        assert f"{manifest.tokens('train', source):,}" in shown.out
