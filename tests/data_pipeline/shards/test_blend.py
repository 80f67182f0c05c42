"""Blends: whose sample it is, each part's epochs, held-out sets, refusals, what changed."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.errors import DataError
from data_pipeline.shards.blend import Blend, Member, make_blend
from data_pipeline.shards.blend_difference import data_changes
from data_pipeline.shards.manifest import Manifest, read_manifest
from data_pipeline.shards.reading import open_shard
from data_pipeline.shards.samples import TrainingSamples
from data_pipeline.shards.unigram import _token_counts, unigram_perplexity
from data_pipeline.tokenizing.plan import TokenizeOptions
from tests.data_pipeline.helpers import MakeManifest, ShardSpec, Workshop, run

MakeDirectory = Callable[[str, list[ShardSpec]], Manifest]
LENGTH = 8
SOURCES = {1: "Book", 2: "Wiki", 5: "Tales", 6: "Book"}
"""By the thousand of their ids, in what `web` and `stories` train on."""


def documents(first: int, lengths: list[int]) -> list[list[int]]:
    """Documents whose ids are all different, from `first` on."""
    starts = first + np.cumsum([0, *lengths])
    return [
        list(range(start, start + length))
        for start, length in zip(starts.tolist(), lengths, strict=False)
    ]


@pytest.fixture
def make_directory(make_manifest: MakeManifest) -> MakeDirectory:
    """`make_manifest`, any number of times, each in a directory of its own name."""

    def make(name: str, specs: list[ShardSpec]) -> Manifest:
        manifest = make_manifest(specs)
        directory = manifest.directory.rename(manifest.directory.with_name(name))
        return dataclasses.replace(manifest, directory=directory)

    return make


@pytest.fixture
def web(make_directory: MakeDirectory) -> Manifest:
    """Sources Book (ids from 1000) and Wiki (from 2000), a little held out (3000, 4000)."""
    specs: list[ShardSpec] = [
        ("train", "Book", 0, documents(1000, [30, 9, 50, 4, 17, 80, 2])),
        ("train", "Wiki", 0, documents(2000, [11, 25, 6, 40, 40])),
        ("train", "Book", 1, documents(1500, [33, 41])),
        ("validation", "Book", 0, documents(3000, [40])),
        ("validation", "Wiki", 0, documents(4000, [20, 20])),
    ]
    return make_directory("web", specs)


@pytest.fixture
def stories(make_directory: MakeDirectory) -> Manifest:
    """Sources Tales (ids from 5000) and Book (from 6000), of Book something held out (7000)."""
    specs: list[ShardSpec] = [
        ("train", "Tales", 0, documents(5000, [21, 8, 60, 12, 5, 77])),
        ("train", "Book", 0, documents(6000, [50, 50])),
        ("validation", "Book", 0, documents(7000, [60])),
    ]
    return make_directory("stories", specs)


def origins(blocks: np.ndarray) -> list[int]:
    """The thousand that each block's ids come from (id 2 ends a document)."""
    block_thousands = []
    for row in blocks:
        thousands = {int(token) // 1000 for token in row if token != 2}
        assert len(thousands) == 1, "a block mixes parts"
        block_thousands.append(thousands.pop())
    return block_thousands


def test_a_single_directory_is_what_it_was(web: Manifest) -> None:
    plain = TrainingSamples(web, LENGTH, seed=5)
    blended = make_blend([Member(web, 3.0)])
    numbers = np.arange(3 * plain.samples_per_epoch)
    blocks = blended.training_samples(LENGTH, 5).blocks(numbers)
    assert np.array_equal(blocks, plain.blocks(numbers))
    assert blended.fingerprint == web.fingerprint


def test_every_part_gives_its_share_in_every_stretch(web: Manifest, stories: Manifest) -> None:
    blend = make_blend(
        [Member(web, 0.75, {"Wiki": 2, "Book": 1}), Member(stories, 0.25, {"Tales": 1})]
    )
    blocks = blend.training_samples(LENGTH, seed=1).blocks(np.arange(1200))
    block_thousands = np.array(origins(blocks))
    for thousand, share in ((2, 0.5), (1, 0.25), (5, 0.25)):
        counts = np.cumsum(block_thousands == thousand)
        assert np.abs(counts - share * np.arange(1, 1201)).max() < 1


def test_a_blend_tells_the_document_of_every_id(web: Manifest, stories: Manifest) -> None:
    for members in ([Member(web, 1.0)], [Member(web, 0.6), Member(stories, 0.4)]):
        samples = make_blend(members).training_samples(LENGTH, seed=1)
        for number in range(30):
            (block,) = samples.blocks(np.array([number]))
            told = samples.origins(number)
            for token, name in zip(block.tolist(), told, strict=True):
                assert token == 2 or f"-{SOURCES[token // 1000]}_" in name


def test_parts_have_their_own_epochs_and_shuffle_anew_in_each(
    web: Manifest, stories: Manifest
) -> None:
    blend = make_blend([Member(web, 0.9), Member(stories, 0.1, {"Tales": 1})])
    samples = blend.training_samples(LENGTH, 7)
    blocks = samples.blocks(np.arange(3000))
    of_tales = np.array([row[0] >= 5000 or row[-1] >= 5000 for row in blocks])
    for rows, member in ((blocks[of_tales], 0), (blocks[~of_tales], 1)):
        per_epoch = sorted(m.samples_per_epoch for m in samples.members)[member]
        epochs = [
            rows[start : start + per_epoch] for start in range(0, len(rows) - per_epoch, per_epoch)
        ]
        assert len(epochs) > 3
        for epoch in epochs:  # every token at most once as a target
            targets = Counter(epoch[:, 1:].ravel().tolist())
            targets.pop(2)
            assert max(targets.values()) == 1
        assert not np.array_equal(epochs[0], epochs[1])
        assert {tuple(r) for r in epochs[0].tolist()} != {tuple(r) for r in epochs[1].tolist()}


@pytest.mark.distributed  # seconds
def test_the_order_depends_on_data_seed_and_number_only(
    web: Manifest, stories: Manifest, tmp_path: Path
) -> None:
    members = [Member(web, 0.7, {"Wiki": 1, "Book": 3}), Member(stories, 0.3)]
    blend = make_blend(members)
    expected = blend.training_samples(LENGTH, 7).blocks(np.arange(2000))
    twin = make_blend([dataclasses.replace(m, weight=m.weight * 10) for m in reversed(members)])
    assert twin.fingerprint == blend.fingerprint
    assert np.array_equal(twin.training_samples(LENGTH, 7).blocks(np.arange(2000)), expected)
    for start in (1, 613, 1999):
        cache = tmp_path / str(start)
        fresh = blend.training_samples(LENGTH, 7, cache_directory=cache)
        fresh.prepare(start)
        prepared = {*cache.glob("*-blocks.npy")}
        assert np.array_equal(fresh.blocks(np.array([start])), expected[start : start + 1])
        assert {*cache.glob("*-blocks.npy")} == prepared  # no epoch was left to make
        assert np.array_equal(fresh.blocks(np.arange(start, 2000)), expected[start:])
    other = make_blend([dataclasses.replace(members[0], weight=0.6), members[1]])
    assert other.fingerprint != blend.fingerprint
    assert not np.array_equal(blend.training_samples(LENGTH, 8).blocks(np.arange(2000)), expected)


def test_held_out_sets_by_source_over_all_directories(web: Manifest, stories: Manifest) -> None:
    whole = make_blend([Member(web, 1), Member(stories, 1)])
    sets = whole.validation_samples(LENGTH, 6)
    assert list(sets) == ["Book", "Wiki"]
    assert whole.validation_tokens() == {"Book": 41 + 61, "Wiki": 42}
    assert origins(sets["Book"].blocks(np.arange(6))) in ([3, 3, 3, 7, 7, 7], [7, 7, 7, 3, 3, 3])
    assert len(whole.validation_samples(LENGTH, 5)["Book"]) == 5
    assert len(whole.validation_samples(LENGTH, 1)["Book"]) == 1
    assert len(whole.validation_samples(LENGTH, 10_000)["Book"]) == 40 // 8 + 60 // 8
    # Only what is trained on.
    wiki = Member(web, 1, {"Wiki": 1})
    assert list(make_blend([wiki, Member(stories, 1)]).validation_tokens()) == ["Book", "Wiki"]
    assert list(make_blend([wiki]).validation_tokens()) == ["Wiki"]
    assert whole.validation_bytes() == {"Book": 4 * (40 + 60), "Wiki": 4 * 40}


def test_refusals(web: Manifest, stories: Manifest) -> None:
    tokenizer = dataclasses.replace(stories.tokenizer, sha256="1" * 64)
    other = dataclasses.replace(stories, tokenizer=tokenizer)
    tokenizer = dataclasses.replace(stories.tokenizer, eod_id=1)
    ends = dataclasses.replace(stories, tokenizer=tokenizer)
    end = web.tokenizer.eod_id
    cases = [
        ([], "at least one"),
        (
            [Member(web, 1), Member(other, 1)],
            f"{web.directory} and {other.directory} were made with different",
        ),
        ([Member(web, 1), Member(ends, 1)], f"documents end with id {end} in {web.directory} and"),
        ([Member(web, 0), Member(stories, 1)], "weight 0 must be a number above 0"),
        ([Member(web, 1, {"Wiki": -1})], "weight -1 must be"),
        ([Member(web, 1, {})], "with no sources"),
        ([Member(web, 1, {"wiki": 1})], "no train documents of source 'wiki'; it has Book, Wiki"),
        (
            [Member(web, 1), Member(web, 2)],
            f"same data twice, as {web.directory} and {web.directory}",
        ),
        ([Member(web, 1), Member(web, 2, {"Wiki": 1})], f"same data twice, as {web.directory} and"),
    ]
    for members, words in cases:
        with pytest.raises(DataError) as raised:
            make_blend(members)
        assert words in str(raised.value)
    # One directory twice with different sources is no mistake.
    assert len(make_blend([Member(web, 1, {"Book": 1}), Member(web, 2, {"Wiki": 1})]).parts) == 2


def changes(saved: Blend, after: Blend) -> list[str]:
    return data_changes(saved.describe(), after.describe())


def test_what_changed_is_said_with_names(
    web: Manifest, stories: Manifest, make_directory: MakeDirectory
) -> None:
    members = [Member(web, 0.7, {"Wiki": 1, "Book": 3}), Member(stories, 0.3)]
    blend = make_blend(members)
    assert changes(blend, blend) == []
    directory = web.directory.rename(web.directory.with_name("moved"))
    moved = dataclasses.replace(web, directory=directory)
    same = make_blend([members[1], dataclasses.replace(members[0], manifest=moved)])
    assert changes(blend, same) == []

    reweighted = make_blend([Member(moved, 0.7, {"Wiki": 1, "Book": 1}), members[1]])
    assert changes(blend, reweighted) == [
        f"{moved.directory} source Book gives 7/20 of the samples, was 21/40",
        f"{moved.directory} source Wiki gives 7/20 of the samples, was 7/40",
    ]
    without = changes(blend, make_blend([Member(moved, 1, {"Wiki": 1, "Book": 3})]))
    assert without[0] == f"{stories.directory} is no longer there"
    assert f"{moved.directory} source Book gives 3/4 of the samples, was 21/40" in without

    tokenizer = dataclasses.replace(moved.tokenizer, sha256="1" * 64)
    retokenised = make_blend([Member(dataclasses.replace(moved, tokenizer=tokenizer))])
    said = changes(make_blend([Member(moved)]), retokenised)
    assert any("the tokenizer is another one" in change for change in said)

    specs: list[ShardSpec] = [
        ("train", "Tales", 0, documents(5000, [21, 8, 60, 12, 5, 77, 10])),
        ("train", "Poems", 0, documents(6000, [50, 50])),
    ]
    stories.directory.rename(stories.directory.with_name("old"))
    again = make_directory("stories", specs)
    assert changes(make_blend([Member(stories)]), make_blend([Member(again)])) == [
        f"{again.directory} has no source Book any more",
        f"{again.directory} has the new source Poems",
        f"{again.directory} source Tales has 7 documents, was 6",
        f"{again.directory} source Tales has 200 tokens, was 189",
    ]
    other = [("train", "Tales", 0, documents(5001, [21, 8, 60, 12, 5, 77, 10])), specs[1]]
    again.directory.rename(again.directory.with_name("older"))
    shuffled = make_blend([Member(make_directory("stories", other))])
    assert changes(make_blend([Member(again)]), shuffled) == [
        f"{again.directory} source Tales has as many tokens as before but others, or in another "
        f"order"
    ]


def test_unigram_perplexity_of_a_case_done_by_hand(
    make_directory: MakeDirectory, workshop: Workshop
) -> None:
    first = make_directory(
        "first", [("train", "a", 0, [[5, 5, 5, 6]]), ("validation", "a", 0, [[5, 7]])]
    )
    # Train: 5 three times, 6 once, 2 (the end) once; 5 tokens, 60,000 pieces. Held out: 5, 7, 2.
    total = 5 + 60_000
    expected = math.exp(-(math.log(4 / total) + math.log(1 / total) + math.log(2 / total)) / 3)
    assert unigram_perplexity(make_blend([Member(first)])) == pytest.approx(expected)
    # Ten tokens 9 and an end, weighed like the five above: 16 tokens, half of them of each.
    second = make_directory("second", [("train", "a", 0, [[9] * 10])])
    counts = {5: 8 * 3 / 5, 2: 8 / 5 + 8 / 11}
    mixed = [math.log((counts.get(token, 0.0) + 1) / (16 + 60_000)) for token in (5, 7, 2)]
    both = make_blend([Member(first, 1), Member(second, 1)])
    assert unigram_perplexity(both) == pytest.approx(math.exp(-sum(mixed) / 3))
    assert 50 < unigram_perplexity(make_blend([Member(read_manifest(workshop.shards))])) < 1000
    with pytest.raises(DataError, match="second has no held-out tokens"):
        unigram_perplexity(make_blend([Member(second)]))


def _tokenized(
    workshop: Workshop, out: Path, files: slice = slice(None), **options: object
) -> Manifest:
    """Shards of some files of the corpus, with other options than the workshop's."""
    return workshop.tokenize(out, files=files, **{"name": "x"} | options)[0]


def test_the_same_text_in_different_splits_is_refused(workshop: Workshop, tmp_path: Path) -> None:
    usual = _tokenized(workshop, tmp_path / "usual", slice(2))
    more = _tokenized(workshop, tmp_path / "more", slice(1, 2), validation_fraction=0.5)
    said = (
        r"more hold text of the same inputs \(1, the first is .*\) with "
        r".*\(0\.05 / 0 and 0\.5 / 0\)"
    )
    with pytest.raises(DataError, match=said):
        make_blend([Member(usual), Member(more)])
    cut = _tokenized(workshop, tmp_path / "apart", slice(2, 3), validation_fraction=0.5)
    assert len(make_blend([Member(usual), Member(cut)]).parts) == 2  # other inputs
    (entry,) = more.inputs
    renamed = dataclasses.replace(more, inputs=(dataclasses.replace(entry, name="elsewhere.txt"),))
    # Of a file that an earlier version read in parts.
    piece = dataclasses.replace(entry, sha256="1" * 64, end=entry.size - 1)
    parts = [dataclasses.replace(manifest, inputs=(piece,)) for manifest in (usual, more)]
    for pair in ((usual, renamed), parts):
        with pytest.raises(DataError, match="hold text of the same inputs"):
            make_blend([Member(manifest) for manifest in pair])
    again = _tokenized(workshop, tmp_path / "again", slice(1, 2), name="y")
    older = dataclasses.replace(again, options=again.options.copy())
    del older.options["test_fraction"]  # an option that it did not know, and means 0 by
    assert len(make_blend([Member(usual), Member(older)]).parts) == 2
    assert len(make_blend([Member(usual), Member(again)]).parts) == 2  # the same splits
    first, *others = usual.sources("train")
    other = min(set(others) & set(more.sources("train")))
    apart = [Member(usual, 1, {first: 1}), Member(more, 1, {other: 1})]
    make_blend(apart)  # no text in common
    keys = dataclasses.replace(more, options={**more.options, "keys": {"text": "body"}})
    with pytest.raises(DataError, match="hold text of the same inputs"):
        make_blend([apart[0], Member(keys, 1, {other: 1})])  # of one name may be other sources


def test_exact_duplicates_are_found_on_request(workshop: Workshop, tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"document {number} of a few words"}) for number in range(60)]
    for name, part in (("one", lines[:40]), ("two", lines[30:])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(part))
    held_out = {}
    for name, fraction in (("one", 0.5), ("two", 0.0)):
        path = tmp_path / f"{name}.jsonl"
        held_out[name], _ = workshop.tokenize(tmp_path / name, path, validation_fraction=fraction)
    # Their inputs are different files.
    make_blend([Member(manifest) for manifest in held_out.values()])
    settings = TokenizeOptions(name="x", validation_fraction=0.5)
    count = sum(
        settings.split_of(f"document {n} of a few words".encode()) != "train" for n in range(30, 40)
    )
    said = run("verify", tmp_path / "one", "--against", tmp_path / "two").sentence()
    assert f"two trains on {count} documents that {tmp_path / 'one'} holds out" in said and count
    fine = run("verify", workshop.shards, "--against", tmp_path / "two")
    assert fine.code == 0 and "no document is held out in one of 2 directories" in fine.out


def test_ids_are_counted_up_to_a_limit_and_over_chunks(
    web: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each shard counts by its share where the limit is below the total."""
    shards = web.shards_of("train", "Book")
    streams = [np.array(open_shard(web, shard).tokens) for shard in shards]
    total = sum(map(len, streams))
    for chunk in (7, 1 << 22):
        monkeypatch.setattr("data_pipeline.shards.unigram._CHUNK_TOKENS", chunk)
        for limit in (1, total // 2, total, 10_000):
            parts = [ids[: math.ceil(limit * len(ids) / total)] for ids in streams]
            expected = np.bincount(np.concatenate(parts), minlength=web.tokenizer.vocab_size)
            assert np.array_equal(_token_counts(web, shards, limit), expected)
