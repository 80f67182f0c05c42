"""The picture of attention maps: which runs, where what stands. Its numbers: test_runs.py."""

from dataclasses import replace
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


def uniform(group: str, seed: int = 1, heads: int = 3, positions: int = 8) -> AttentionMaps:
    """Every head attends alike to all that it sees."""
    map_of_one = np.tril(np.ones((positions, positions))) / np.arange(1, positions + 1)[:, None]
    return AttentionMaps(
        name=f"{group}-{seed}",
        group=group,
        seed=seed,
        layer=2,
        source="prose",
        probabilities=np.repeat(map_of_one[None], heads, 0).astype(np.float32),
    )


def test_of_each_variant_the_lowest_seed_is_drawn() -> None:
    maps = [uniform("b", 3), uniform("a", 7), uniform("b", 2), uniform("a", 9)]
    assert [one.title for one in lowest_seeds(maps)] == ["b, seed 2", "a, seed 7"]


def test_rows_are_variants_and_columns_heads_on_one_scale_of_colours() -> None:
    rows = [uniform("few heads", heads=2), uniform("vanilla", 4), uniform("alone", heads=1)]
    figure = maps_figure(rows)
    *plots, bar = figure.axes
    visible = [plot.get_visible() for plot in plots]
    assert visible == [True, True, False, True, True, True, True, False, False]
    titles = {place: plot.get_title() for place, plot in enumerate(plots) if plot.get_title()}
    assert titles == {0: "head 0", 1: "head 1", 5: "head 2"}
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
    assert numbers_file([replace(maps[0], probabilities=noise)]) is None
