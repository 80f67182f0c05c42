"""`stats`: the lengths of the documents, as text and as a picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data_pipeline.errors import DataError
from data_pipeline.shards.manifest import read_manifest
from data_pipeline.shards.stats import histogram_text, length_histogram
from data_pipeline.shards.writing import read_lengths
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
    a, b = length_histogram(manifest)
    assert (a.source, b.source) == ("a", "b")
    assert a.documents[:5].tolist() == [1, 2, 1, 1, 0] and a.tokens[:5].tolist() == [1, 5, 4, 8, 0]
    assert b.documents[:5].tolist() == [0, 0, 0, 1, 0] and b.tokens[:5].tolist() == [0, 0, 0, 9, 0]
    lines = histogram_text([a, b]).splitlines()
    assert [line.split()[:4] for line in lines[1:]] == [
        ["1", "-", "1", "1"],
        ["2", "-", "3", "2"],
        ["4", "-", "7", "1"],
        ["8", "-", "15", "2"],
    ]
    assert lines[-1].split()[4] == f"{17 / 27:.1%}" and lines[-1].endswith("#" * 28)


@pytest.mark.distributed
def test_the_command_draws_every_source(workshop: Workshop, tmp_path: Path) -> None:
    shown = run("stats", workshop.shards, "--png", tmp_path / "lengths.png")
    assert shown.code == 0 and "tokens in a document" in shown.out, shown.err
    lines = shown.out.replace(str(tmp_path), "").splitlines()
    assert [line for line in lines if len(line.rstrip()) > 80 or "…" in line] == []
    picture = np.asarray(Image.open(tmp_path / "lengths.png").convert("RGB"))
    colours, counts = np.unique(picture.reshape(-1, 3), axis=0, return_counts=True)
    # The first three colours of matplotlib's cycle, each with an area, for the three sources.
    for colour in ((31, 119, 180), (255, 127, 14), (44, 160, 44)):
        area = counts[(colours == colour).all(axis=1)]
        assert area.size and area[0] > 500
    assert (
        "cannot write" in run("stats", workshop.shards, "--png", tmp_path / "x.nonsense").sentence()
    )


def test_an_index_that_is_damaged_is_named(workshop: Workshop, tmp_path: Path) -> None:
    manifest = read_manifest(workshop.shards)
    source = Path(f"{manifest.prefix(manifest.shards[0])}.idx").read_bytes()
    for content, message in (
        (source[:20], "cut short"),
        (source[:60], "not an index"),
        (b"x" * 99, "not an index"),
    ):
        (tmp_path / "a.idx").write_bytes(content)
        with pytest.raises(DataError, match=rf"a\.idx is {message}"):
            read_lengths(tmp_path / "a")
