"""The picture of attention maps: which runs, which layer, where what stands.

Its numbers: test_runs.py.
"""

from pathlib import Path

import numpy as np

from pretrain.evaluation.heads import attention_maps
from pretrain.evaluation.heads.attention_maps import (
    AttentionMaps,
    caption,
    lowest_seeds,
    maps_figure,
    numbers_file,
)
from pretrain.study.report import Report, write


def uniform(group: str, seed: int = 1, heads: int = 3, positions: int = 8) -> AttentionMaps:
    """Every head attends alike to all that it sees."""
    map_of_one = np.tril(np.ones((positions, positions))) / np.arange(1, positions + 1)[:, None]
    return AttentionMaps(
        f"{group}-{seed}",
        group,
        seed,
        2,
        "prose",
        np.repeat(map_of_one[None], heads, 0).astype(np.float32),
    )


def test_of_each_variant_the_lowest_seed_is_drawn() -> None:
    maps = [uniform("b", 3), uniform("a", 7), uniform("b", 2), uniform("a", 9)]
    assert [one.title for one in lowest_seeds(maps)] == ["b, seed 2", "a, seed 7"]


def test_rows_are_variants_and_columns_heads_on_one_scale_of_colours() -> None:
    figure = maps_figure(
        [uniform("few heads", heads=2), uniform("vanilla", 4), uniform("alone", heads=1)]
    )
    *plots, bar = figure.axes
    visible = [plot.get_visible() for plot in plots]
    assert visible == [True, True, False, True, True, True, True, False, False]
    assert [plot.get_title() for plot in plots] == [
        "head 0",
        "head 1",
        "",
        "",
        "",
        "head 2",
        "",
        "",
        "",
    ]
    names = {place: plot.texts[0].get_text() for place, plot in enumerate(plots) if plot.texts}
    assert names == {0: "few heads\nseed 1", 3: "vanilla\nseed 4", 6: "alone\nseed 1"}
    assert {plot.get_ylabel() for plot in plots[::3]} == {"query position"}
    labelled = [place for place, plot in enumerate(plots) if plot.get_xlabel() == "key position"]
    assert labelled == [4, 5, 6]  # the lowest of each column
    images = [plot.images[0] for plot in plots if plot.get_visible()]
    assert {(image.norm.vmin, image.norm.vmax) for image in images} == {(0.01 / 8, 1)}
    assert bar.get_ylabel() == "attention probability"
    assert "layer 2" in figure.get_suptitle()
    drawn = images[0].get_array()
    assert drawn[3].tolist() == [0.25] * 4 + [None] * 4  # what a query cannot see has no colour


def test_the_caption_says_what_is_drawn_and_that_nothing_follows() -> None:
    text = caption([uniform("a"), uniform("b", heads=2)])
    for part in ("first 3 heads of layer 2", "one sample", "'prose'", "first 8 positions"):
        assert part in text
    assert text.endswith("an illustration, and no measurement.") and text.count(". ") == 0
    assert "the first head of" in caption([uniform("a", heads=1)])


def test_numbers_are_kept_where_they_are_few(tmp_path: Path) -> None:
    maps = [uniform("a"), uniform("b", 2)]
    (tmp_path / "maps.npz").write_bytes(numbers_file(maps) or b"")
    with np.load(tmp_path / "maps.npz") as numbers:
        assert {title: numbers[title].shape for title in numbers} == {
            "a, seed 1": (3, 8, 8),
            "b, seed 2": (3, 8, 8),
        }
    noise = np.random.default_rng(0).random((3, 256, 256), dtype=np.float32)
    assert noise.nbytes > attention_maps.LARGEST_FILE
    assert numbers_file([AttentionMaps("n", "n", 1, 0, "prose", noise)]) is None


def test_a_report_keeps_no_file_of_an_earlier_one_that_it_does_not_have(tmp_path: Path) -> None:
    report = Report(
        "E0", "Nothing", "none.", [], [], [], {}, files={"old.npz": None, "new.npz": b"new"}
    )
    for name in ("old.npz", "new.npz", "another.npz"):
        (tmp_path / name).write_bytes(b"old")
    write(report, tmp_path)
    found = {path.name: path.read_bytes() for path in tmp_path.glob("*.npz")}
    assert found == {"new.npz": b"new", "another.npz": b"old"}
